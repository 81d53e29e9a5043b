"""How long an on-policy run stands still to save, and what that costs in host memory.

    python -m benchmarks.checkpoint_stall [--rounds 7] [--updates 3]

A run of GRPO trains a small VLA of 61 million parameters (732 MB of weights and optimizer state) on a CPU. In turns, it
saves and waits for the disk, and saves and goes on. Then it makes the same updates with a write under way and without
one, which shows what the thread takes from the run. All times are medians.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from tests.sides import SidesWorld
from tests.unit.training.onpolicy.making import make_config

from understudy.policies.vla import VLAPolicy
from understudy.training.gpu_estimate.measured_update import NETWORK
from understudy.training.onpolicy.onpolicy_run import OnPolicyRun
from understudy.training.runs.run import Run


def measure(place: Path, rounds: int, updates: int) -> dict[str, Any]:
    world = SidesWorld(tasks=2)
    instructions = [task.instruction for task in world.suite.tasks]
    network = replace(NETWORK, cameras=("camera",), patch=4, block_steps=3)
    VLAPolicy.new(network, world.step_spec, instructions, seed=0).save(place / "policy.safetensors")
    config = make_config(place / "policy.safetensors", iterations=100, checkpoint_every=100, keep_checkpoints=1)
    waits, stalls, writes = [], [], []
    alone, beside = [], []
    with OnPolicyRun(Run.create(place / "run", "grpo", config)) as run:
        engine = run._learner.engine
        state = sum(value.nbytes for value in engine.tensors().values())
        _wait(run)
        for _ in range(rounds):
            began = time.perf_counter()
            run._save()
            _wait(run)
            waits.append(time.perf_counter() - began)
            began = time.perf_counter()
            run._save()
            stalls.append(time.perf_counter() - began)
            beside.append(_update(run, updates))
            _wait(run)
            writes.append(time.perf_counter() - began)
            alone.append(_update(run, updates))
    return {
        "state_bytes": state,
        "waiting_for_the_disk_s": statistics.median(waits),
        "standing_still_s": statistics.median(stalls),
        "standing_still_each_s": stalls,
        "until_it_is_on_the_disk_s": statistics.median(writes),
        "updates_s": statistics.median(alone),
        "updates_with_a_write_s": statistics.median(beside),
        "peak_bytes": _peak_bytes(),
    }


def _wait(run: OnPolicyRun) -> None:
    """Versions that wrote while the run stood still have nothing to wait for."""
    if hasattr(run, "_wait_saved"):
        run._wait_saved()


def _update(run: OnPolicyRun, num: int) -> float:
    """Seconds of so many updates on zeros."""
    engine, policy = run._learner.engine, run.policy
    rows = 2
    seen = {"camera": torch.zeros(rows, 16, 16, 3, dtype=torch.uint8).numpy()}
    spec = policy.replay_spec.flat.items()  # type: ignore[attr-defined]
    replay = {name: torch.zeros(rows, *leaf.fixed_shape, dtype=torch.int32).numpy() for name, leaf in spec}
    began = time.perf_counter()
    for _ in range(num):
        evaluated = policy.evaluate(seen, ["go left"] * rows, replay, sampling=run.config.sampling)
        engine.backward(evaluated.log_prob.mean(), last=True)
        engine.step()
    return time.perf_counter() - began


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--updates", type=int, default=3)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        print(json.dumps(measure(Path(place), options.rounds, options.updates)))


if __name__ == "__main__":
    main()
