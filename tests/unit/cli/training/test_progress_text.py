"""What the progress of a training run counts."""

from __future__ import annotations

from io import StringIO

import pytest
from rich.console import Console

from understudy.cli import progress
from understudy.cli.training.progress_text import RLPDProgressBar
from understudy.core import EpisodeInfo
from understudy.training.data.run_episode import EpisodeResult
from understudy.training.offpolicy.rlpd_learner import RLPDProgress


def test_a_success_with_help_is_not_one_of_the_policy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "EVERY_S", 0.0)
    file = StringIO()
    with progress.ProgressLine(Console(file=file, width=200), "train", "steps", threaded=False) as line:
        bar = RLPDProgressBar(line)
        for number, (success, num_human) in enumerate([(True, 0), (True, 10), (False, 0), (True, 5)]):
            episode = EpisodeResult(
                num_steps=10,
                num_human=num_human,
                num_takeovers=int(num_human > 0),
                total_reward=0.0,
                success=success,
                info=EpisodeInfo(task="press"),
            )
            bar(RLPDProgress(step=10 * number, steps=100, update=number, seconds=number, episode=episode))
    shown = file.getvalue().splitlines()[-1]
    assert "success alone 25 %; interventions 38 %" in shown  # one of four episodes, 15 of 40 steps
