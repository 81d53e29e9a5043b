"""A small study in the toy world: with five demonstrations and a scripted human, RLPD learns what cloning does not."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from understudy.cli import main
from understudy.training.runs.evaluate import last_success_rate
from understudy.training.runs.metrics import read_metrics

ENV = "toy:press_button?cameras=false&state=task"


@pytest.mark.nightly
def test_rlpd_learns_beyond_cloning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.set_num_threads(1)
    assert main(["record", "demos", "--env", ENV, "--successes", "5"]) == 0
    assert main(["train", "clone", "cloned", "--demos", "demos", "--env", ENV]) == 0
    options = ["--intervention.source", "script", "--steps", "3000", "--eval-every", "1500"]
    assert main(["train", "rlpd", "learned", "--demos", "demos", "--env", ENV, *options]) == 0
    cloned, learned = (last_success_rate(tmp_path / name / "metrics.jsonl") for name in ("cloned", "learned"))
    assert cloned is not None
    assert learned is not None
    print(f"cloned: {cloned}; learned: {learned}")
    assert learned.num_episodes == 100
    assert learned.interval[0] > cloned.interval[1]  # beyond chance
    assert learned.rate >= 0.8
    episodes = list(read_metrics(tmp_path / "learned" / "metrics.jsonl", "episode"))
    third = len(episodes) // 3
    early, late = (
        sum(e["intervention_steps"] for e in some) / sum(e["length"] for e in some)
        for some in (episodes[:third], episodes[-third:])
    )
    print(f"by a human: {early:.0%} of steps at first, {late:.0%} at last")
    assert late < 0.5 * early  # it is needed less and less
