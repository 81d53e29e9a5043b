"""What the progress line of a training run shows."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.console import Console

from understudy.cli.progress import ProgressLine

if TYPE_CHECKING:
    from understudy.training.offpolicy.rlpd_learner import RLPDProgress
    from understudy.training.onpolicy.onpolicy_run import OnPolicyProgress

RECENT = 20  # episodes


class RLPDProgressBar:
    """Shows success without help and interventions of recent episodes, updates per second, and the last evaluation."""

    def __init__(self, line: ProgressLine):
        self._line = line
        self._recent: deque[tuple[bool, float]] = deque(maxlen=RECENT)  # success without help, intervention rate
        self._evaluation = ""
        self._first: tuple[float, int] | None = None  # seconds and update of the first call

    def __call__(self, progress: RLPDProgress) -> None:
        if self._first is None:
            self._first = (progress.seconds, progress.update)
        episode = progress.episode
        if episode is not None:
            alone = episode.success and not episode.num_human
            self._recent.append((alone, episode.num_human / episode.num_steps))
        if progress.evaluation is not None:
            self._evaluation = f"evaluation: {progress.evaluation.success_rate}"
            self._line.note(f"step {progress.step:,}, evaluation: {progress.evaluation.success_rate} succeed")
        self._line(min(progress.step, progress.steps), progress.steps, self._status(progress))

    def _status(self, progress: RLPDProgress) -> list[str]:
        parts = []
        if self._recent:
            success, human = (sum(values) / len(self._recent) for values in zip(*self._recent, strict=True))
            parts += [f"success alone {100 * success:.0f} %", f"interventions {100 * human:.0f} %"]
        seconds, updates = self._first or (0.0, 0)
        if progress.seconds > seconds:
            parts.append(f"{(progress.update - updates) / (progress.seconds - seconds):.0f} updates/s")
        if self._evaluation:
            parts.append(self._evaluation)
        return parts


class IterationProgressBar:
    """Shows the success rate and the kept groups of the last iteration of an on-policy run."""

    def __init__(self, line: ProgressLine):
        self._line = line
        self._last: list[str] = []

    def __call__(self, progress: OnPolicyProgress) -> None:
        if progress.evaluation is not None:
            self._line.note(f"iteration {progress.iteration}, evaluation: {progress.evaluation}")
        report = progress.report
        if report is not None:
            success = 100 * report.num_successes / max(report.num_episodes, 1)
            self._last = [
                f"success {success:.0f} % of {report.num_episodes} episodes",
                f"{report.num_kept} of {report.num_requested} groups kept",
            ]
            if report.num_kept < report.num_requested:
                self._line.note(str(report), style="yellow")
        now = [f"{progress.episodes} episodes so far"] if progress.episodes else []
        self._line(progress.iteration, progress.iterations, [*self._last, *now])


@contextmanager
def rlpd_progress(console: Console, waits_for: str = "") -> Iterator[RLPDProgressBar]:
    """The progress of an RLPD run; until its first step it says what it waits for."""
    with ProgressLine(console, "train", "steps") as line:
        line.say(waits_for)
        yield RLPDProgressBar(line)


@contextmanager
def iteration_progress(console: Console, waits_for: str = "") -> Iterator[IterationProgressBar]:
    """The progress of an on-policy run; until its first iteration it says what it waits for."""
    with ProgressLine(console, "train", "iterations") as line:
        line.say(waits_for)
        yield IterationProgressBar(line)
