"""Cluster view: the nodes of a run, the workers on them, the shards of its store, and alarms.

The page gets a thousand workers as a few groups by node and role; `workers` lists those of one group.
"""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, replace
from typing import Any

from understudy.cluster.status import EVENTS_FILE, STATUS_FILE, NodeStatus, RoleStatus
from understudy.dashboard.api.cluster_file import Cluster
from understudy.dashboard.api.targets import Target

MAX_EVENTS = 100
MAX_WORKERS = 200  # of a group, in one response
MAX_UNHEALTHY = 20  # listed one by one
WAITING_S = 60.0  # for free resources before it is an alarm: a node may just be joining
BAD = ("lost", "stuck", "restarting")
OVER = ("ended", "failed")  # states of a driver that wrote them last
STATES = (*BAD, "pending placement", "starting", "running", "ended")
ROLES = ("learner", "shard", "inference", "rollout", "actor", "evaluator")
UNPLACED = ""  # the node of a worker that has none


def cluster_view(target: Target) -> dict[str, Any]:
    """Everything but the workers of each group."""
    file = target.cluster
    cluster = _read(target)
    if cluster is None:
        return {"absent": True, "problem": file.problem}
    events, earlier = file.events(MAX_EVENTS)
    return {
        "driver": {
            "state": cluster.driver_state,
            "silent_s": cluster.silent_s,
            "updated_s": cluster.updated_s,
            "pid": cluster.pid,
            "host": cluster.host,
            "address": cluster.address,
            "error": cluster.error,
            "config": cluster.config,
        },
        "over": cluster.driver_state in OVER,
        "alarms": cluster_alarms(target),
        "totals": totals(cluster),
        "nodes": _nodes(cluster),
        "groups": _groups(cluster.roles),
        "unhealthy": [
            {**asdict(one), "host": host_of(cluster, one.node)} for one in _unhealthy(cluster)[:MAX_UNHEALTHY]
        ],
        "num_unhealthy": len(_unhealthy(cluster)),
        "shards": [{**asdict(one), "host": host_of(cluster, one.node)} for one in cluster.shards],
        "counts": asdict(cluster.counts),
        "events": [asdict(event) for event in events],
        "earlier": earlier,
        "log": str(target.path / EVENTS_FILE),
    }


def workers(target: Target, node: str, role: str, offset: int) -> dict[str, Any]:
    """The workers of a group, unhealthy ones first."""
    cluster = _read(target)
    found = (
        [] if cluster is None else [one for one in cluster.roles if (one.node or UNPLACED) == node and one.role == role]
    )
    found.sort(key=lambda one: (_rank(STATES, one.state), _natural(one.name)))
    first = max(offset, 0)
    return {"total": len(found), "offset": first, "rows": [asdict(one) for one in found[first : first + MAX_WORKERS]]}


def _read(target: Target) -> Cluster | None:
    """The cluster as it is now: the last status of a driver that has ended is of a moment at which its workers ran."""
    cluster = target.cluster.read()
    if cluster is None or cluster.driver_state not in OVER:
        return cluster
    return replace(
        cluster,
        roles=tuple(one if one.state in BAD else replace(one, state="ended", doing="") for one in cluster.roles),
        shards=tuple(one if one.state in BAD else replace(one, state="ended") for one in cluster.shards),
    )


def totals(cluster: Cluster) -> dict[str, Any]:
    """The number of nodes, and their resources."""
    alive = [node for node in cluster.nodes if node.alive]
    return {
        "nodes": len(cluster.nodes),
        "alive": len(alive),
        "cpus": sum(node.cpus for node in alive),
        "gpus": sum(node.gpus for node in alive),
        "used_cpus": sum(node.cpus - node.free_cpus for node in alive),
        "used_gpus": sum(node.gpus - node.free_gpus for node in alive),
        "memory_bytes": sum(node.memory_bytes for node in alive),
        "roles": len(cluster.roles),
        "steps": sum(shard.steps for shard in cluster.shards),
        "lost_steps": sum(shard.lost_steps for shard in cluster.shards),
    }


def host_of(cluster: Cluster, node: str | None) -> str | None:
    """The name of a node's machine; of one that is not listed (any more), the node's own."""
    return next((one.host or one.id for one in cluster.nodes if one.id == node), node)


def _nodes(cluster: Cluster) -> list[dict[str, Any]]:
    by_node: dict[str, list[RoleStatus]] = {}
    for role in cluster.roles:
        by_node.setdefault(role.node or UNPLACED, []).append(role)
    known = list(cluster.nodes)
    missing = sorted(by_node.keys() - {node.id for node in known} - {UNPLACED})
    known += [NodeStatus(id=name, host=name) for name in missing]  # lost, but workers still name it
    found = [{**asdict(node), "groups": _groups(by_node.get(node.id, []))} for node in known]
    if UNPLACED in by_node:
        found.append({**asdict(NodeStatus()), "groups": _groups(by_node[UNPLACED])})
    return found


def _groups(roles: Iterable[RoleStatus]) -> list[dict[str, Any]]:
    by_role: dict[str, list[RoleStatus]] = {}
    for one in roles:
        by_role.setdefault(one.role, []).append(one)
    found = []
    for role, group in sorted(by_role.items(), key=lambda pair: (_rank(ROLES, pair[0]), pair[0])):
        states = Counter(one.state for one in group)
        doing = Counter(re.sub(r"\d[\d.,]*", "…", one.doing) for one in group if one.doing and one.state == "running")
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


def _unhealthy(cluster: Cluster) -> list[RoleStatus]:
    found = [one for one in cluster.roles if one.state in BAD]
    return sorted(found, key=lambda one: (_rank(ROLES, one.role), _rank(BAD, one.state), _natural(one.name)))


def _rank(known: tuple[str, ...], name: str) -> int:
    return known.index(name) if name in known else len(known)


def _natural(name: str) -> list[tuple[int, str]]:
    """rollout-0-10 after rollout-0-9."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d{1,18})", name)]


# ---- alarms


def cluster_alarms(target: Target) -> list[dict[str, Any]]:
    """What is wrong with the cluster, the worst first; each alarm says what to do."""
    file = target.cluster
    cluster = file.read()
    if cluster is None:
        why = file.problem
        return (
            []
            if why is None
            else [_alarm("warn", f"{STATUS_FILE} is not valid", f"{why}; the driver replaces it every two seconds")]
        )
    found = _driver_alarms(target, cluster) + _shard_alarms(cluster)
    if cluster.driver_state in ("running", "silent"):
        found += _worker_alarms(cluster)
    return sorted(found, key=lambda one: one["level"] != "bad")


def _alarm(level: str, what: str, detail: str) -> dict[str, Any]:
    return {"level": level, "what": what, "detail": detail, "view": "cluster"}


def _driver_alarms(target: Target, cluster: Cluster) -> list[dict[str, Any]]:
    resume = f"`understudy resume {target.path} --cluster ...` continues from the last checkpoint"
    who = f"process {cluster.pid} on {cluster.host}"
    if cluster.driver_state == "gone":
        return [_alarm("bad", "the driver is gone", f"{who} was killed, and its workers with it; {resume}")]
    if cluster.driver_state == "silent":
        return [
            _alarm(
                "bad",
                f"no heartbeat from the driver for {_span(cluster.silent_s)}",
                f"the data below is that old. Look at {who}: if it is dead, {resume}",
            )
        ]
    if cluster.driver_state == "failed":
        return [_alarm("bad", "the run failed", f"{cluster.error or 'no reason was given'}; fix it, then {resume}")]
    return []


def _shard_alarms(cluster: Cluster) -> list[dict[str, Any]]:
    found = []
    for shard in cluster.shards:
        if shard.state == "lost" or shard.lost_steps:
            replaced = "an empty shard replaces it" if shard.state == "running" else "it is not replaced"
            say = (
                f"{shard.lost_steps:,} acknowledged steps were in {shard.path} on a disk that no node has any more; "
                f"{replaced}. When that disk is back, serve them with `understudy serve {shard.path}` there"
            )
            found.append(_alarm("bad", f"{shard.name} {'is' if shard.state == 'lost' else 'was'} lost", say))
        if shard.state == "restarting" and cluster.driver_state == "running":
            where = f"{shard.path} on {host_of(cluster, shard.node) or 'no node yet'}"
            say = f"it restarts ({where}); writers keep their steps in the spool until then"
            found.append(_alarm("warn", f"{shard.name} is restarting", say))
    return found


def _worker_alarms(cluster: Cluster) -> list[dict[str, Any]]:
    found = []
    for node in cluster.nodes:
        if not node.alive:
            seen = f"last seen {_span(max(time.time() - node.seen_s, 0.0))} ago" if node.seen_s else ""
            say = "; ".join(filter(None, [node.address, seen, "its workers restart on other nodes as resources allow"]))
            found.append(_alarm("warn", f"node {node.host or node.id} is gone", say))
    for role in ROLES:
        for state in BAD:
            group = [one for one in cluster.roles if one.role == role and one.state == state]
            if role == "shard" or not group:  # shards have alarms of their own
                continue
            names = f"{group[0].name} is" if len(group) == 1 else f"{len(group):,} {role}s are"
            level = "warn" if state == "restarting" or role in ("rollout", "actor") else "bad"
            found.append(_alarm(level, f"{names} {state}", _first(cluster, group)))
    waiting = [one for one in cluster.roles if one.state == "pending placement"]
    long = [one for one in waiting if cluster.updated_s - one.since_s > WAITING_S]
    if long:
        names = f"{long[0].name} waits" if len(long) == 1 else f"{len(long):,} workers wait"
        add = "add one (`ray start --address ...`), or ask for less with the options `--cluster.*`"
        found.append(_alarm("warn", f"{names} for resources", f"no node has enough free CPUs or GPUs: {add}"))
    return found


def _first(cluster: Cluster, group: list[RoleStatus]) -> str:
    one = group[0]
    where = f" on {host_of(cluster, one.node)}" if one.node else ""
    what = one.error or one.doing or "no reason was given"
    after = "; see its stack below" if one.state == "stuck" else ""
    return (
        f"{one.name}{where}: {what.splitlines()[0][:200]}{after}" if len(group) > 1 else f"{what[:300]}{where}{after}"
    )


def _span(seconds: float) -> str:
    for limit, unit, name in ((120, 1, "s"), (7200, 60, "min"), (172_800, 3600, "h"), (float("inf"), 86_400, "days")):
        if seconds < limit:
            return f"{seconds / unit:.0f} {name}"
    raise AssertionError("unreachable")


# ---- for reports


def summary_line(cluster: Cluster) -> str:
    """The number of nodes, workers and restarts, in one line."""
    by_role = Counter(one.role for one in cluster.roles)
    names = {"rollout": "rollout worker", "inference": "inference worker"}
    workers_by_role = [_count(by_role[role], names.get(role, role)) for role in ROLES if by_role[role]]
    counts = cluster.counts
    failures = [
        (counts.restarts, "restart", ""),
        (counts.reissued, "episode", " reissued"),
        (counts.nodes_lost, "node", " lost"),
    ]
    listed = [_count(*one) for one in failures if one[0]]
    what_failed = ", ".join(listed) or "no failures"
    return f"{_count(len(cluster.nodes), 'node')}: {', '.join(workers_by_role) or 'no workers'}; {what_failed}"


def _count(number: int, name: str, after: str = "") -> str:
    return f"{number:,} {name}{'s' * (number != 1)}{after}"


def lost_shards(cluster: Cluster) -> list[str]:
    """A sentence for each shard that lost steps."""
    return [
        f"{shard.lost_steps:,} steps of {shard.name}: the disk with `{shard.path}` was lost"
        for shard in cluster.shards
        if shard.state == "lost" or shard.lost_steps
    ]
