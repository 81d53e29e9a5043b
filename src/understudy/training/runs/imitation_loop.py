"""ImitationLoop: updates of a learner on demonstrations until a run has all of them, with metrics and checkpoints.

Behaviour cloning and supervised fine-tuning are such runs. A checkpoint holds the learner's whole state and the number
of the next batch, so that a run that was stopped or killed ends with the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from understudy.core import StoreError
from understudy.processes.stop import Stopped, StopRequest
from understudy.replay import Reader
from understudy.training.runs.checkpoint import write_checkpoint
from understudy.training.runs.health import Health
from understudy.training.runs.metrics import MetricLog
from understudy.training.runs.run import Run


class Schedule(Protocol):
    """Of a run's config: how many updates it has, and how often it reports and saves."""

    @property
    def updates(self) -> int: ...
    @property
    def report_every(self) -> int: ...
    @property
    def checkpoint_every(self) -> int: ...
    @property
    def keep_checkpoints(self) -> int: ...


class Learner(Protocol):
    """What learns from a batch."""

    @property
    def num_updates(self) -> int: ...
    def update(self, batch: Any, *, report: bool) -> Mapping[str, float]: ...
    def state(self) -> dict[str, Any]: ...


class Demonstrations(Protocol):
    """What batches are drawn from."""

    def __len__(self) -> int: ...
    def sample(self) -> Any: ...
    def state(self) -> Mapping[str, Any]: ...


class ImitationLoop:
    """The updates of one run. `facts` go into each checkpoint, beside what the loop itself needs.

    A run with several stages has a loop for each, whose metrics are of another `kind` and whose checkpoints are in
    another directory.
    """

    def __init__(
        self,
        run: Run,
        schedule: Schedule,
        learner: Learner,
        demos: Demonstrations,
        *,
        log: MetricLog,
        health: Health,
        stop: StopRequest,
        facts: Mapping[str, Any] | None = None,
        kind: str = "train",
        checkpoints: Path | None = None,
    ):
        self._run, self._schedule = run, schedule
        self._learner, self._demos = learner, demos
        self._log, self._health, self._stop = log, health, stop
        self._facts = facts or {}
        self._kind = kind
        self._checkpoints = checkpoints or run.checkpoints
        self._saved = learner.num_updates
        stop.describe_unsaved = lambda: (
            f"{learner.num_updates - self._saved} updates since the last checkpoint will be done again; "
            f"`understudy resume {run.path}` continues"
        )

    def run_updates(self, say: Callable[[str], None], progress: Callable[[int, int], None], *, doing: str) -> None:
        """Do the updates that are left; `doing` is what the run's health says meanwhile."""
        learner, schedule = self._learner, self._schedule
        if learner.num_updates:
            say(f"resumed from update {learner.num_updates:,}")
        else:
            self._save()
        while learner.num_updates < schedule.updates:
            self._stop.check()
            number = learner.num_updates + 1
            report = number % schedule.report_every == 0 or number == schedule.updates
            metrics = learner.update(self._demos.sample(), report=report)
            self._health.progress(doing, update=number)
            progress(number, schedule.updates)
            if report:
                self._log.write(self._kind, step=len(self._demos), update=number, **metrics)
                say(f"update {number:,} of {schedule.updates:,}, loss {metrics['loss']:.4f}")
            if number % schedule.checkpoint_every == 0 or number == schedule.updates:
                self._save()

    @contextmanager
    def saving_when_stopped(self) -> Iterator[None]:
        """A stop within this block saves, and says how to continue."""
        try:
            yield
        except Stopped as stopped:
            if self._saved != self._learner.num_updates:
                self._save()
            stopped.sentence = (
                f"stopped and saved at update {self._saved:,} of {self._schedule.updates:,}: no update will be done "
                f"again; `understudy resume {self._run.path}` continues"
            )
            raise

    def _save(self) -> None:
        learner = self._learner
        facts = {**self._facts, "demos": self._demos.state(), "metrics": self._log.position}
        keep = self._schedule.keep_checkpoints
        write_checkpoint(self._checkpoints, learner.num_updates, learner.state(), facts, keep=keep)
        self._saved = learner.num_updates


def open_demonstrations(store: Path, env: str) -> Reader:
    """The store that a run learns from; the error of one that is not there yet says how to record it."""
    if not store.exists():
        raise no_demonstrations(store, env)
    return Reader(store)


def no_demonstrations(store: Path, env: str) -> StoreError:
    return StoreError(f"{store}: has no demonstrations; run `understudy record {store} --env '{env}'`")
