"""Practice: what came of the groups of an on-policy run, from its metrics' lines of kind `collection`."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Mapping
from typing import Any

from understudy.training.runs.score import wilson

ON_POLICY = ("grpo", "rloo", "reinforce", "ppo")  # kinds of run that live groups of episodes
RECENT = 10  # iterations
MAX_TASKS = 1000


class Practice:
    """Groups that were kept and dropped, and the episodes of each task, so far and lately."""

    def __init__(self, recent: int = RECENT):
        self._kept = 0
        self._dropped: Counter[str] = Counter()
        self._tasks: dict[str, Counter[str]] = {}
        self._recent: deque[dict[str, Counter[str]]] = deque(maxlen=recent)
        self.num_iterations = 0

    def add(self, line: Mapping[str, Any]) -> dict[str, float]:
        """Take in a line; what is not as it should be counts as nothing.

        Returns its numbers for curves: `success`, the share of all that was lived, and groups by what became of them.
        """
        self.num_iterations += 1
        self._kept += _whole(line.get("kept"))
        self._dropped.update(reasons(line))
        here = {
            name: Counter({key: _whole(said.get(key)) for key in ("episodes", "successes")})
            for name, said in _tasks(line)
        }
        self._recent.append(here)
        for name, counts in here.items():
            if name in self._tasks or len(self._tasks) < MAX_TASKS:
                self._tasks.setdefault(name, Counter()).update(counts)
        lived = sum(here.values(), Counter())
        now = reasons(line)
        found = {"kept": float(_whole(line.get("kept")))}
        found |= {f"dropped {name}": float(now.get(name, 0)) for name in self._dropped}
        return {**found, "success": lived["successes"] / lived["episodes"]} if lived["episodes"] else found

    def to_json(self) -> dict[str, Any]:
        """All tasks in the order in which they came, with what was lived in all and in the last iterations."""
        tasks = []
        for name, counts in self._tasks.items():
            lately: Counter[str] = Counter()
            for one in self._recent:
                lately.update(one.get(name, {}))
            tasks.append({"task": name, "all": _score(counts), "recent": _score(lately)})
        return {
            "iterations": self.num_iterations,
            "recent": len(self._recent),
            "kept": self._kept,
            "dropped": dict(self._dropped),
            "tasks": tasks,
        }


def reasons(line: Mapping[str, Any]) -> dict[str, int]:
    """Groups that were dropped, by reason."""
    said = line.get("dropped")
    return {str(name): _whole(n) for name, n in said.items()} if isinstance(said, Mapping) else {}


def _tasks(line: Mapping[str, Any]) -> Iterable[tuple[str, Mapping[str, Any]]]:
    said = line.get("tasks")
    if not isinstance(said, Mapping):
        return []
    return [(str(name), one) for name, one in said.items() if isinstance(one, Mapping)]


def _score(counts: Mapping[str, int]) -> dict[str, Any]:
    episodes = counts.get("episodes", 0)
    successes = min(counts.get("successes", 0), episodes)
    low, high = wilson(successes, episodes)
    rate = successes / episodes if episodes else None
    return {"episodes": episodes, "successes": successes, "rate": rate, "low": low, "high": high}


def _whole(value: Any) -> int:
    return max(value, 0) if isinstance(value, int) else 0
