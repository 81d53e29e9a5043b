"""Store statistics: totals, groups, success and interventions of a store. SQL does the sums; memory use is bounded."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from understudy.dashboard.api.targets import Target
from understudy.durable.lock import lock_is_held
from understudy.replay.format.catalog import Catalog
from understudy.replay.format.paths import CATALOG_FILE, LOCK_FILE, segment_files
from understudy.training.runs.wilson_interval import SuccessRate

NUM_BINS = 60
BIN_EPISODES = 8  # in a bin, if there are enough for a few bins
RECENT = 100  # episodes
RECENT_PRACTICE = 50  # episodes
RATE_COMMITS = 2000
RATE_S = 60.0
PRESENT = "not purged and deleted is null"
PRACTICE = f"{PRESENT} and kind != 'demonstration'"
TAKEN_OVER = f"{PRACTICE} and num_human > 0"
# Practice that succeeded: by the policy alone, or with an intervention, which says little about the policy. Both are
# counted of all practice, because the episodes without a takeover are those that went well anyhow.
ALONE, HELPED = "success = 1 and num_human = 0", "success = 1 and num_human > 0"


def score_json(successes: int, episodes: int) -> dict[str, Any]:
    """A success rate with its 95 % interval; `episodes` are those with a known outcome."""
    low, high = SuccessRate(num_successes=successes, num_episodes=episodes).interval
    return {
        "successes": successes,
        "episodes": episodes,
        "rate": successes / episodes if episodes else None,
        "low": low,
        "high": high,
    }


# ---- contents


def totals(target: Target) -> dict[str, Any]:
    """Episodes, steps and bytes, and how fast they grow."""
    with target.catalog().reader() as reader:
        commit = reader.last_commit()
        rate = _rate(reader.catalog)
    found = target.cached("totals", lambda: _totals(target))
    return {**found, "rate": rate, "commit": commit, "being_written": lock_is_held(target.store / LOCK_FILE)}


def _totals(target: Target) -> dict[str, Any]:
    with target.catalog().reader() as reader:
        kinds = reader.catalog.episode_totals()
        present = [kind for kind in kinds if not kind.deleted]
        return {
            "kinds": [
                {
                    "name": kind.kind,
                    **_group(kind.episodes, kind.steps, kind.bytes, kind.human_steps),
                    "score": score_json(kind.successes, kind.success_known),
                    "open": kind.open,
                    "cut": kind.cut,
                }
                for kind in present
            ],
            "deleted": _group(
                *(
                    sum(getattr(kind, name) for kind in kinds if kind.deleted)
                    for name in ("episodes", "steps", "bytes", "human_steps")
                )
            ),
            "episodes": sum(kind.episodes for kind in present),
            "steps": sum(kind.steps for kind in present),
            "human_steps": sum(kind.human_steps for kind in present),
            "disk_bytes": _disk_bytes(target.store),
        }


def _group(episodes: int, steps: int, num_bytes: int, human_steps: int) -> dict[str, int]:
    return {"episodes": episodes, "steps": steps, "bytes": num_bytes, "human_steps": human_steps}


def _disk_bytes(store: Path) -> int:
    found = 0
    for file in [*segment_files(store), *store.glob(f"{CATALOG_FILE}*")]:
        try:
            found += file.stat().st_blocks * 512
        except OSError:
            continue  # compaction removed it meanwhile
    return found


def _rate(catalog: Catalog) -> dict[str, Any]:
    """Rows a second over the last RATE_S, and when the last commit was."""
    rows = catalog.select("select time, num_rows from commits order by id desc limit ?", (RATE_COMMITS,))
    if not rows:
        return {"rows_per_s": 0.0, "last_commit_s": None}
    since = time.time() - RATE_S
    return {"rows_per_s": sum(n for at, n in rows if at > since) / RATE_S, "last_commit_s": rows[0][0]}


def groups(target: Target) -> dict[str, Any]:
    """Episodes and steps by kind, task, operator and actor; their ages; and rows that are missing or duplicated."""
    return target.cached("groups", lambda: _groups(target))


def _groups(target: Target) -> dict[str, Any]:
    with target.catalog().reader() as reader:
        catalog = reader.catalog
        found: dict[str, Any] = {}
        for name in ("kind", "task", "operator", "actor", "split"):
            rows = catalog.select(
                f"select {name}, count(*), sum(num_steps), sum(num_bytes), sum(num_human) from episodes"
                f" where {PRESENT} group by 1 order by 3 desc limit 30"
            )
            found[name] = [{"name": row[0], **_group(*row[1:])} for row in rows]
        found["source"] = dict(
            zip(
                ("policy", "human", "script", "random"),
                catalog.select(
                    "select coalesce(sum(num_policy), 0), coalesce(sum(num_human), 0), coalesce(sum(num_script), 0),"
                    f" coalesce(sum(num_random), 0) from episodes where {PRESENT}"
                )[0],
                strict=True,
            )
        )
        # Spans must hold each row of an episode exactly once: fewer is a loss, more is a duplicate.
        found["lost"], found["duplicates"] = catalog.select(
            "select coalesce(sum(max(e.num_rows - s.stored, 0)), 0), coalesce(sum(max(s.stored - e.num_rows, 0)), 0)"
            " from (select episode, sum(num_rows) stored from spans group by 1) s join episodes e on e.id = s.episode"
            " where not e.purged"
        )[0]
        found["cut"] = catalog.select(f"select count(*) from episodes where {PRESENT} and state = 'cut'")[0][0]
        found["ages"] = _ages(catalog)
        return found


def _ages(catalog: Catalog) -> list[dict[str, Any]]:
    """Steps by how long ago their episode began."""
    limits = (60, 600, 3600, 6 * 3600, 86400, 7 * 86400, 30 * 86400, 10**12)
    names = ("< 1 min", "< 10 min", "< 1 h", "< 6 h", "< 1 day", "< 1 week", "< 30 days", "older")
    cases = " ".join(f"when ? - begun_at < {limit} then {position}" for position, limit in enumerate(limits))
    rows = catalog.select(
        f"select case {cases} end, kind = 'demonstration', sum(num_steps) from episodes where {PRESENT} group by 1, 2",
        [time.time()] * len(limits),
    )
    found = [{"name": name, "practice": 0, "demonstration": 0} for name in names]
    for at, is_demo, steps in rows:
        found[at or 0]["demonstration" if is_demo else "practice"] += steps
    return found


# ---- success and interventions


def tasks(target: Target) -> list[dict[str, Any]]:
    """Success rate by task, of all episodes and of the last RECENT: of demonstrations, and of practice as two parts.

    `part` is "demonstration", "alone" or "helped". The rates of the last two are of all practice of the task, so their
    sum is its success rate.
    """
    return target.cached("tasks", lambda: _tasks(target))


def _tasks(target: Target) -> list[dict[str, Any]]:
    counts = f"coalesce(sum({ALONE}), 0), coalesce(sum({HELPED}), 0), coalesce(sum(success is not null), 0)"
    with target.catalog().reader() as reader:
        rows = reader.catalog.select(
            f"select task, kind = 'demonstration', count(*), sum(num_steps), {counts}, coalesce(sum(num_human), 0)"
            f" from episodes where {PRESENT} group by 1, 2 order by 2, 3 desc limit 60"
        )
        found = []
        for task, is_demo, episodes, steps, alone, helped, finished, human_steps in rows:
            recent = reader.catalog.select(
                f"select {counts} from (select success, num_human from episodes where task is ? and"
                f" (kind = 'demonstration') = ? and {PRESENT} and success is not null order by id desc limit {RECENT})",
                (task, is_demo),
            )[0]
            shared = {"task": task, "episodes": episodes, "steps": steps}
            if is_demo:
                scores = {"demonstration": ((alone + helped, finished), (recent[0] + recent[1], recent[2]))}
            else:
                scores = {"alone": ((alone, finished), (recent[0], recent[2]))}
                if human_steps:
                    scores["helped"] = ((helped, finished), (recent[1], recent[2]))
            for part, (whole, last) in scores.items():
                found.append({**shared, "part": part, "all": score_json(*whole), "recent": score_json(*last)})
        return found


def training_course(target: Target) -> list[dict[str, Any]]:
    """Practice over training, in bins of episodes, by environment steps so far: human steps, takeovers and success.

    `alone` is the share of the episodes that succeeded without a human step, `helped` that of those with some.
    """
    return target.cached("course", lambda: _training_course(target))


def _training_course(target: Target) -> list[dict[str, Any]]:
    with target.catalog().reader() as reader:
        catalog = reader.catalog
        first, last = catalog.select(f"select min(id), max(id) from episodes where {PRACTICE}")[0]
        if first is None:
            return []
        span = last - first + 1
        width = max(1, -(-span // NUM_BINS), min(BIN_EPISODES, span // 6))
        rows = catalog.select(
            "select (id - ?) / ?, count(*), sum(num_steps), sum(num_human),"
            f" coalesce(sum({ALONE}), 0), coalesce(sum({HELPED}), 0), sum(success is not null),"
            " coalesce(sum(case when num_human > 0 then"
            " coalesce(json_extract(labels, '$.intervention_count'), 1) end), 0), min(begun_at),"
            f" max(coalesce(ended_at, begun_at)), max(id) from episodes where {PRACTICE} group by 1 order by 1",
            (first, width),
        )
    found, so_far = [], 0
    for _, episodes, steps, human, alone, helped, finished, takeovers, begun, ended, last_id in rows:
        so_far += steps
        found.append(
            {
                "step": so_far,
                "episodes": episodes,
                "steps": steps,
                "human_steps": human,
                "takeovers": takeovers,
                "alone": score_json(alone, finished),
                "helped": score_json(helped, finished),
                "begun_s": begun,
                "ended_s": ended,
                "last": last_id,
            }
        )
    return found


def recent_practice(target: Target) -> dict[str, int]:
    """The episodes, steps and human steps of the last RECENT_PRACTICE episodes of practice that have ended."""
    return target.cached("recent practice", lambda: _recent_practice(target))


def _recent_practice(target: Target) -> dict[str, int]:
    with target.catalog().reader() as reader:
        row = reader.catalog.select(
            "select count(*), coalesce(sum(num_steps), 0), coalesce(sum(num_human), 0) from (select num_steps,"
            f" num_human from episodes where {PRACTICE} and state != 'open' order by id desc limit {RECENT_PRACTICE})"
        )[0]
    return dict(zip(("episodes", "steps", "human_steps"), row, strict=True))


def operators(target: Target) -> list[str | None]:
    """Who took over from the policy: up to 30 names; "script" is the world's script."""
    return target.cached("operators", lambda: _operators(target))


def _operators(target: Target) -> list[str | None]:
    with target.catalog().reader() as reader:
        rows = reader.catalog.select(f"select distinct operator from episodes where {TAKEN_OVER} limit 30")
    return [name for (name,) in rows]


def interventions(target: Target) -> dict[str, Any]:
    """Takeovers over training, by operator and by reason, and their latency."""
    return target.cached(
        "interventions",
        lambda: {"course": _training_course(target), "recent": _recent_practice(target), **_interventions(target)},
    )


def _interventions(target: Target) -> dict[str, Any]:
    label = "cast(json_extract(labels, '$.{}') as real)"
    count = "coalesce(cast(json_extract(labels, '$.intervention_count') as integer), 1)"
    sums = f"count(*), sum({count}), sum(num_human), coalesce(sum(success = 1), 0), sum(success is not null)"
    with target.catalog().reader() as reader:
        catalog = reader.catalog

        def grouped(by: str) -> list[dict[str, Any]]:
            rows = catalog.select(
                f"select {by}, {sums} from episodes where {TAKEN_OVER} group by 1 order by 3 desc limit 30"
            )
            return [
                {
                    "name": row[0],
                    "episodes": row[1],
                    "takeovers": row[2],
                    "human_steps": row[3],
                    "score": score_json(row[4], row[5]),
                }
                for row in rows
            ]

        latency = f"select {label.format('takeover_latency_ms')} as ms from episodes where {TAKEN_OVER}"
        known = catalog.select(f"select count(*), avg(ms), max(ms) from ({latency}) where ms is not null")[0]
        shares = {}
        for name, share in (("p50", 0.5), ("p90", 0.9), ("p99", 0.99)):
            row = catalog.select(
                f"select ms from ({latency}) where ms is not null order by ms limit 1 offset ?",
                (min(int(share * known[0]), max(known[0] - 1, 0)),),
            )
            shares[name] = row[0][0] if row else None
        limits = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000)
        cases = " ".join(f"when ms <= {limit} then {position}" for position, limit in enumerate(limits))
        histogram = [0] * (len(limits) + 1)
        for at, number in catalog.select(
            f"select case {cases} else {len(limits)} end, count(*) from ({latency}) where ms is not null group by 1"
        ):
            histogram[at] = number
        newest = catalog.select(
            f"select id, begun_at, operator, num_steps, num_human, success, {count},"
            f" {label.format('takeover_latency_ms')}, json_extract(labels, '$.takeover_reasons')"
            f" from episodes where {TAKEN_OVER} order by id desc limit 30"
        )
        names = ("id", "begun_s", "operator", "num_steps", "num_human", "success", "takeovers", "latency_ms", "reasons")
        return {
            "operators": grouped("operator"),
            "reasons": grouped("json_extract(labels, '$.takeover_reasons')"),
            "total": grouped("1"),
            "latency": {"known": known[0], "mean": known[1], "max": known[2], **shares},
            "histogram": {"limits": limits, "counts": histogram},
            "newest": [dict(zip(names, row, strict=True)) for row in newest],
        }
