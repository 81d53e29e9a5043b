"""Cluster: the machines of a run, who works on them, where its experience is kept, and what somebody should look at.

A thousand workers are told as a few groups (by node, role and state); `members` gives those of one group.
"""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

from understudy.cluster.status import EVENTS, NOW
from understudy.dashboard.api.cluster_file import Cluster, Node, Role
from understudy.dashboard.api.targets import Place

MAX_EVENTS = 100
MAX_MEMBERS = 200  # of a group, at once
MAX_TROUBLED = 20  # shown one by one
ROOM_S = 60.0  # to wait for room before it is an alarm: a node may just be joining
BAD = ("lost", "stuck", "gone")
STATES = (*BAD, "waiting for room", "starting", "up", "ended")
ROLES = ("learner", "shard", "inference", "rollout", "actor", "evaluator")
NOWHERE = ""  # the node of who has none


def cluster_view(place: Place) -> dict[str, Any]:
    """What the page shows first."""
    file = place.cluster
    there = file.read()
    if there is None:
        return {"absent": True, "problem": file.problem}
    events, earlier = file.events(MAX_EVENTS)
    return {
        "driver": {
            "state": there.state,
            "silent_s": there.silent_s,
            "updated_s": there.updated_s,
            "pid": there.pid,
            "host": there.host,
            "address": there.address,
            "error": there.error,
            "config": there.config,
        },
        "troubles": troubles(place),
        "totals": totals(there),
        "nodes": _nodes(there),
        "kinds": _groups(there.roles),
        "troubled": [{**asdict(one), "host": host_of(there, one.node)} for one in _troubled(there)[:MAX_TROUBLED]],
        "num_troubled": len(_troubled(there)),
        "shards": [{**asdict(one), "host": host_of(there, one.node)} for one in there.shards],
        "counts": asdict(there.counts),
        "events": [asdict(event) for event in events],
        "earlier": earlier,
        "log": str(place.path / EVENTS),
    }


def members(place: Place, node: str, role: str, offset: int) -> dict[str, Any]:
    """Who belongs to a group, those in trouble first."""
    there = place.cluster.read()
    found = [] if there is None else [one for one in there.roles if (one.node or NOWHERE) == node and one.role == role]
    found.sort(key=lambda one: (_rank(STATES, one.state), _natural(one.name)))
    first = max(offset, 0)
    return {"total": len(found), "offset": first, "rows": [asdict(one) for one in found[first : first + MAX_MEMBERS]]}


def totals(there: Cluster) -> dict[str, Any]:
    """Machines, and what is used of them."""
    alive = [node for node in there.nodes if node.alive]
    return {
        "nodes": len(there.nodes),
        "alive": len(alive),
        "cpus": sum(node.cpus for node in alive),
        "gpus": sum(node.gpus for node in alive),
        "used_cpus": sum(node.cpus - node.free_cpus for node in alive),
        "used_gpus": sum(node.gpus - node.free_gpus for node in alive),
        "memory_bytes": sum(node.memory_bytes for node in alive),
        "roles": len(there.roles),
        "steps": sum(shard.steps for shard in there.shards),
        "lost_steps": sum(shard.lost_steps for shard in there.shards),
    }


def host_of(there: Cluster, node: str | None) -> str | None:
    """The name of a node's machine; of one that is not listed (any more), the node's own."""
    return next((one.host or one.id for one in there.nodes if one.id == node), node)


def _nodes(there: Cluster) -> list[dict[str, Any]]:
    by_node: dict[str, list[Role]] = {}
    for role in there.roles:
        by_node.setdefault(role.node or NOWHERE, []).append(role)
    known = list(there.nodes)
    missing = sorted(by_node.keys() - {node.id for node in known} - {NOWHERE})
    known += [Node(id=name, host=name) for name in missing]  # gone from the list, but not from the memory
    found = [{**asdict(node), "groups": _groups(by_node.get(node.id, []))} for node in known]
    if NOWHERE in by_node:
        found.append({**asdict(Node()), "groups": _groups(by_node[NOWHERE])})
    return found


def _groups(roles: Iterable[Role]) -> list[dict[str, Any]]:
    by_role: dict[str, list[Role]] = {}
    for one in roles:
        by_role.setdefault(one.role, []).append(one)
    found = []
    for role, group in sorted(by_role.items(), key=lambda pair: (_rank(ROLES, pair[0]), pair[0])):
        states = Counter(one.state for one in group)
        doing = Counter(re.sub(r"\d[\d.,]*", "…", one.doing) for one in group if one.doing and one.state == "up")
        found.append(
            {
                "role": role,
                "total": len(group),
                "restarts": sum(one.restarts for one in group),
                "states": sorted(states.items(), key=lambda pair: _rank(STATES, pair[0])),
                "doing": doing.most_common(2),
                "only": group[0].doing if len(group) == 1 else None,
            }
        )
    return found


def _troubled(there: Cluster) -> list[Role]:
    found = [one for one in there.roles if one.state in BAD]
    return sorted(found, key=lambda one: (_rank(ROLES, one.role), _rank(BAD, one.state), _natural(one.name)))


def _rank(known: tuple[str, ...], name: str) -> int:
    return known.index(name) if name in known else len(known)


def _natural(name: str) -> list[tuple[int, str]]:
    """rollout-0-10 after rollout-0-9."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d{1,18})", name)]


# ---- what somebody should look at


def troubles(place: Place) -> list[dict[str, Any]]:
    """What is wrong with the cluster, the worst first; each says what, and what to do."""
    file = place.cluster
    there = file.read()
    if there is None:
        why = file.problem
        return [] if why is None else [_trouble("warn", f"{NOW} makes no sense", f"{why}; the driver writes it anew")]
    found = _driver(place, there) + _shards(there)
    if there.state in ("running", "silent"):
        found += _crew(there)
    return sorted(found, key=lambda one: one["level"] != "bad")


def _trouble(level: str, what: str, detail: str) -> dict[str, Any]:
    return {"level": level, "what": what, "detail": detail, "view": "cluster"}


def _driver(place: Place, there: Cluster) -> list[dict[str, Any]]:
    again = f"`understudy resume {place.path} --cluster ...` goes on from the last checkpoint and the shards' disks"
    who = f"process {there.pid} on {there.host}"
    if there.state == "gone":
        return [_trouble("bad", "the driver is gone", f"{who} was killed, and its workers with it; {again}")]
    if there.state == "silent":
        return [
            _trouble(
                "bad",
                f"the driver has been silent for {_span(there.silent_s)}",
                f"what is below was so then. Look at {who}: if it is dead, {again}",
            )
        ]
    if there.state == "failed":
        return [_trouble("bad", "the run failed", f"{there.error or 'it did not say why'}; mend it, then {again}")]
    return []


def _shards(there: Cluster) -> list[dict[str, Any]]:
    found = []
    for shard in there.shards:
        if shard.state == "lost" or shard.lost_steps:
            goes_on = (
                "an empty shard took its place, and the run goes on" if shard.state == "up" else "it is not replaced"
            )
            say = (
                f"{shard.lost_steps:,} acknowledged steps were in {shard.path} on a disk that no node has any more; "
                f"{goes_on}. When that disk is back, `understudy serve {shard.path}` there gives them out"
            )
            found.append(_trouble("bad", f"{shard.name} {'is' if shard.state == 'lost' else 'was'} lost", say))
        if shard.state == "gone" and there.state == "running":
            where = f"{shard.path} on {host_of(there, shard.node) or 'no node yet'}"
            say = f"it is being opened again ({where}); writers keep what they have until then"
            found.append(_trouble("warn", f"{shard.name} is away", say))
    return found


def _crew(there: Cluster) -> list[dict[str, Any]]:
    found = []
    for node in there.nodes:
        if not node.alive:
            seen = f"last seen {_span(max(time.time() - node.seen_s, 0.0))} ago" if node.seen_s else ""
            say = "; ".join(filter(None, [node.address, seen, "its workers are started again where there is room"]))
            found.append(_trouble("warn", f"node {node.host or node.id} is gone", say))
    for role in ROLES:
        for state in BAD:
            group = [one for one in there.roles if one.role == role and one.state == state]
            if role == "shard" or not group:  # shards have sentences of their own
                continue
            names = f"{group[0].name} is" if len(group) == 1 else f"{len(group):,} {role}s are"
            level = "warn" if state == "gone" or role in ("rollout", "actor") else "bad"
            found.append(_trouble(level, f"{names} {state}", _first(there, group)))
    waiting = [one for one in there.roles if one.state == "waiting for room"]
    long = [one for one in waiting if there.updated_s - one.since_s > ROOM_S]
    if long:
        names = f"{long[0].name} waits" if len(long) == 1 else f"{len(long):,} roles wait"
        add = "add one (`ray start --address ...`), or ask for less below `--place`"
        found.append(_trouble("warn", f"{names} for room", f"no node has enough free CPUs or GPUs: {add}"))
    return found


def _first(there: Cluster, group: list[Role]) -> str:
    one = group[0]
    where = f" on {host_of(there, one.node)}" if one.node else ""
    what = one.error or one.doing or "it did not say why"
    after = "; see its stack below" if one.state == "stuck" else ""
    return (
        f"{one.name}{where}: {what.splitlines()[0][:200]}{after}" if len(group) > 1 else f"{what[:300]}{where}{after}"
    )


def _span(seconds: float) -> str:
    for limit, unit, name in ((120, 1, "s"), (7200, 60, "min"), (172_800, 3600, "h"), (float("inf"), 86_400, "days")):
        if seconds < limit:
            return f"{seconds / unit:.0f} {name}"
    raise AssertionError("unreachable")


# ---- in one line, for reports


def in_a_line(there: Cluster) -> str:
    """Who worked where, and what was mended."""
    by_role = Counter(one.role for one in there.roles)
    names = {"rollout": "rollout worker", "inference": "inference worker"}
    crew = [_count(by_role[role], names.get(role, role)) for role in ROLES if by_role[role]]
    counts = there.counts
    mended = [
        (counts.restarts, "restart", ""),
        (counts.reissued, "episode", " begun again"),
        (counts.nodes_lost, "node", " lost"),
    ]
    said = [_count(*one) for one in mended if one[0]]
    return (
        f"{_count(len(there.nodes), 'node')}: {', '.join(crew) or 'nobody'}; {', '.join(said) or 'nothing went wrong'}"
    )


def _count(number: int, name: str, after: str = "") -> str:
    return f"{number:,} {name}{'s' * (number != 1)}{after}"


def lost_shards(there: Cluster) -> list[str]:
    """What a report must not keep quiet about."""
    return [
        f"{shard.lost_steps:,} steps of {shard.name}: the disk with `{shard.path}` was lost"
        for shard in there.shards
        if shard.state == "lost" or shard.lost_steps
    ]
