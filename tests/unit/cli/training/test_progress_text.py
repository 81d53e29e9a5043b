"""What the progress of a training run counts."""

from __future__ import annotations

from io import StringIO
from typing import Any

import pytest
from rich.console import Console
from tests.waiting import wait_for

from understudy.cli import progress
from understudy.cli.training.cluster_options import waiting_for_cluster
from understudy.cli.training.progress_text import RLPDProgressBar, iteration_progress, rlpd_progress
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


@pytest.mark.parametrize("start", [rlpd_progress, iteration_progress])
@pytest.mark.parametrize(
    ("cluster", "text"),
    [
        ("local", "train: at work, 0:00:00 so far; waiting for Ray and the run's processes"),
        ("10.0.0.1:6379", "train: at work, 0:00:00 so far; waiting for Ray at 10.0.0.1:6379 and the run's processes"),
        (None, "train: at work, 0:00:00 so far"),
    ],
)
def test_it_says_what_it_waits_for(start: Any, cluster: str | None, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "EVERY_S", 0.01)
    file = StringIO()
    with start(Console(file=file, width=200), "" if cluster is None else waiting_for_cluster(cluster)):
        wait_for(lambda: file.getvalue())
    assert file.getvalue().splitlines()[0] == text
