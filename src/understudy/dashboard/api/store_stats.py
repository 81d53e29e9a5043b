"""Tallies: a store in numbers, over the course of training. SQL adds up; nothing here grows with the store."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from understudy.dashboard.api.targets import Place
from understudy.durable.files import lock_is_held
from understudy.replay.format.catalog import CATALOG_FILE, Catalog
from understudy.replay.write.store import LOCK_FILE, segment_files
from understudy.training.runs.score import Score

NUM_BINS = 60
BIN_EPISODES = 8  # in a bin, if there are enough for a few bins
RECENT = 100  # episodes
RATE_COMMITS = 2000
RATE_S = 60.0
LIVE = "not purged and deleted is null"
PRACTICE = f"{LIVE} and kind != 'demonstration'"
TAKEN = f"{PRACTICE} and num_human > 0"


def score_json(successes: int, judged: int) -> dict[str, Any]:
    low, high = Score(num_successes=successes, num_episodes=judged).interval
    return {
        "successes": successes,
        "episodes": judged,
        "rate": successes / judged if judged else None,
        "low": low,
        "high": high,
    }


# ---- what is in it


def totals(place: Place) -> dict[str, Any]:
    """How much there is, and how fast it grows."""
    with place.catalog().reader() as reader:
        commit = reader.last_commit()
        rate = _rate(reader.catalog)
    found = place.kept("totals", lambda: _totals(place))
    return {**found, "rate": rate, "commit": commit, "being_written": lock_is_held(place.store / LOCK_FILE)}


def _totals(place: Place) -> dict[str, Any]:
    with place.catalog().reader() as reader:
        kinds = reader.catalog.episode_totals()
        alive = [kind for kind in kinds if not kind.deleted]
        return {
            "kinds": [
                {
                    "name": kind.kind,
                    **_group(kind.episodes, kind.steps, kind.bytes, kind.human_steps),
                    "score": score_json(kind.successes, kind.judged),
                    "open": kind.open,
                    "cut": kind.cut,
                }
                for kind in alive
            ],
            "deleted": _group(
                *(
                    sum(getattr(kind, name) for kind in kinds if kind.deleted)
                    for name in ("episodes", "steps", "bytes", "human_steps")
                )
            ),
            "episodes": sum(kind.episodes for kind in alive),
            "steps": sum(kind.steps for kind in alive),
            "human_steps": sum(kind.human_steps for kind in alive),
            "disk_bytes": _disk_bytes(place.store),
        }


def _group(episodes: int, steps: int, num_bytes: int, human_steps: int) -> dict[str, int]:
    return {"episodes": episodes, "steps": steps, "bytes": num_bytes, "human_steps": human_steps}


def _disk_bytes(store: Path) -> int:
    found = 0
    for file in [*segment_files(store), *store.glob(f"{CATALOG_FILE}*")]:
        try:
            found += file.stat().st_blocks * 512
        except OSError:
            continue  # compaction took it away meanwhile
    return found


def _rate(catalog: Catalog) -> dict[str, Any]:
    """Rows a second over the last RATE_S, and when the last commit was."""
    rows = catalog.select("select time, num_rows from commits order by id desc limit ?", (RATE_COMMITS,))
    if not rows:
        return {"rows_per_s": 0.0, "last_commit_s": None}
    since = time.time() - RATE_S
    return {"rows_per_s": sum(n for at, n in rows if at > since) / RATE_S, "last_commit_s": rows[0][0]}


def groups(place: Place) -> dict[str, Any]:
    """Episodes and steps by kind, task, operator and actor; their ages; and whether every row is there once."""
    return place.kept("groups", lambda: _groups(place))


def _groups(place: Place) -> dict[str, Any]:
    with place.catalog().reader() as reader:
        catalog = reader.catalog
        found: dict[str, Any] = {}
        for name in ("kind", "task", "operator", "actor", "split"):
            rows = catalog.select(
                f"select {name}, count(*), sum(num_steps), sum(num_bytes), sum(num_human) from episodes"
                f" where {LIVE} group by 1 order by 3 desc limit 30"
            )
            found[name] = [{"name": row[0], **_group(*row[1:])} for row in rows]
        found["source"] = dict(
            zip(
                ("policy", "human", "script", "random"),
                catalog.select(
                    "select coalesce(sum(num_policy), 0), coalesce(sum(num_human), 0), coalesce(sum(num_script), 0),"
                    f" coalesce(sum(num_random), 0) from episodes where {LIVE}"
                )[0],
                strict=True,
            )
        )
        # An episode's rows must be placed exactly once: fewer is a loss, more is a duplicate.
        found["lost"], found["duplicates"] = catalog.select(
            "select coalesce(sum(max(e.num_rows - s.placed, 0)), 0), coalesce(sum(max(s.placed - e.num_rows, 0)), 0)"
            " from (select episode, sum(num_rows) placed from spans group by 1) s join episodes e on e.id = s.episode"
            " where not e.purged"
        )[0]
        found["cut"] = catalog.select(f"select count(*) from episodes where {LIVE} and state = 'cut'")[0][0]
        found["ages"] = _ages(catalog)
        return found


def _ages(catalog: Catalog) -> list[dict[str, Any]]:
    """Steps by how long ago their episode began."""
    limits = (60, 600, 3600, 6 * 3600, 86400, 7 * 86400, 30 * 86400, 10**12)
    names = ("< 1 min", "< 10 min", "< 1 h", "< 6 h", "< 1 day", "< 1 week", "< 30 days", "older")
    cases = " ".join(f"when ? - begun_at < {limit} then {place}" for place, limit in enumerate(limits))
    rows = catalog.select(
        f"select case {cases} end, kind = 'demonstration', sum(num_steps) from episodes where {LIVE} group by 1, 2",
        [time.time()] * len(limits),
    )
    found = [{"name": name, "practice": 0, "demonstration": 0} for name in names]
    for at, is_demo, steps in rows:
        found[at or 0]["demonstration" if is_demo else "practice"] += steps
    return found


# ---- how it went


def tasks(place: Place) -> list[dict[str, Any]]:
    """Success of practice by task: of all episodes, and of the last RECENT."""
    return place.kept("tasks", lambda: _tasks(place))


def _tasks(place: Place) -> list[dict[str, Any]]:
    with place.catalog().reader() as reader:
        rows = reader.catalog.select(
            "select task, kind = 'demonstration', count(*), sum(num_steps), coalesce(sum(success = 1), 0),"
            f" sum(success is not null) from episodes where {LIVE} group by 1, 2 order by 2, 3 desc limit 60"
        )
        found = []
        for task, is_demo, episodes, steps, successes, judged in rows:
            recent = reader.catalog.select(
                "select coalesce(sum(success = 1), 0), count(*) from (select success from episodes where task is ? and"
                f" (kind = 'demonstration') = ? and {LIVE} and success is not null order by id desc limit {RECENT})",
                (task, is_demo),
            )[0]
            found.append(
                {
                    "task": task,
                    "demonstration": bool(is_demo),
                    "episodes": episodes,
                    "steps": steps,
                    "all": score_json(successes, judged),
                    "recent": score_json(*recent),
                }
            )
        return found


def course(place: Place) -> list[dict[str, Any]]:
    """Practice from the first episode to the last, in bins: success, human steps, takeovers, against steps so far."""
    return place.kept("course", lambda: _course(place))


def _course(place: Place) -> list[dict[str, Any]]:
    with place.catalog().reader() as reader:
        catalog = reader.catalog
        first, last = catalog.select(f"select min(id), max(id) from episodes where {PRACTICE}")[0]
        if first is None:
            return []
        span = last - first + 1
        width = max(1, -(-span // NUM_BINS), min(BIN_EPISODES, span // 6))
        rows = catalog.select(
            "select (id - ?) / ?, count(*), sum(num_steps), sum(num_human), coalesce(sum(success = 1), 0),"
            " sum(success is not null), coalesce(sum(case when num_human > 0 then"
            " coalesce(json_extract(labels, '$.intervention_count'), 1) end), 0), min(begun_at),"
            f" max(coalesce(ended_at, begun_at)), max(id) from episodes where {PRACTICE} group by 1 order by 1",
            (first, width),
        )
    found, so_far = [], 0
    for _, episodes, steps, human, successes, judged, takeovers, begun, ended, last_id in rows:
        so_far += steps
        found.append(
            {
                "step": so_far,
                "episodes": episodes,
                "steps": steps,
                "human_steps": human,
                "takeovers": takeovers,
                "score": score_json(successes, judged),
                "begun_s": begun,
                "ended_s": ended,
                "last": last_id,
            }
        )
    return found


def interventions(place: Place) -> dict[str, Any]:
    """Takeovers: over training, by operator and by reason, and how long they took to be obeyed."""
    return place.kept("interventions", lambda: {"course": _course(place), **_interventions(place)})


def _interventions(place: Place) -> dict[str, Any]:
    label = "cast(json_extract(labels, '$.{}') as real)"
    count = "coalesce(cast(json_extract(labels, '$.intervention_count') as integer), 1)"
    sums = f"count(*), sum({count}), sum(num_human), coalesce(sum(success = 1), 0), sum(success is not null)"
    with place.catalog().reader() as reader:
        catalog = reader.catalog

        def grouped(by: str) -> list[dict[str, Any]]:
            rows = catalog.select(
                f"select {by}, {sums} from episodes where {TAKEN} group by 1 order by 3 desc limit 30"
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

        latency = f"select {label.format('takeover_latency_ms')} as ms from episodes where {TAKEN}"
        known = catalog.select(f"select count(*), avg(ms), max(ms) from ({latency}) where ms is not null")[0]
        shares = {}
        for name, share in (("p50", 0.5), ("p90", 0.9), ("p99", 0.99)):
            row = catalog.select(
                f"select ms from ({latency}) where ms is not null order by ms limit 1 offset ?",
                (min(int(share * known[0]), max(known[0] - 1, 0)),),
            )
            shares[name] = row[0][0] if row else None
        limits = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000)
        cases = " ".join(f"when ms <= {limit} then {place}" for place, limit in enumerate(limits))
        histogram = [0] * (len(limits) + 1)
        for at, number in catalog.select(
            f"select case {cases} else {len(limits)} end, count(*) from ({latency}) where ms is not null group by 1"
        ):
            histogram[at] = number
        newest = catalog.select(
            f"select id, begun_at, operator, num_steps, num_human, success, {count},"
            f" {label.format('takeover_latency_ms')}, json_extract(labels, '$.takeover_reasons')"
            f" from episodes where {TAKEN} order by id desc limit 30"
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
