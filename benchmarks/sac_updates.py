"""Updates of SAC per CPU second, on batches in memory: the networks, the losses and the optimizer, and nothing else.

    python benchmarks/sac_updates.py                                  # this checkout
    python benchmarks/sac_updates.py --against /path/to/another/src   # beside another checkout, taking turns

With `--against`, two processes take turns of a fraction of a second, so that both see the same load of the machine. The
ratio is the median over turns of this checkout's updates per CPU second over the other's.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

# Hidden units, number of critics, rows of a batch, cameras of 64 x 64 pixels.
CASES: dict[str, tuple[int, int, int, int]] = {
    "state, the default of `train rlpd`": (128, 2, 128, 0),
    "state, the default of SACConfig": (256, 2, 256, 0),
    "state, 10 critics": (256, 10, 256, 0),
    "two cameras": (128, 2, 64, 2),
}


def serve(case: str) -> None:
    """Run as many updates as each line of the input says, and answer with their CPU seconds."""
    import torch

    from understudy.algorithms import SAC, SACConfig
    from understudy.core import ArraySpec, Spec, StepSpec
    from understudy.policies import ActorConfig, Inputs, Stats

    torch.set_num_threads(1)
    hidden, num_critics, rows, cameras = CASES[case]
    fields = {f"camera_{number}": ArraySpec(shape=(64, 64, 3), dtype="uint8") for number in range(cameras)}
    fields["state"] = ArraySpec(shape=(24,), dtype="float32")
    action = Spec(ArraySpec(shape=(7,), dtype="float32", low=(-1.0,) * 7, high=(1.0,) * 7))
    spec = StepSpec(observation=Spec(fields), action=action)
    config = SACConfig(
        actor=ActorConfig(hidden=(hidden, hidden)), critic_hidden=(hidden, hidden), num_critics=num_critics
    )
    sac = SAC(config, spec, Stats.none(Inputs(spec.observation)), seed=0)
    batch = random_batch(spec, rows)
    for line in sys.stdin:
        began = time.process_time()
        for _ in range(int(line)):
            sac.update(batch, report=False)
        print(time.process_time() - began, flush=True)


class Worker:
    """A process that measures one case with the Understudy of `src`."""

    def __init__(self, src: str, case: str):
        environment = {**os.environ, "PYTHONPATH": src, "OMP_NUM_THREADS": "1"}
        command = [sys.executable, __file__, "--serve", case]
        self.process = subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def cpu_s(self, updates: int) -> float:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(f"{updates}\n")
        self.process.stdin.flush()
        return float(self.process.stdout.readline())

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


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


def compare(case: str, sources: list[str], turns: int, turn_s: float) -> str:
    """A line of figures for one case."""
    workers = [Worker(source, case) for source in sources]
    for worker in workers:
        worker.cpu_s(5)
    updates = max(1, round(turn_s / (workers[0].cpu_s(5) / 5)))
    speeds = np.array(
        [[updates / worker.cpu_s(updates) for worker in (workers, workers[::-1])[turn % 2]] for turn in range(turns)]
    )
    speeds[1::2] = speeds[1::2, ::-1]
    for worker in workers:
        worker.close()
    line = f"{case}: {np.median(speeds[:, 0]):.1f} updates per CPU second"
    if len(sources) == 1:
        return line
    ratios = speeds[:, 0] / speeds[:, 1]
    low, middle, high = np.percentile(ratios, (25, 50, 75))
    return f"{line}, the other {np.median(speeds[:, 1]):.1f}; ratio {middle:.3f} (quartiles {low:.3f} to {high:.3f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--against", help="The src directory of another checkout to compare with.")
    parser.add_argument("--turns", type=int, default=40, help="Number of turns of each process in each case.")
    parser.add_argument("--turn-s", type=float, default=0.3, help="Length of a turn, in CPU seconds.")
    parser.add_argument("--serve", choices=CASES, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve is not None:
        serve(options.serve)
        return
    sources = [str(Path(__file__).resolve().parent.parent / "src")]
    if options.against is not None:
        sources.append(options.against)
    for case in CASES:
        print(compare(case, sources, options.turns, options.turn_s), flush=True)


if __name__ == "__main__":
    main()
