"""The progress bars of training runs."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

if TYPE_CHECKING:
    from understudy.training.offpolicy.rlpd_learner import RLPDProgress
    from understudy.training.onpolicy.onpolicy_run import OnPolicyProgress

RECENT = 20  # episodes


class RLPDProgressBar:
    """Shows success and interventions of recent episodes, updates per second, and the last evaluation."""

    def __init__(self, console: Console, bar: Progress):
        self._console = console
        self._bar = bar
        self._task = bar.add_task("train", total=None, status="")
        self._recent: deque[tuple[bool, float]] = deque(maxlen=RECENT)  # success, intervention rate
        self._evaluation = ""
        self._first: tuple[float, int] | None = None  # seconds and update of the first call

    def __call__(self, progress: RLPDProgress) -> None:
        if self._first is None:
            self._first = (progress.seconds, progress.update)
        if progress.episode is not None:
            self._recent.append((progress.episode.success, progress.episode.num_human / progress.episode.num_steps))
        if progress.evaluation is not None:
            self._evaluation = f"evaluation: {progress.evaluation.success_rate}"
            self._console.print(
                f"step {progress.step:,}, evaluation: {progress.evaluation.success_rate} succeed", soft_wrap=True
            )
        completed = min(progress.step, progress.steps)
        self._bar.update(self._task, completed=completed, total=progress.steps, status=self._status(progress))

    def _status(self, progress: RLPDProgress) -> str:
        parts = []
        if self._recent:
            success, human = (sum(values) / len(self._recent) for values in zip(*self._recent, strict=True))
            parts.append(f"success {100 * success:.0f} %, interventions {100 * human:.0f} %")
        seconds, updates = self._first or (0.0, 0)
        if progress.seconds > seconds:
            parts.append(f"{(progress.update - updates) / (progress.seconds - seconds):.0f} updates/s")
        if self._evaluation:
            parts.append(self._evaluation)
        return "; ".join(parts)


class IterationProgressBar:
    """Shows the success rate and the kept groups of the last iteration of an on-policy run."""

    def __init__(self, console: Console, bar: Progress):
        self._console = console
        self._bar = bar
        self._task = bar.add_task("train", total=None, status="")
        self._last = ""

    def __call__(self, progress: OnPolicyProgress) -> None:
        if progress.evaluation is not None:
            self._console.print(f"iteration {progress.iteration}, evaluation: {progress.evaluation}", soft_wrap=True)
        report = progress.report
        if report is not None:
            success = 100 * report.num_successes / max(report.num_episodes, 1)
            self._last = (
                f"success {success:.0f} % of {report.num_episodes} episodes; "
                f"{report.num_kept} of {report.num_requested} groups kept"
            )
            if report.num_kept < report.num_requested:
                self._console.print(str(report), style="yellow", soft_wrap=True)
        now = f"; {progress.episodes} episodes so far" if progress.episodes else ""
        self._bar.update(self._task, completed=progress.iteration, total=progress.iterations, status=self._last + now)


@contextmanager
def rlpd_progress(console: Console) -> Iterator[RLPDProgressBar]:
    """The bar of an RLPD run, removed at the end."""
    with _bar(console, "steps") as bar:
        yield RLPDProgressBar(console, bar)


@contextmanager
def iteration_progress(console: Console) -> Iterator[IterationProgressBar]:
    """The bar of an on-policy run, removed at the end."""
    with _bar(console, "iterations") as bar:
        yield IterationProgressBar(console, bar)


def _bar(console: Console, unit: str) -> Progress:
    columns = (
        BarColumn(20),
        MofNCompleteColumn(),
        TextColumn(unit),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
        TextColumn("{task.fields[status]}"),
    )
    return Progress(*columns, console=console, transient=True)
