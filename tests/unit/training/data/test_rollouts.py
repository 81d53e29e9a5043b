"""Rollouts: what the policy and the operator do is recorded, blocks are dropped at takeovers, and it continues."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from understudy.cli import main
from understudy.core import Source, StoreError
from understudy.envs import IsolatedWorld, WorldFactory
from understudy.envs.teleop.takeover import Reading, Takeover
from understudy.envs.toy import ToyTable
from understudy.policies import Sampling
from understudy.policies.flow import FlowConfig, FlowPolicy
from understudy.replay import Reader
from understudy.training import open_target
from understudy.training.data.rollouts import BlockActor, RolloutConfig, rollout

torch.set_num_threads(1)

TASK = "pick_red"
ENV = f"toy:{TASK}?cameras=false&state=task"


class SomeSteps:
    """An operator who drives at some steps of each episode."""

    source = Source.HUMAN

    def __init__(self, steps: range):
        self._steps = steps
        self._number = -1

    def begin(self) -> None:
        self._number = -1

    def read(self) -> Reading:
        self._number += 1
        return Reading(action=np.full(4, 0.25, np.float32)) if self._number in self._steps else Reading()

    def close(self) -> None:
        """Nothing to release."""


@pytest.fixture(scope="module")
def policy() -> FlowPolicy:
    world = ToyTable(cameras=False, state="task")
    config = FlowConfig(block_steps=4, hidden=16, layers=1, num_inference_steps=2)
    return FlowPolicy.new(config, world.step_spec, [task.instruction for task in world.suite.tasks], seed=0)


def record(policy: FlowPolicy, path: Path, takeover: Takeover | None = None, **options: Any) -> Any:
    config = RolloutConfig(task=TASK, **options)
    with open_target(str(path)) as target:
        return rollout(ToyTable(cameras=False, state="task"), target, policy, config, takeover=takeover)


def test_a_simulator_that_dies_costs_its_episode_and_no_more(policy: FlowPolicy, tmp_path: Path) -> None:
    config = RolloutConfig(task=TASK, episodes=3)
    toy = WorldFactory(factory="understudy.envs.toy:ToyTable", options={"cameras": False, "state": "task"})
    with IsolatedWorld(toy) as world, open_target(str(tmp_path)) as target:
        killed: list[int] = []

        def show(_: Any, seen: Any) -> None:
            if seen["step"] == 5 and not killed and world.worker.pid:
                killed.append(world.worker.pid)
                os.kill(world.worker.pid, signal.SIGKILL)

        report = rollout(world, target, policy, config, show=show)
    assert (report.num_episodes, report.num_recorded, report.num_broken) == (3, 2, 1)
    with Reader(tmp_path) as reader:
        assert [record.state for record in reader.episodes()] == ["cut", "ended", "ended"]


def test_steps_have_their_source_and_takeovers_the_proposal(policy: FlowPolicy, tmp_path: Path) -> None:
    report = record(policy, tmp_path, Takeover(SomeSteps(range(5, 8))), episodes=2, takeover_every=2)
    assert (report.num_episodes, report.num_takeovers, report.num_human) == (2, 1, 3)
    with Reader(tmp_path) as reader:
        helped, alone = (reader.read(number) for number in (1, 2))
    assert np.flatnonzero(helped.source == Source.HUMAN).tolist() == [5, 6, 7]
    assert helped.has_proposal.tolist()[4:9] == [False, True, True, True, False]
    assert (alone.source == Source.POLICY).all()
    assert helped.info.split == "train"
    assert report.num_steps == len(helped) + len(alone)


def test_after_a_step_of_the_operator_the_block_is_dropped(policy: FlowPolicy) -> None:
    decided: list[int] = []
    taken: list[Any] = []  # actions

    class Counting:
        version, block_steps = 3, 4

        def act(self, *args: Any, **options: Any) -> Any:
            decided.append(len(taken))
            return policy.act(*args, **options)

    world = ToyTable(cameras=False, state="task")
    takeover = Takeover(SomeSteps(range(2, 4)))
    takeover.begin()
    observation, info = world.reset(seed=0, options={"task": TASK})
    act = BlockActor(Counting(), info["instruction"], Sampling(), seed=(0,), takeover=takeover)  # type: ignore[arg-type]
    while len(taken) < 12:
        action, version = act(observation)
        assert (action.shape, version) == ((4,), 3)
        taken.append(action)
        observation = world.step(takeover.choose(action).action)[0]
    assert decided == [0, 3, 4, 8]  # each fourth step, and after the steps 2 and 3 of the operator


def test_an_interrupted_rollout_continues_and_the_seed_decides(policy: FlowPolicy, tmp_path: Path) -> None:
    takeover = Takeover(SomeSteps(range(5, 8)))
    record(policy, tmp_path / "whole", takeover, episodes=3)
    record(policy, tmp_path / "parts", takeover, episodes=1)
    assert record(policy, tmp_path / "parts", takeover, episodes=3).num_recorded == 2
    record(policy, tmp_path / "other", takeover, episodes=3, seed=1)
    record(policy, tmp_path / "greedy", takeover, episodes=3, sampling=Sampling(greedy=True))
    actions = {}
    for path in tmp_path.iterdir():
        with Reader(path) as reader:
            actions[path.name] = [reader.read(number).action.tobytes() for number in (1, 2, 3)]
    assert actions["parts"] == actions["whole"]
    assert actions["other"] != actions["whole"] != actions["greedy"]


def test_numbers_that_make_no_sense_are_refused() -> None:
    with pytest.raises(StoreError, match="expected episodes and takeover_every from 1, got 1 and 0"):
        RolloutConfig(task=TASK, episodes=1, takeover_every=0)


# ---- the command


@pytest.mark.parametrize(("noise", "advice"), [("0", False), ("9", True)])
def test_takeovers_that_do_not_reach_the_end_are_mentioned(
    noise: str, advice: bool, policy: FlowPolicy, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    policy.save(tmp_path / "policy.safetensors")
    command = ["rollout", str(tmp_path / "store"), "--policy", str(tmp_path / "policy.safetensors")]
    script = ["--human", "script", "--patience-steps", "2", "--noise", noise]
    assert main([*command, "--env", ENV, "--episodes", "4", *script]) == 0
    said = capsys.readouterr().out
    assert f"4 with a takeover ({0 if advice else 4} of these succeeded)" in said
    assert ("most takeovers did not end in success" in said) == advice
    assert ("a smaller --patience-steps" in said) == advice


def test_the_command_records_with_the_script_and_refuses_what_has_no_effect(
    policy: FlowPolicy, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    policy.save(tmp_path / "policy.safetensors")
    command = ["rollout", str(tmp_path / "store"), "--policy", str(tmp_path / "policy.safetensors")]
    script = ["--human", "script", "--patience-steps", "5", "--noise", "0.1", "--takeover-every", "2"]
    assert main([*command, "--env", ENV, "--episodes", "2", *script]) == 0
    assert "pick_red: 1 successes, 1 with a takeover (1 of these succeeded);" in capsys.readouterr().out
    with Reader(tmp_path / "store") as reader:
        assert [record.info.labels["env"] for record in reader.episodes()] == [ENV, ENV]
        until_the_end = reader.read(1)
    assert until_the_end.source[-1] == Source.HUMAN
    assert main([*command, "--env", ENV, "--episodes", "3", "--human", "script", "--burst-steps", "2"]) == 0
    with Reader(tmp_path / "store") as reader:
        bursts = np.diff(np.flatnonzero(reader.read(3).source == Source.HUMAN))
    assert bursts.max() > 1
    for options, said in (
        (["--noise", "0.2"], "noise: has no effect with --human none; leave it out"),
        (["--spool", "somewhere"], "spool: has no effect on a store on this machine"),
        (["--takeover-every", "2"], "takeover_every: has no effect with --human none"),
        (["--human", "script", "--operator", "ada"], "operator: has no effect with --human script"),
        (["--spool", str(tmp_path)], "spool: has no effect on a store on this machine"),
    ):
        assert main([*command, "--env", ENV, *options]) == 1
        assert said in capsys.readouterr().err
    assert main(command) == 1
    assert (
        "env: expected the name of a world, because a policy file does not name one; pass --env"
        in capsys.readouterr().err
    )
