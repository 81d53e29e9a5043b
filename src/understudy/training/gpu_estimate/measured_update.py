"""Measured update: the learner's own update of a small VLA on a device, and its peak memory beside the estimate."""

from __future__ import annotations

import gc
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from understudy.algorithms.onpolicy.policy_gradient import PolicyGradientConfig
from understudy.core import ArraySpec, Episode, EpisodeInfo, Spec, StepSpec
from understudy.envs.workers.outcomes import Stepped
from understudy.policies import Sampling
from understudy.policies.vla import VLAConfig, VLAPolicy
from understudy.training.collection.block_rows import block_spec, block_step, decisions
from understudy.training.collection.rollout import Rollout
from understudy.training.collection.task_start_plan import Ticket
from understudy.training.distributed.config import EngineConfig
from understudy.training.distributed.ranks import single_rank
from understudy.training.gpu_estimate.duration import Assumptions
from understudy.training.gpu_estimate.estimate import estimate
from understudy.training.gpu_estimate.gpus import KNOWN, Gpus
from understudy.training.onpolicy.config import OnPolicyConfig
from understudy.training.onpolicy.policy_gradient_learner import PolicyGradientLearner
from understudy.training.onpolicy.rollout_exchange import RolloutExchange

INSTRUCTION = "press the button"
SPEC = StepSpec(
    observation=Spec({"image": ArraySpec(shape=(128, 128, 3), dtype="uint8")}),
    action=Spec(ArraySpec(shape=(7,), dtype="float32", low=-1.0, high=1.0)),
)
NETWORK = VLAConfig(  # 61 million parameters
    cameras=("image",),
    patch=16,
    shuffle=1,
    vision_hidden=512,
    vision_layers=6,
    vision_heads=8,
    hidden=768,
    layers=8,
    heads=12,
    block_steps=8,
    max_words=16,
)


@dataclass(frozen=True, kw_only=True)
class MeasuredUpdate:
    """What an update took, and what the learner says of it."""

    peak_bytes: int
    seconds: float
    metrics: dict[str, float]


def measure_update(
    device: torch.device, precision: Literal["float32", "bfloat16"], *, network: VLAConfig = NETWORK, rows: int = 16
) -> MeasuredUpdate:
    """The policy acts on random images, and its learner makes two updates of all rows; the second is measured."""
    gc.collect()  # an earlier learner may refer to itself
    before = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
    new = VLAPolicy.new(network, SPEC, [INSTRUCTION], seed=0)
    policy: Any = VLAPolicy(network, SPEC, new.words, new.stats, new.model, version=0, device=device)
    config = PolicyGradientConfig(ppo_epochs=1, ppo_mini_batch_size=rows, ppo_micro_batch_size=rows)
    exchange = RolloutExchange(single_rank(str(device)))
    learner = PolicyGradientLearner(policy, config, EngineConfig(precision=precision), exchange, Sampling(), seed=0)
    added = list(exchange.add(_rollouts(policy, rows)).values())
    metrics = learner.learn(added, 0)  # makes the optimizer's state
    start_s = time.perf_counter()
    learner.learn(added, 1)
    seconds = time.perf_counter() - start_s
    held = sum(value.numel() * value.element_size() for value in learner.engine.tensors().values())
    peak = peak_bytes(device, lambda: learner.learn(added, 2), held=held) - before
    return MeasuredUpdate(peak_bytes=peak, seconds=seconds, metrics=metrics)


@cache
def estimated_bytes(precision: Literal["float32", "bfloat16"], *, network: VLAConfig = NETWORK, rows: int = 16) -> int:
    """What `understudy plan` says of the same update: bytes while learning, without the reserve."""
    with tempfile.TemporaryDirectory() as place:
        VLAPolicy.new(network, SPEC, [INSTRUCTION], seed=0).save(file := Path(place) / "policy.safetensors")
        plan = OnPolicyConfig(policy=str(file), engine=EngineConfig(precision=precision))
        algorithm = replace(plan.algorithm, ppo_micro_batch_size=rows, ppo_mini_batch_size=rows)
        plan = replace(plan, algorithm=algorithm)
        machine = Gpus(num=1, gpu=KNOWN["A100-80GB"])  # decides about time alone
        steps = Assumptions(episode_steps=network.block_steps * rows)
        return estimate(plan, machine, steps).memory["learning"].total


def peak_bytes(device: torch.device, run: Callable[[], Any], *, held: int) -> int:
    """The most that torch has allocated on a device during a call.

    On a CPU, torch's profiler sees allocations alone, so `held` are the bytes that are there before.
    """
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        run()
        torch.cuda.synchronize(device)
        return int(torch.cuda.max_memory_allocated(device))
    with torch.profiler.profile(profile_memory=True, activities=[torch.profiler.ProfilerActivity.CPU]) as profiled:
        run()
    kineto: Any = profiled.profiler
    events = [event for event in kineto.kineto_results.events() if event.name() == "[memory]"]
    now = highest = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()
        highest = max(highest, now)
    return held + highest


def _rollouts(policy: VLAPolicy, num: int) -> list[Rollout]:
    """A group of episodes of one block each on random images, of which every second one succeeds."""
    rng = np.random.default_rng(0)
    rows = block_spec(SPEC, policy)
    images = rng.integers(0, 255, (num, *SPEC.observation.flat["image"].fixed_shape), np.uint8)
    rngs = [np.random.default_rng([0, number]) for number in range(num)]
    acted = policy.act({"image": images}, [INSTRUCTION] * num, rngs=rngs, sampling=Sampling())
    found = []
    for number, decision in enumerate(decisions(acted, num, rows, clip=True)):
        last = np.arange(policy.block_steps) == policy.block_steps - 1
        nothing = np.zeros(policy.block_steps)
        stepped = Stepped(observation={}, reward=nothing, terminated=last, truncated=nothing > 0, success=last, info={})
        seen = {"image": images[number]}
        info = EpisodeInfo(task=INSTRUCTION, instruction=INSTRUCTION, init_state=0, group="0", success=number % 2 == 1)
        ticket = Ticket(
            number=number, iteration=0, task=INSTRUCTION, start=0, seed=number, group=0, slot=number, world_seed=0
        )
        episode = Episode.from_steps(rows, [block_step(seen, decision, stepped, cut=False)], seen, info)
        found.append(Rollout(ticket=ticket, episode=episode, failure=None, attempts=1))
    return found
