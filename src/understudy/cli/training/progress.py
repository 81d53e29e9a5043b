"""The lines that a person watches while a run is at work."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

if TYPE_CHECKING:
    from understudy.training.offpolicy.learner import Moment
    from understudy.training.onpolicy.run import Progress as Iterations

RECENT = 20  # episodes


class RunLine:
    """Told each Moment of a run; shows success and takeovers of recent episodes, speed, and the last evaluation."""

    def __init__(self, console: Console, bar: Progress):
        self._console = console
        self._bar = bar
        self._line = bar.add_task("train", total=None, said="")
        self._recent: deque[tuple[bool, float]] = deque(maxlen=RECENT)
        self._evaluated = ""
        self._first: tuple[float, int] | None = None

    def __call__(self, moment: Moment) -> None:
        if self._first is None:
            self._first = (moment.seconds, moment.update)
        if moment.rolled is not None:
            self._recent.append((moment.rolled.success, moment.rolled.num_human / moment.rolled.num_steps))
        if moment.evaluation is not None:
            self._evaluated = f"alone: {moment.evaluation.score}"
            self._console.print(f"step {moment.step:,}, alone: {moment.evaluation.score} succeed", soft_wrap=True)
        self._bar.update(
            self._line, completed=min(moment.step, moment.steps), total=moment.steps, said=self._said(moment)
        )

    def _said(self, moment: Moment) -> str:
        said = []
        if self._recent:
            success, human = (sum(values) / len(self._recent) for values in zip(*self._recent, strict=True))
            said.append(f"success {100 * success:.0f} %, human {100 * human:.0f} %")
        seconds, updates = self._first or (0.0, 0)
        if moment.seconds > seconds:
            said.append(f"{(moment.update - updates) / (moment.seconds - seconds):.0f} updates/s")
        if self._evaluated:
            said.append(self._evaluated)
        return "; ".join(said)


@contextmanager
def run_line(console: Console) -> Iterator[RunLine]:
    """A bar with the line, which goes away at the end."""
    columns = (
        BarColumn(20),
        MofNCompleteColumn(),
        TextColumn("steps"),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
        TextColumn("{task.fields[said]}"),
    )
    with Progress(*columns, console=console, transient=True) as bar:
        yield RunLine(console, bar)


class IterationLine:
    """Told each Progress of an on-policy run; shows what the last iteration lived and learned from."""

    def __init__(self, console: Console, bar: Progress):
        self._console = console
        self._bar = bar
        self._line = bar.add_task("train", total=None, said="")
        self._said = ""

    def __call__(self, news: Iterations) -> None:
        if news.evaluation is not None:
            self._console.print(f"iteration {news.iteration}, alone: {news.evaluation}", soft_wrap=True)
        report = news.report
        if report is not None:
            success = 100 * report.num_successes / max(report.num_episodes, 1)
            self._said = (
                f"success {success:.0f} % of {report.num_episodes}; "
                f"{report.num_kept} of {report.num_wanted} groups teach"
            )
            if report.num_kept < report.num_wanted:
                self._console.print(str(report), style="yellow", soft_wrap=True)
        living = f"; {news.episodes} episodes so far" if news.episodes else ""
        self._bar.update(self._line, completed=news.iteration, total=news.iterations, said=self._said + living)


@contextmanager
def iteration_line(console: Console) -> Iterator[IterationLine]:
    """A bar with the line, which goes away at the end."""
    columns = (
        BarColumn(20),
        MofNCompleteColumn(),
        TextColumn("iterations"),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
        TextColumn("{task.fields[said]}"),
    )
    with Progress(*columns, console=console, transient=True) as bar:
        yield IterationLine(console, bar)
