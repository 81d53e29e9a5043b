"""Evaluation: held-out starts in turn, the policy alone, and the worst as films."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from understudy.cli import main
from understudy.envs import ToyTable
from understudy.training.runs.config import ConfigError
from understudy.training.runs.evaluate import EvaluationConfig, EvaluationEpisode, evaluate


def expert(world: ToyTable) -> Any:
    return lambda observation: (world.expert_action().action, 1)


def idle(observation: Any) -> Any:
    return np.zeros(4, np.float32), 1


def test_held_out_starts_are_played_in_turn_and_again() -> None:
    world = ToyTable(cameras=False)
    world.choose("press_button")
    starts = list(world.suite.starts("press_button", "eval"))
    seen: list[EvaluationEpisode] = []
    found = evaluate(world, expert(world), EvaluationConfig(episodes=len(starts) + 3), seed=0, progress=seen.append)
    assert [trial.start for trial in found.episodes] == [*starts, *starts[:3]]
    assert {trial.task for trial in found.episodes} == {"press_button"}
    assert found.success_rate.rate == 1.0
    assert found.num_starts == len(starts)
    assert tuple(seen) == found.episodes
    assert found.to_json()["success"] == 1.0


def test_the_training_starts_are_played_if_that_is_asked_for() -> None:
    world = ToyTable(cameras=False)
    found = evaluate(world, idle, EvaluationConfig(episodes=3, split="train"), seed=0)
    assert [trial.start for trial in found.episodes] == [0, 1, 2]
    assert found.success_rate.rate == 0.0
    assert {trial.num_steps for trial in found.episodes} == {100}


@pytest.mark.parametrize("kind", ["rlpd", "clone"])
def test_a_task_without_held_out_starts_is_refused_before_training(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    env, demos, run = "tests.worlds:SensingWorld", str(tmp_path / "demos"), str(tmp_path / "run")
    assert main(["record", demos, "--env", env, "--successes", "2"]) == 0
    length = ["--steps", "10"] if kind == "rlpd" else ["--updates", "2"]
    command = ["train", kind, run, "--demos", demos, "--env", env, "--evaluation.episodes", "2", *length]
    assert main(command) == 1
    said = " ".join(capsys.readouterr().err.split())
    assert "got 'eval', and task 'sense' has 1 in all and none in it; choose train" in said
    assert not (tmp_path / "run").exists()
    assert main([*command, "--evaluation.split", "train"]) == 0
    assert "of episodes from starts of the training succeed" in " ".join(capsys.readouterr().out.split())


def test_the_worst_are_filmed(tmp_path: Path) -> None:
    world = ToyTable(size=32)
    world.choose("press_button")
    act = expert(world)
    bad = {world.suite.starts("press_button", "eval")[number] for number in (1, 4)}

    def half(observation: Any) -> Any:
        return idle(observation) if world._start in bad else act(observation)  # type: ignore[attr-defined]

    begin = world.begin

    def remember(task: Any, start: int, rng: Any) -> None:
        world._start = start  # type: ignore[attr-defined]
        begin(task, start, rng)

    world.begin = remember  # type: ignore[method-assign]
    found = evaluate(world, half, EvaluationConfig(episodes=6, videos=2), seed=0, videos=tmp_path)
    assert set(found.videos) == {f"press_button-start-{start}-failure.gif" for start in bad}
    with Image.open(tmp_path / found.videos[0]) as film:
        assert getattr(film, "n_frames", 0) > 90
    assert evaluate(world, half, EvaluationConfig(episodes=2, videos=0), seed=0, videos=tmp_path).videos == ()


def test_nonsense_is_refused() -> None:
    with pytest.raises(ConfigError, match="episodes from 1 and videos from 0, got 0 and 0"):
        EvaluationConfig(episodes=0)
