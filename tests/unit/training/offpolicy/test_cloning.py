"""A run of cloning: every option of it changes something."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from understudy.algorithms import CloningConfig
from understudy.cli import main
from understudy.core import StoreError
from understudy.policies import ActorConfig, ActorPolicy, EncoderConfig
from understudy.training.offpolicy.cloning import CloningRunConfig, run_cloning
from understudy.training.runs.config import ConfigError
from understudy.training.runs.evaluate import EvaluationConfig
from understudy.training.runs.metrics import read_metrics
from understudy.training.runs.run import Run

ENV = "toy:touch_purple?cameras=false"
CLONING = CloningConfig(actor=ActorConfig(hidden=(8, 8)))
BASE = CloningRunConfig(
    env=ENV, updates=20, report_every=100, batch_size=16, evaluation=EvaluationConfig(episodes=1), cloning=CLONING
)


@pytest.fixture(scope="module")
def demos(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    torch.set_num_threads(1)
    paths = [str(tmp_path_factory.mktemp("demos") / str(number)) for number in (2, 3)]
    for path in paths:
        assert main(["record", path, "--env", ENV, "--successes", Path(path).name]) == 0
    return paths


def lines(path: Path, config: CloningRunConfig) -> list[dict[str, Any]]:
    run = Run.create(path, "cloning", config)
    run_cloning(run, lambda text: None)
    return list(read_metrics(run.metrics))


CHANGES: dict[str, tuple[dict[str, Any], Callable[[Any, Any], bool]]] = {
    "env": (
        {"env": ENV.replace("touch_purple", "pick_red")},
        lambda new, old: new[-1]["episode_results"][0]["task"] == "pick_red",
    ),
    "demos": ({"demos": 1}, lambda new, old: new[0]["step"] > old[0]["step"]),
    "updates": ({"updates": 30}, lambda new, old: new[-1]["update"] == 30),
    "report_every": ({"report_every": 10}, lambda new, old: [line["update"] for line in new] == [10, 20, 20]),
    "batch_size": ({"batch_size": 32}, lambda new, old: new[0]["loss"] != old[0]["loss"]),
    "seed": ({"seed": 1}, lambda new, old: new[0]["loss"] != old[0]["loss"]),
    "evaluation": ({"evaluation": EvaluationConfig(episodes=2)}, lambda new, old: new[-1]["episodes"] == 2),
    "cloning": ({"cloning": replace(CLONING, loss="likelihood")}, lambda new, old: new[0]["loss"] != old[0]["loss"]),
}


@pytest.mark.parametrize("name", CHANGES)
def test_every_option_changes_something(name: str, demos: list[str], tmp_path: Path) -> None:
    changes, changed = CHANGES[name]
    base = replace(BASE, demos=demos[0])
    given = {field: demos[value] if field == "demos" else value for field, value in changes.items()}
    old, new = lines(tmp_path / "old", base), lines(tmp_path / "new", replace(base, **given))
    assert old == lines(tmp_path / "again", base)  # what differs differs because of the option
    assert changed(new, old)


def test_checkpoints_are_as_many_and_as_often_as_asked_for(demos: list[str], tmp_path: Path) -> None:
    for keep, wanted in ((9, ["0", "6", "12", "18", "20"]), (1, ["20"])):
        lines(tmp_path / str(keep), replace(BASE, demos=demos[0], checkpoint_every=6, keep_checkpoints=keep))
        found = sorted(path.name for path in (tmp_path / str(keep) / "checkpoints").iterdir())
        assert found == [f"{int(number):012d}-0" for number in wanted]


def test_it_says_how_much_is_evaluated(demos: list[str], tmp_path: Path) -> None:
    said: list[str] = []
    run_cloning(Run.create(tmp_path / "run", "cloning", replace(BASE, demos=demos[0])), said.append)
    assert said[-2:] == ["evaluating: 0 of 1 episodes", "evaluating: 1 of 1 episodes"]


def test_a_store_of_another_world_is_refused_in_a_sentence(
    demos: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["train", "clone", str(tmp_path / "run"), "--demos", demos[0], "--env", "toy:touch_purple?state=task"]
    assert main(words) == 1
    assert "observation" in capsys.readouterr().err
    assert not (tmp_path / "run" / "config.json").exists()


def test_a_device_that_is_not_there_is_said(demos: list[str], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="device: torch cannot use 'nonsense' here"):
        lines(tmp_path / "run", replace(BASE, demos=demos[0], device="nonsense"))


def test_without_demonstrations_it_says_how_to_record_them(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="nowhere"):
        lines(tmp_path / "run", replace(BASE, demos=str(tmp_path / "nowhere")))


def test_a_policy_of_small_images_is_trained_from_large_ones_and_acts_on_them(tmp_path: Path) -> None:
    env = "toy:touch_purple"
    assert main(["record", str(tmp_path / "demos"), "--env", env, "--successes", "1"]) == 0
    cloning = CloningConfig(
        actor=ActorConfig(hidden=(8, 8), encoder=EncoderConfig(filters=(4,), latent=4, image_size=(16, 16)))
    )
    config = replace(BASE, env=env, demos=str(tmp_path / "demos"), updates=2, batch_size=4, cloning=cloning)
    found = lines(tmp_path / "run", config)
    assert found[-1]["episodes"] == 1
    policy = ActorPolicy.load(tmp_path / "run" / "policy.safetensors")
    assert policy.actor.encoder.inputs.camera_shapes["front"] == (16, 16, 3)
    assert policy.spec.observation.flat["front"].shape > (16, 16, 3)
