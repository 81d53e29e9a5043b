"""Updates of SAC per CPU second, on batches in memory: the networks, the losses and the optimizer, and nothing else.

    python benchmarks/sac_updates.py                                  # this checkout
    python benchmarks/sac_updates.py --against /path/to/another/src   # beside another checkout, taking turns

With `--against`, each round measures both in processes of their own, one after the other; a ratio is the median over
rounds of this checkout's updates per CPU second over the other's.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

CASES = ("state", "state, 10 critics", "cameras")


def measure(case: str, seconds: float) -> float:
    """Updates per CPU second of one case, in this process."""
    import torch

    from understudy.algorithms import SAC, SACConfig
    from understudy.core import ArraySpec, Spec, StepSpec
    from understudy.policies import Inputs, Stats

    torch.set_num_threads(1)
    cameras = case == "cameras"
    image = ArraySpec(shape=(64, 64, 3), dtype="uint8")
    fields = {"state": ArraySpec(shape=(24,), dtype="float32"), **({"front": image, "wrist": image} if cameras else {})}
    action = Spec(ArraySpec(shape=(7,), dtype="float32", low=(-1.0,) * 7, high=(1.0,) * 7))
    spec = StepSpec(observation=Spec(fields), action=action)
    config = SACConfig(num_critics=10) if "10 critics" in case else SACConfig()
    sac = SAC(config, spec, Stats.none(Inputs(spec.observation)), seed=0)
    batch = random_batch(spec, 64 if cameras else 256)
    for _ in range(5):
        sac.update(batch, report=False)
    count, began = 0, time.process_time()
    while time.process_time() - began < seconds:
        sac.update(batch, report=count % 20 == 0)
        count += 1
    return count / (time.process_time() - began)


def random_batch(spec: Any, size: int) -> Any:
    """A batch of noise."""
    from understudy.core import TransitionBatch

    rng = np.random.default_rng(0)

    def draw(spec: Any) -> Any:
        return {
            path: rng.integers(0, 256, (size, *leaf.shape), dtype=np.uint8)
            if leaf.dtype == "uint8"
            else rng.uniform(-1, 1, (size, *leaf.shape)).astype(np.float32)
            for path, leaf in spec.flat.items()
        }

    action = draw(spec.action)[""]
    return TransitionBatch(
        observation=draw(spec.observation),
        action=action,
        reward=rng.random(size).astype(np.float32),
        next_observation=draw(spec.observation),
        terminated=rng.random(size) < 0.1,
        truncated=np.zeros(size, bool),
        num_steps=np.ones(size, np.int32),
        source=np.zeros(size, np.uint8),
        policy_version=np.zeros(size, np.int64),
        proposal=action,
        has_proposal=np.zeros(size, bool),
        extras={},
        episode=np.zeros(size, np.int64),
        index=np.zeros(size, np.int32),
        weight=np.ones(size, np.float32),
    )


def in_process(src: str, case: str, seconds: float) -> float:
    """The same in a process that imports Understudy from `src`."""
    command = [sys.executable, __file__, "--case", case, "--seconds", str(seconds)]
    environment = {**os.environ, "PYTHONPATH": src, "OMP_NUM_THREADS": "1"}
    return float(json.loads(subprocess.run(command, env=environment, check=True, capture_output=True).stdout))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--against", help="The src directory of another checkout to compare with.")
    parser.add_argument("--rounds", type=int, default=7, help="Number of rounds of each case.")
    parser.add_argument("--seconds", type=float, default=3.0, help="CPU seconds of each measurement.")
    parser.add_argument("--case", choices=CASES, help="Measure one case in this process and print its number.")
    options = parser.parse_args()
    if options.case is not None:
        print(json.dumps(measure(options.case, options.seconds)))
        return
    here = str(Path(__file__).resolve().parent.parent / "src")
    for case in CASES:
        ours, theirs = [], []
        for _ in range(options.rounds):
            ours.append(in_process(here, case, options.seconds))
            if options.against is not None:
                theirs.append(in_process(options.against, case, options.seconds))
        line = f"{case}: {np.median(ours):.1f} updates per CPU second"
        if theirs:
            ratio = np.median(np.array(ours) / np.array(theirs))
            line += f", the other {np.median(theirs):.1f}, ratio {ratio:.3f}"
        print(line, flush=True)


if __name__ == "__main__":
    main()
