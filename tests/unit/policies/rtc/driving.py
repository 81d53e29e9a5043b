"""A small flow policy and a control loop without a clock that acts with it asynchronously; for tests."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from understudy.envs import ToyTable
from understudy.policies import Acted, Sampling
from understudy.policies.flow import FlowConfig, FlowPolicy
from understudy.policies.rtc import AsyncBlocks, RTCConfig

torch.set_num_threads(1)

H = 8
NUM_STEPS = 30
Array = np.ndarray[Any, Any]


def flow_policy(**options: Any) -> FlowPolicy:
    """Shaken, since new networks say nearly the same of everything."""
    config = FlowConfig(block_steps=H, hidden=32, layers=2, word_size=4, num_inference_steps=4, act_rows=4, **options)
    world = ToyTable(cameras=False)
    policy = FlowPolicy.new(config, world.step_spec, [task.instruction for task in world.suite.tasks], seed=0)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in policy.model.parameters():
            weight += 0.2 * torch.randn(weight.shape, generator=generator)
    return policy


def drive(policy: Any, config: RTCConfig, *, sampling: Sampling | None = None, seed: int = 0) -> Array:
    """The executed actions [T, 4] of an episode."""
    world = ToyTable(cameras=False)
    observation, info = world.reset(seed=0, options={"task": "stack_red_on_blue", "start": 3})
    actions = []
    with AsyncBlocks(policy, config, sampling=sampling or Sampling(), seed=seed) as blocks:
        blocks.begin(info)
        for _ in range(NUM_STEPS):
            action, _ = blocks(observation)
            actions.append(action)
            observation, *_ = world.step(action)
    return np.stack(actions)


class Gated:
    """A policy whose calls wait until they are let through, which stands for its inference time without a clock."""

    def __init__(self, policy: FlowPolicy):
        self._policy = policy
        self.gate = threading.Semaphore(0)
        self.begun = threading.Semaphore(0)  # released by each call when it begins

    def act(self, observation: Any, instructions: Sequence[str], **options: Any) -> Acted:
        self.begun.release()
        assert self.gate.acquire(timeout=60)
        return self._policy.act(observation, instructions, **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._policy, name)
