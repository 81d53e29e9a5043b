"""Suite: the tasks of a world, with instructions, start states, step limits and the train/eval split of starts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from understudy.core import SPLITS, Split, UnderstudyError
from understudy.core.spec import describe
from understudy.core.suggestion import did_you_mean

EVAL_SHARE = 5  # one start in five is for evaluation, unless the suite says otherwise


class SuiteError(UnderstudyError, ValueError):
    """A task, a start or a split that the suite does not have."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """One task. Its start states are numbered 0 to num_starts - 1."""

    name: str
    instruction: str
    num_starts: int
    max_steps: int

    def __post_init__(self) -> None:
        for name in ("name", "instruction"):
            value = getattr(self, name)
            if not isinstance(value, str) or not value.strip():
                raise SuiteError(f"{self._where}/{name}: expected some text, got {describe(value)}; set it")
        for name in ("num_starts", "max_steps"):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise SuiteError(f"{self._where}/{name}: expected a whole number from 1, got {describe(value)}")

    @property
    def _where(self) -> str:
        return f"task {self.name!r}"

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_json(value: Mapping[str, Any]) -> Task:
        return Task(**value)


@dataclass(frozen=True, kw_only=True)
class Suite:
    """A named set of tasks. The last fifth of a task's starts is for evaluation, unless `eval_starts` has others."""

    name: str
    tasks: tuple[Task, ...]
    eval_starts: Mapping[str, tuple[int, ...]] = field(default_factory=dict)  # by task name; tasks may be missing

    def __post_init__(self) -> None:
        object.__setattr__(self, "tasks", tuple(self.tasks))
        if not self.tasks:
            raise SuiteError(f"suite {self.name!r}: expected at least one task, got none; add one")
        if len(set(self.task_names)) < len(self.tasks):
            raise SuiteError(f"suite {self.name!r}: expected tasks with different names, got {self.task_names}; rename")
        object.__setattr__(self, "eval_starts", {name: tuple(some) for name, some in self.eval_starts.items()})
        for name, some in self.eval_starts.items():
            _check_starts(self.task(name), some)

    @property
    def task_names(self) -> list[str]:
        return [task.name for task in self.tasks]

    def task(self, name: str) -> Task:
        for task in self.tasks:
            if task.name == name:
                return task
        advice = did_you_mean(name, self.task_names, f"it has {', '.join(self.task_names)}")
        raise SuiteError(f"task: suite {self.name!r} has no task {name!r}; {advice}")

    def starts(self, task: Task | str, split: Split) -> Sequence[int]:
        """The start states of one split; the two splits of a task are disjoint and cover all its starts."""
        if split not in SPLITS:
            raise SuiteError(f"split: expected one of {', '.join(SPLITS)}, got {describe(split)}")
        task = self.task(task.name if isinstance(task, Task) else task)
        if task.name in self.eval_starts:
            chosen = self.eval_starts[task.name]
            if split == "eval":
                return chosen
            return tuple(sorted(set(range(task.num_starts)).difference(chosen)))
        num_eval = 0 if task.num_starts == 1 else max(1, task.num_starts // EVAL_SHARE)
        num_train = task.num_starts - num_eval
        return range(num_train) if split == "train" else range(num_train, task.num_starts)

    def split_of(self, task: Task | str, start: int) -> Split:
        """The split a start state is in."""
        task = self.task(task.name if isinstance(task, Task) else task)
        if type(start) is not int or not 0 <= start < task.num_starts:
            raise SuiteError(
                f"start: task {task.name!r} has the starts 0 to {task.num_starts - 1}, got {describe(start)}; "
                f"choose one of them"
            )
        return "eval" if start in self.starts(task, "eval") else "train"

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "tasks": [task.to_json() for task in self.tasks],
            "eval_starts": {name: list(some) for name, some in self.eval_starts.items()},
        }

    @staticmethod
    def from_json(value: Mapping[str, Any]) -> Suite:
        return Suite(
            name=value["name"],
            tasks=tuple(Task.from_json(task) for task in value["tasks"]),
            eval_starts={name: tuple(some) for name, some in value["eval_starts"].items()},
        )


def _check_starts(task: Task, starts: tuple[int, ...]) -> None:
    bad = [start for start in starts if type(start) is not int or not 0 <= start < task.num_starts]
    if bad or len(set(starts)) < len(starts):
        raise SuiteError(
            f"eval_starts/{task.name}: expected different whole numbers from 0 to {task.num_starts - 1}, "
            f"got {bad[0] if bad else list(starts)!r}; correct them"
        )
