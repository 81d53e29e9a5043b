"""A run of supervised fine-tuning: several tasks in one store, every option, and going on to the same bits."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("transformers")

import torch

from understudy.algorithms.sft import SFTUpdateConfig
from understudy.cli import main
from understudy.cli.training.sft import command
from understudy.core import EpisodeInfo, Step, StoreError
from understudy.core import tree as trees
from understudy.envs.toy import ToyTable
from understudy.policies import PolicyError
from understudy.policies.vla import VLAConfig, VLAPolicy
from understudy.replay import Reader, Store
from understudy.training.onpolicy.config import TaskEvaluationConfig
from understudy.training.onpolicy.sft import KIND, Demonstrations, SFTConfig, run_sft
from understudy.training.runs.config import ConfigError
from understudy.training.runs.metrics import read_metrics
from understudy.training.runs.run import Run, RunError

ENV = "toy:touch_purple?size=32"
TASKS = {"touch_purple": "touch the purple block", "press_button": "press the button"}
TINY = VLAConfig(
    cameras=("front",),
    use_proprio=("state",),
    block_steps=3,
    num_bins=16,
    vision_hidden=16,
    vision_layers=1,
    vision_heads=2,
    hidden=16,
    layers=1,
    heads=2,
    max_words=8,
)
BASE = SFTConfig(
    env=ENV,
    updates=6,
    batch_size=8,
    evaluate=False,
    report_every=3,
    checkpoint_every=2,
    vla=TINY,
    sft=SFTUpdateConfig(shift_pixels=2, warmup_updates=1),
)


@pytest.fixture(scope="module")
def demos(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    torch.set_num_threads(1)
    paths = [str(tmp_path_factory.mktemp("demos") / str(number)) for number in (1, 2)]
    for path in paths:
        for task in TASKS:
            env = ENV.replace("touch_purple", task)
            assert main(["record", path, "--env", env, "--successes", Path(path).name]) == 0
    return paths


def silent(text: str) -> None:
    del text


def lines(path: Path, config: SFTConfig) -> list[dict[str, Any]]:
    run = Run.create(path, KIND, config)
    run_sft(run, silent)
    return list(read_metrics(run.metrics))


# ---- what is drawn


def test_each_block_comes_with_the_instruction_of_its_episode(demos: list[str]) -> None:
    with Reader(demos[0]) as reader:
        drawn = Demonstrations(reader, block_steps=4, batch_size=64, seed=0)
        assert drawn.follow() == len(drawn) > 20
        blocks = drawn.sample()
        again = Demonstrations(reader, block_steps=4, batch_size=64, seed=0)
        again.follow()
        raw = again._sampler.sample()
        drawn.close()
        again.close()
        tasks = [reader.record(episode).info.task for episode in raw.episode.tolist()]
    assert set(tasks) == set(TASKS)
    assert blocks.instruction == tuple(TASKS[str(task)] for task in tasks)
    assert blocks.action.shape == (64, 4, 4)
    assert blocks.observation["front"].shape == (64, 32, 32, 3)
    assert 0 < blocks.weight.mean() < 1


def test_an_episode_without_an_instruction_is_named(tmp_path: Path) -> None:
    world = ToyTable(size=32)
    observation, _ = world.reset(seed=0)
    with Store.open(tmp_path / "store") as store:
        writer = store.writer("me", world.step_spec)
        writer.begin(EpisodeInfo(task="touch_purple", kind="demonstration", success=True))
        writer.append(Step(observation=observation, action=np.zeros(4, np.float32), reward=1.0, terminated=True))
        writer.end(observation)
    with pytest.raises(StoreError, match="episode 1 has no instruction, and the policy needs one"):
        lines(tmp_path / "run", replace(BASE, demos=str(tmp_path / "store")))


# ---- options

CHANGES: dict[str, tuple[dict[str, Any], Callable[[Any, Any], bool]]] = {
    "updates": ({"updates": 9}, lambda new, old: [line["update"] for line in new] == [3, 6, 9]),
    "report_every": ({"report_every": 4}, lambda new, old: [line["update"] for line in new] == [4, 6]),
    "demos": ({"demos": 1}, lambda new, old: new[0]["step"] > old[0]["step"]),
    "batch_size": ({"batch_size": 4}, lambda new, old: new[0]["loss"] != old[0]["loss"]),
    "seed": ({"seed": 1}, lambda new, old: new[0]["loss"] != old[0]["loss"]),
    "vla": ({"vla": replace(TINY, layers=2)}, lambda new, old: new[0]["loss"] != old[0]["loss"]),
    "sft": ({"sft": SFTUpdateConfig(sigma=1.0)}, lambda new, old: new[0]["loss"] != old[0]["loss"]),
}


@pytest.fixture(scope="module")
def plain(demos: list[str], tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run that nothing happened to."""
    run = Run.create(tmp_path_factory.mktemp("plain") / "run", KIND, replace(BASE, demos=demos[0]))
    run_sft(run, silent)
    return run


@pytest.mark.parametrize("name", CHANGES)
def test_every_option_changes_something(name: str, demos: list[str], plain: Run, tmp_path: Path) -> None:
    changes, changed = CHANGES[name]
    given = {field: demos[value] if field == "demos" else value for field, value in changes.items()}
    new = lines(tmp_path / "new", replace(plain.config(SFTConfig), **given))
    assert changed(new, list(read_metrics(plain.metrics)))


def test_the_same_config_comes_to_the_same_bits(plain: Run, tmp_path: Path) -> None:
    assert lines(tmp_path / "again", plain.config(SFTConfig)) == list(read_metrics(plain.metrics))
    assert (tmp_path / "again" / "policy.safetensors").read_bytes() == plain.policy.read_bytes()


def test_checkpoints_are_as_many_and_as_often_as_asked_for(demos: list[str], plain: Run, tmp_path: Path) -> None:
    assert sorted(path.name[:12] for path in plain.checkpoints.iterdir()) == ["000000000004", "000000000006"]
    config = replace(BASE, demos=demos[0], checkpoint_every=3, keep_checkpoints=3)
    lines(tmp_path / "run", config)
    found = sorted(path.name[:12] for path in (tmp_path / "run" / "checkpoints").iterdir())
    assert found == ["000000000000", "000000000003", "000000000006"]


def test_the_policy_knows_the_words_of_all_tasks_and_what_the_demonstrations_saw(plain: Run) -> None:
    policy = VLAPolicy.load(plain.policy)
    assert policy.version == 6
    assert {"press", "button", "purple", "stack"} <= set(policy.words.known)  # stack: of a task that nobody showed
    assert policy.stats.std["state"].min() > 0
    assert abs(policy.stats.mean["state"]).max() > 0.01
    assert policy.config == TINY


def test_a_policy_can_be_gone_on_from(demos: list[str], plain: Run, tmp_path: Path) -> None:
    config = replace(
        BASE, demos=demos[0], policy=str(plain.policy), vla=VLAConfig(), env="nowhere"
    )  # it needs no world
    first = lines(tmp_path / "on", config)[0]
    assert first["loss"] < next(read_metrics(plain.metrics))["loss"]
    gone_on, before = VLAPolicy.load(tmp_path / "on" / "policy.safetensors"), VLAPolicy.load(plain.policy)
    assert gone_on.words.known == before.words.known
    assert trees.equal(gone_on.parameters()["stats"], before.parameters()["stats"])
    assert not trees.equal(gone_on.parameters()["weights"], before.parameters()["weights"])
    with pytest.raises(ConfigError, match="vla: the given policy has its own network; leave"):
        replace(BASE, policy=str(plain.policy))


# ---- going on


class Killed(Exception):
    pass


@pytest.mark.parametrize("at", ["update 3 of 6", "update 6 of 6"])
def test_a_run_that_was_cut_off_goes_on_to_the_same_bits(at: str, plain: Run, tmp_path: Path) -> None:
    """Also if there are more demonstrations by then, and the policy that it began from is gone."""
    config = plain.config(SFTConfig)
    store = tmp_path / "demos"
    shutil.copytree(str(config.demos), store)
    run = Run.create(tmp_path / "run", KIND, replace(config, demos=str(store)))

    def kill(text: str) -> None:
        if text.startswith(at):
            raise Killed

    with pytest.raises(Killed):
        run_sft(run, kill)
    assert not run.policy.exists()
    assert main(["record", str(store), "--env", ENV.replace("touch_purple", "push_blue"), "--successes", "1"]) == 0
    said: list[str] = []
    run_sft(run, said.append)
    assert said[0] == f"resumed from update {2 if at.startswith('update 3') else 4}"
    assert run.policy.read_bytes() == plain.policy.read_bytes()
    assert run.metrics.read_bytes() == plain.metrics.read_bytes()


def test_the_evaluation_at_the_end_is_of_all_tasks(demos: list[str], tmp_path: Path) -> None:
    config = replace(
        BASE,
        demos=demos[0],
        env="toy?size=32",
        evaluate=True,
        evaluation=TaskEvaluationConfig(episodes=10, sampling="greedy"),
    )
    run = Run.create(tmp_path / "run", KIND, config)
    said: list[str] = []
    _, found = run_sft(run, said.append)
    assert found is not None
    assert said[-11:] == [f"evaluating: {number} of 10 episodes" for number in range(11)]
    (line,) = read_metrics(run.metrics, "evaluation")
    assert (line["update"], line["episodes"], len(line["tasks"]), line["sampling"]) == (6, 10, 10, "greedy")
    assert line["success"] == found.success_rate.rate
    assert line["fingerprint"]["env"] == config.env


# ---- the command, and what is refused


def test_the_command_makes_a_run(demos: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "run"
    config = replace(BASE, demos=demos[0])
    assert command(path, config) == 0
    assert "6 updates; " in capsys.readouterr().out
    assert Run(path).kind == "sft"
    assert Run(path).config(SFTConfig) == config
    with pytest.raises(RunError, match="already is a run"):
        command(path, config)


def test_a_run_that_cannot_begin_is_none(tmp_path: Path) -> None:
    with Store.open(tmp_path / "empty"):
        pass
    with pytest.raises(StoreError, match="empty"):
        command(tmp_path / "run", replace(BASE, demos=str(tmp_path / "empty")))
    assert not (tmp_path / "run" / "config.json").exists()


def test_a_world_that_shows_something_else_is_refused(demos: list[str], tmp_path: Path) -> None:
    made_for = r"observation/front: the policy was made for uint8 \[64, 64, 3\], "
    recorded = rf"{demos[0]} has uint8 .*; record in the world toy:touch_purple\?size=64, with the same options"
    with pytest.raises(PolicyError, match=made_for + recorded):
        lines(tmp_path / "run", replace(BASE, demos=demos[0], env="toy:touch_purple?size=64"))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"updates": 0}, "updates: expected a number from 1, got 0"),
        ({"keep_checkpoints": 0}, "keep_checkpoints: expected a number from 1, got 0"),
    ],
)
def test_numbers_that_make_no_sense_are_refused(change: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        replace(BASE, **change)


def test_a_device_that_is_not_there_is_said(demos: list[str], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="device: torch cannot use 'nonsense' here"):
        lines(tmp_path / "run", replace(BASE, demos=demos[0], device="nonsense"))
