"""The memory that `understudy plan` estimates, against what torch allocates for an update on the CPU.

    python -m benchmarks.plan_memory [--rows 4]

Two small VLAs of 61 and 165 million parameters, trained by the Engine in float32: forward, backward, AdamW. The peak
is that of torch's profiler, which sees every allocation, plus what was there before.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from understudy.policies import Sampling
from understudy.policies.vla import VLAConfig, VLAPolicy
from understudy.training.distributed.config import EngineConfig
from understudy.training.distributed.engine import Engine
from understudy.training.distributed.ranks import single_rank
from understudy.training.gpu_estimate.duration import Assumptions
from understudy.training.gpu_estimate.estimate import estimate
from understudy.training.gpu_estimate.gpus import parse_gpus
from understudy.training.gpu_estimate.measured_update import NETWORK, SPEC, peak_bytes
from understudy.training.onpolicy.config import OnPolicyConfig

SMALL = NETWORK
LARGE = replace(SMALL, vision_hidden=768, vision_layers=8, vision_heads=12, hidden=1024, layers=12, heads=16)
ENGINE = EngineConfig()


def compare(config: VLAConfig, rows: int, *, checkpointing: bool) -> dict[str, Any]:
    """Bytes that were allocated at the peak of an update, and those that the estimate says."""
    engine = replace(ENGINE, gradient_checkpointing=checkpointing)
    policy = VLAPolicy.new(config, SPEC, ["press the button"], seed=0)
    with tempfile.TemporaryDirectory() as place:
        policy.save(file := Path(place) / "policy.safetensors")
        plan = OnPolicyConfig(policy=str(file), engine=engine)
        plan = replace(
            plan,
            algorithm=replace(plan.algorithm, ppo_micro_batch_size=rows, ppo_mini_batch_size=rows),
        )
        found = estimate(plan, parse_gpus("1xA100-80GB"), Assumptions(episode_steps=64))
    measured = _measure(policy, engine, rows)
    return {
        "parameters": found.size.parameters,
        "rows": rows,
        "checkpointing": checkpointing,
        "measured": measured,
        "estimated": found.memory["learning"].total,
        "activations": found.memory["learning"].activations,
        "ratio": found.memory["learning"].total / measured,
    }


def _measure(policy: VLAPolicy, config: EngineConfig, rows: int) -> int:
    engine = Engine(policy.model, config, single_rank("cpu"))
    policy.forward = engine.forward
    observation = {"image": np.zeros((rows, 128, 128, 3), np.uint8)}
    replay = {name: np.zeros((rows, *leaf.fixed_shape), leaf.dtype) for name, leaf in policy.replay_spec.flat.items()}

    def update() -> None:
        evaluated = policy.evaluate(observation, ["press the button"] * rows, replay, sampling=Sampling())
        engine.backward(evaluated.log_prob.mean(), last=True)
        engine.step()

    update()  # what torch keeps after a first time
    before = sum(value.numel() * value.element_size() for value in engine.tensors().values())
    return peak_bytes(torch.device("cpu"), update, held=before)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=4)
    rows = parser.parse_args().rows
    for config in (SMALL, LARGE):
        for checkpointing in (False, True):
            print(json.dumps(compare(config, rows, checkpointing=checkpointing)), flush=True)


if __name__ == "__main__":
    main()
