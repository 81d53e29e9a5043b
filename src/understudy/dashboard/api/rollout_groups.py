"""Rollout groups: which groups of an on-policy run were kept or dropped, from its `collection` metrics."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Mapping
from typing import Any

from understudy.training.runs.wilson_interval import wilson_interval

RECENT = 10  # iterations
MAX_TASKS = 1000


class RolloutGroups:
    """Counts of kept and dropped groups, and the episodes of each task: all of them, and those of recent iterations."""

    def __init__(self, recent: int = RECENT):
        self._kept = 0
        self._dropped: Counter[str] = Counter()
        self._tasks: dict[str, Counter[str]] = {}
        self._recent: deque[dict[str, Counter[str]]] = deque(maxlen=recent)
        self.num_iterations = 0

    def add(self, line: Mapping[str, Any]) -> dict[str, float]:
        """Count a metrics line; fields that are not valid count as zero.

        Returns the numbers of this line for curves: `success`, the share of its episodes that succeeded, and the
        number of groups by what happened to them.
        """
        self.num_iterations += 1
        self._kept += _whole(line.get("kept"))
        self._dropped.update(drop_reasons(line))
        tasks = {
            name: Counter({key: _whole(counts.get(key)) for key in ("episodes", "successes")})
            for name, counts in _tasks(line)
        }
        self._recent.append(tasks)
        for name, counts in tasks.items():
            if name in self._tasks or len(self._tasks) < MAX_TASKS:
                self._tasks.setdefault(name, Counter()).update(counts)
        total = sum(tasks.values(), Counter())
        dropped = drop_reasons(line)
        found = {"kept": float(_whole(line.get("kept")))}
        found |= {f"dropped {name}": float(dropped.get(name, 0)) for name in self._dropped}
        return {**found, "success": total["successes"] / total["episodes"]} if total["episodes"] else found

    def to_json(self) -> dict[str, Any]:
        """All tasks in the order of their first episode, each with the score of all and of recent iterations."""
        tasks = []
        for name, counts in self._tasks.items():
            recent: Counter[str] = Counter()
            for one in self._recent:
                recent.update(one.get(name, {}))
            tasks.append({"task": name, "all": _score(counts), "recent": _score(recent)})
        return {
            "iterations": self.num_iterations,
            "recent": len(self._recent),
            "kept": self._kept,
            "dropped": dict(self._dropped),
            "tasks": tasks,
        }


def drop_reasons(line: Mapping[str, Any]) -> dict[str, int]:
    """The number of dropped groups by reason."""
    dropped = line.get("rejected")
    return {str(name): _whole(n) for name, n in dropped.items()} if isinstance(dropped, Mapping) else {}


def _tasks(line: Mapping[str, Any]) -> Iterable[tuple[str, Mapping[str, Any]]]:
    tasks = line.get("tasks")
    if not isinstance(tasks, Mapping):
        return []
    return [(str(name), one) for name, one in tasks.items() if isinstance(one, Mapping)]


def _score(counts: Mapping[str, int]) -> dict[str, Any]:
    episodes = counts.get("episodes", 0)
    successes = min(counts.get("successes", 0), episodes)
    low, high = wilson_interval(successes, episodes)
    rate = successes / episodes if episodes else None
    return {"episodes": episodes, "successes": successes, "rate": rate, "low": low, "high": high}


def _whole(value: Any) -> int:
    return max(value, 0) if isinstance(value, int) else 0
