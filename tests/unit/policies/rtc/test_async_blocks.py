"""Asynchronous acting: blocks that continue, the thread, and that a simulated delay is the same as a real one."""

from __future__ import annotations

import time
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.unit.policies.rtc.driving import NUM_STEPS, Gated, H, drive, flow_policy
from tests.unit.training.collection.scripted import Scripted, make_tickets

from understudy.envs import ToyTable
from understudy.envs.pace import Pace
from understudy.policies import PolicyError, Sampling
from understudy.policies.rtc import AsyncBlocks, Continuation, RTCConfig
from understudy.replay import Store
from understudy.training.collection.collector import Collector
from understudy.training.data.run_episode import run_episode
from understudy.training.runs.config import ConfigError

WORLD = "toy?cameras=false"
DELAYED = RTCConfig(inference_delay=2)


# ---- blocks


@pytest.mark.parametrize("method", ["rtc", "inpaint", "blend", "switch"])
def test_a_block_begins_with_the_actions_that_are_executed_meanwhile(method: Any) -> None:
    policy = flow_policy()
    old = np.random.default_rng(0).uniform(-1, 1, (H, 4)).astype(np.float32)
    state = np.zeros((1, 20), np.float32)
    continuation = Continuation(policy, RTCConfig(method=method))
    found = continuation.act(
        {"state": state}, ["go"], [old], used=3, delay=2, rngs=[np.random.default_rng(1)], sampling=Sampling()
    ).action
    plain = policy.act({"state": state}, ["go"], rngs=[np.random.default_rng(1)], sampling=Sampling()).action
    np.testing.assert_array_equal(found[0, :2], old[3:5])
    assert (found[0, 2] != old[5]).any()
    own_from = {"rtc": H, "inpaint": H, "blend": 5, "switch": 2}[method]  # behind, nothing is left of the old block
    np.testing.assert_array_equal(found[0, own_from:], plain[0, own_from:])
    if method == "blend":
        weight = 0.75 * np.expm1(0.75) / np.expm1(1)  # (5 - 2) / (5 - 2 + 1)
        np.testing.assert_allclose(found[0, 2], weight * old[5] + (1 - weight) * plain[0, 2], atol=1e-6)


@pytest.mark.parametrize("option", [field.name for field in fields(RTCConfig)])
def test_every_option_changes_the_motion(option: str) -> None:
    policy, before = flow_policy(), drive(flow_policy(), DELAYED)
    other: dict[str, Any] = {
        "method": "switch",
        "n_action_steps": 3,
        "inference_delay": 3,
        "execution_horizon": 2,
        "prefix_attention_schedule": "ones",
        "max_guidance_weight": 1.0,
    }
    changed = drive(policy, RTCConfig(**{"inference_delay": 2, option: other[option]}))
    np.testing.assert_array_equal(drive(policy, DELAYED), before)
    assert np.abs(changed - before).max() > 1e-3


def test_auto_guides_flows_and_blends_the_rest() -> None:
    assert Continuation(flow_policy(), RTCConfig()).method == "rtc"
    assert Continuation(Scripted(), RTCConfig()).method == "blend"
    np.testing.assert_array_equal(
        drive(Scripted(noise=0.3), RTCConfig(inference_delay=2)),
        drive(Scripted(noise=0.3), RTCConfig(inference_delay=2, method="blend")),
    )


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"method": "rtc"}, "rtc/method: expected a policy that can be guided, such as a flow policy, for 'rtc', got"),
        ({"n_action_steps": 6}, "rtc/n_action_steps: expected up to 5, the steps of a block, got 6; lower it"),
        ({"inference_delay": 3}, "rtc/inference_delay: expected up to 2 with blocks of 5 of which 3 are executed, got"),
        ({"n_action_steps": 0}, "rtc/n_action_steps: expected 1 or more, got 0"),
        ({"inference_delay": -1}, "rtc/inference_delay: expected 0 or more, got -1"),
        ({"max_guidance_weight": 0.0}, "rtc/max_guidance_weight: expected more than 0, got 0.0"),
    ],
)
def test_what_cannot_be_is_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(PolicyError, match=said):
        Continuation(Scripted(), RTCConfig(**options))


# ---- the thread


@pytest.mark.parametrize(
    ("policy", "config"),
    [
        (flow_policy(), RTCConfig(inference_delay=2)),
        (flow_policy(), RTCConfig(inference_delay=3, n_action_steps=3, method="inpaint")),
        (flow_policy(), RTCConfig(inference_delay=0, method="switch")),
        (Scripted(noise=0.3), RTCConfig(inference_delay=2)),
    ],
)
def test_a_simulated_delay_is_the_same_as_a_thread(policy: Any, config: RTCConfig) -> None:
    """To the bit, also for the random numbers: the Collector's episodes, and the same by AsyncBlocks."""
    tickets = make_tickets(1, "stack_red_on_blue", n_samples=3)
    with Collector(WORLD, num_parallel_envs=2, max_steps=NUM_STEPS, rtc=config) as collector:
        rollouts = collector.collect(tickets, policy, Sampling())
    world = ToyTable(cameras=False)
    with AsyncBlocks(policy, config, sampling=Sampling()) as blocks:
        for rollout in rollouts:
            ticket, episode = rollout.ticket, rollout.episode
            assert episode is not None
            observation, info = world.reset(
                seed=ticket.world_seed, options={"task": ticket.task, "start": ticket.start}
            )
            blocks.begin(info, np.random.default_rng([ticket.seed, 2]))
            executed = np.asarray(episode.extras["executed"])
            assert set(executed.sum(axis=1)[:-1]) == {blocks.continuation.n_action_steps}
            for wanted in np.asarray(episode.action)[executed]:
                action, _ = blocks(observation)
                np.testing.assert_array_equal(action, wanted)
                observation, *_ = world.step(action)


def test_the_loop_goes_on_while_a_block_is_computed_and_takes_it_when_it_is_there() -> None:
    policy = Gated(flow_policy())
    world = ToyTable(cameras=False)
    observation, info = world.reset(seed=0, options={"task": "stack_red_on_blue", "start": 3})
    with AsyncBlocks(policy, RTCConfig(n_action_steps=3), sampling=Sampling()) as blocks:
        policy.gate.release(2)  # the first block, and the first call with guidance
        blocks.begin(info)

        def step() -> None:
            nonlocal observation
            action, _ = blocks(observation)
            observation, *_ = world.step(action)

        for _ in range(6):  # the block is asked for at step 3, and nobody lets it through
            step()
        assert blocks.seams == []
        assert blocks.report.num_blocks == 0
        policy.gate.release()
        policy.begun.acquire()
        policy.begun.acquire()
        policy.begun.acquire()
        while not blocks._pending.done():  # type: ignore[union-attr]
            time.sleep(0.001)
        step()
        assert blocks.seams == [6]
        assert (blocks.report.num_blocks, blocks.report.num_waits, blocks.report.max_delay) == (1, 0, 3)
        policy.gate.release(10)  # of step 6, at once: three actions of the new block are behind
        blocks.begin(info)  # what is under way is dropped
        world.reset(seed=0, options={"task": "stack_red_on_blue", "start": 3})
        step()
        assert blocks.seams == []


def test_a_block_that_runs_out_is_waited_for_and_counted() -> None:
    class Late:
        """Slower than the block lasts, in a loop without a clock."""

        def __init__(self) -> None:
            self._policy = flow_policy()

        def act(self, *args: Any, **options: Any) -> Any:
            time.sleep(1.0)
            return self._policy.act(*args, **options)

        def __getattr__(self, name: str) -> Any:
            return getattr(self._policy, name)

    world = ToyTable(cameras=False)
    observation, info = world.reset(seed=0, options={"task": "stack_red_on_blue", "start": 3})
    with AsyncBlocks(Late(), RTCConfig(), sampling=Sampling()) as blocks:
        blocks.begin(info)
        for _ in range(H + 1):
            action, _ = blocks(observation)
            observation, *_ = world.step(action)
        assert blocks.seams == [H]
        assert blocks.report.num_waits == 1
        assert str(blocks.report).endswith("max 4 steps; 1 steps waited for a block")


def test_an_error_of_the_policy_is_raised_in_the_loop() -> None:
    class Broken:
        def __init__(self) -> None:
            self._policy, self.num_calls = flow_policy(), 0

        def act(self, *args: Any, **options: Any) -> Any:
            self.num_calls += 1
            if self.num_calls > 2:
                raise PolicyError("it broke")
            return self._policy.act(*args, **options)

        def __getattr__(self, name: str) -> Any:
            return getattr(self._policy, name)

    with pytest.raises(PolicyError, match="it broke"):
        drive(Broken(), DELAYED)
    with (
        AsyncBlocks(flow_policy(), DELAYED, sampling=Sampling()) as blocks,
        pytest.raises(PolicyError, match="begin: "),
    ):
        blocks({"state": np.zeros(20, np.float32)})


@pytest.mark.serial
def test_a_loop_at_30_hz_does_not_feel_100_ms_of_inference() -> None:
    """Each call returns in a fraction of the inference time. The benchmark runs five minutes of it and counts late
    steps; here a busy machine may be late by itself, so the margin is wide."""

    class Slow:
        def __init__(self) -> None:
            self._policy = flow_policy()

        def act(self, *args: Any, **options: Any) -> Any:
            time.sleep(0.1)
            return self._policy.act(*args, **options)

        def __getattr__(self, name: str) -> Any:
            return getattr(self._policy, name)

    world, pace, took = ToyTable(cameras=False), Pace(30), []
    observation, info = world.reset(seed=0, options={"task": "stack_red_on_blue", "start": 3})
    with AsyncBlocks(Slow(), RTCConfig(n_action_steps=4), sampling=Sampling()) as blocks:
        blocks.begin(info)
        for number in range(60):
            before = time.monotonic()
            action, _ = blocks(observation)
            if number == 0:
                pace.begin()
            else:
                took.append(time.monotonic() - before)
                pace.wait()
            observation, *_ = world.step(action)
        assert blocks.report.num_blocks > 5
        assert blocks.report.mean_delay >= 2.5
    assert np.median(took) < 0.02
    assert np.mean(np.array(took) > 0.08) < 0.1


# ---- where it is used


def test_an_episode_can_be_recorded_with_it(tmp_path: Path) -> None:
    with Store.open(tmp_path / "store") as store, ToyTable(cameras=False) as world:
        world.choose("stack_red_on_blue")
        writer = store.writer("me", world.step_spec)
        with AsyncBlocks(flow_policy(), DELAYED, sampling=Sampling()) as blocks:
            result = run_episode(world, writer, act=blocks, on_reset=blocks.begin, seed=0, options={"start": 3})
        assert result.num_steps == 100
        assert blocks.report.num_blocks == 24


def test_a_collector_wants_a_delay_and_a_world_that_waits() -> None:
    with pytest.raises(ConfigError, match="rtc/inference_delay: expected a number of steps, got None; simulators wait"):
        Collector(WORLD, num_parallel_envs=1, rtc=RTCConfig())
