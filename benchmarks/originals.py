"""Our buffers beside those whose names they have: RLinf's TrajectoryReplayBuffer and HIL-SERL's replay buffer.

    python -m benchmarks.originals --rlinf CHECKOUT --hil-serl CHECKOUT/serl_launcher

A checkout is a clone of the project. HIL-SERL's needs flax and gym beside Understudy, RLinf's needs sortedcontainers.
Both sides get the same arrays, in turn, in one process. Times are medians over the rounds, in CPU seconds with those of
background threads unless it says wall.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

CAMERAS, SIZE = ("front", "wrist"), 128
HORIZON, ENVS = 32, 4  # of a trajectory of RLinf
BATCH = 256
WARM_UP = 20  # batches; ours checks what it reads for the first time


def cpu_s(call: Callable[[], Any], repeats: int) -> float:
    """CPU seconds of a call whose result is dropped before the next one, as a learner does."""
    for _ in range(WARM_UP):
        call()
    began = time.process_time()
    for _ in range(repeats):
        call()
    return (time.process_time() - began) / repeats


def show(name: str, ours: list[float], theirs: list[float], limit: float) -> None:
    mine, other = statistics.median(ours), statistics.median(theirs)
    ratio = statistics.median(one / two for one, two in zip(ours, theirs, strict=True))
    print(f"{name:44} ours {mine * 1e3:8.1f} CPU ms, theirs {other * 1e3:8.1f}: {ratio:.2f}x (wanted at most {limit}x)")


# ---- RLinf


def rlinf(checkout: Path, rounds: int, trajectories: int) -> None:
    sys.path.insert(0, str(checkout))
    import torch
    from rlinf.data.schema.embodied_types import Trajectory
    from rlinf.data.storage.replay.buffer import TrajectoryReplayBuffer as Theirs

    from understudy.compat.rlinf import Trajectory as OurTrajectory
    from understudy.compat.rlinf import TrajectoryReplayBuffer

    torch.set_num_threads(1)
    rng = np.random.default_rng(0)

    def content() -> dict[str, Any]:
        pictures = torch.from_numpy(rng.integers(0, 255, (HORIZON + 1, ENVS, SIZE, SIZE, 3), np.uint8))
        ends = torch.zeros(HORIZON, ENVS, 1, dtype=torch.bool)
        ends[-1] = True
        return {
            "max_episode_length": HORIZON,
            "actions": torch.from_numpy(rng.standard_normal((HORIZON, ENVS, 56), np.float32)),
            "rewards": torch.zeros(HORIZON, ENVS, 1),
            "terminations": ends,
            "truncations": torch.zeros_like(ends),
            "dones": ends,
            "curr_obs": {"main_images": pictures[:-1], "states": torch.zeros(HORIZON, ENVS, 8)},
            "next_obs": {"main_images": pictures[1:], "states": torch.zeros(HORIZON, ENVS, 8)},
        }

    added: tuple[list[float], list[float]] = ([], [])
    returned: tuple[list[float], list[float]] = ([], [])
    sampled: tuple[list[float], list[float]] = ([], [])
    for _ in range(rounds):
        given = [content() for _ in range(trajectories)]
        folder = Path(tempfile.mkdtemp())
        try:
            buffers: list[Any] = [
                TrajectoryReplayBuffer(auto_save=True, auto_save_path=folder / "ours", durability="async"),
                Theirs(auto_save=True, auto_save_path=str(folder / "theirs"), enable_cache=True, cache_size=5),
            ]
            kinds: list[Any] = [OurTrajectory, Trajectory]
            for side, (buffer, kind) in enumerate(zip(buffers, kinds, strict=True)):
                made = [kind(**one) for one in given]
                began, used = time.monotonic(), time.process_time()
                buffer.add_trajectories(made)
                returned[side].append(time.monotonic() - began)
                buffer.wait() if side == 0 else buffer.close(wait=True)
                added[side].append(time.process_time() - used)
            reopened = Theirs(auto_save=False, enable_cache=True, cache_size=5)
            reopened.load_checkpoint(str(folder / "theirs"))
            samplers: list[Any] = [buffers[0], reopened]
            for side, buffer in enumerate(samplers):
                sampled[side].append(cpu_s(partial(buffer.sample, BATCH), 10))
            buffers[0].close()
        finally:
            shutil.rmtree(folder)
    show(f"RLinf: add {trajectories} trajectories, until on disk", *added, limit=1.0)
    show("RLinf: until add_trajectories returns (wall)", *returned, limit=1.0)
    show(f"RLinf: sample {BATCH}", *sampled, limit=0.3)


# ---- HIL-SERL


def hil_serl(checkout: Path, rounds: int, steps: int) -> None:
    sys.path.insert(0, str(checkout))
    import gymnasium as gym
    from serl_launcher.data.memory_efficient_replay_buffer import MemoryEfficientReplayBuffer as Theirs

    from understudy.compat import MemoryEfficientReplayBufferDataStore

    box = gym.spaces.Box
    pictures = {name: box(0, 255, (1, SIZE, SIZE, 3), np.uint8) for name in CAMERAS}
    observations = gym.spaces.Dict({**pictures, "state": box(-np.inf, np.inf, (1, 20), np.float32)})
    actions = box(-1.0, 1.0, (7,), np.float32)
    rng = np.random.default_rng(0)
    seen = [
        {
            **{name: rng.integers(0, 255, (1, SIZE, SIZE, 3), np.uint8) for name in CAMERAS},
            "state": rng.standard_normal((1, 20)).astype(np.float32),
        }
        for _ in range(101)
    ]

    def transition(number: int) -> dict[str, Any]:
        at = number % 100
        return {
            "observations": seen[at],
            "next_observations": seen[at + 1],
            "actions": np.zeros(7, np.float32),
            "rewards": 0.0,
            "masks": float(at < 99),
            "dones": at == 99,
        }

    inserted: tuple[list[float], list[float]] = ([], [])
    returned: tuple[list[float], list[float]] = ([], [])
    sampled: dict[bool, tuple[list[float], list[float]]] = {True: ([], []), False: ([], [])}
    for _ in range(rounds):
        folder = Path(tempfile.mkdtemp())
        try:
            buffers: list[Any] = [
                MemoryEfficientReplayBufferDataStore(
                    observations, actions, capacity=2 * steps, image_keys=CAMERAS, path=folder / "ours"
                ),
                Theirs(observations, actions, capacity=2 * steps, pixel_keys=CAMERAS),
            ]
            for side, buffer in enumerate(buffers):
                used, took_s = time.process_time(), []
                for number in range(steps):
                    given, began = transition(number), time.perf_counter()
                    buffer.insert(given)
                    took_s.append(time.perf_counter() - began)
                returned[side].append(statistics.median(took_s))
                if side == 0:
                    buffer.flush()
                inserted[side].append((time.process_time() - used) / steps)
            for packed in (True, False):
                for side, buffer in enumerate(buffers):
                    sampled[packed][side].append(cpu_s(partial(buffer.sample, BATCH, pack_obs_and_next_obs=packed), 10))
            buffers[0].close()
        finally:
            shutil.rmtree(folder)
    show("HIL-SERL: insert one transition, durable", *inserted, limit=1.5)
    show("HIL-SERL: until insert returns (wall, median)", *returned, limit=1.5)
    for packed, times in sampled.items():
        show(f"HIL-SERL: sample {BATCH}{', packed' if packed else ''}", *times, limit=0.8)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rlinf", type=Path, help="checkout of RLinf")
    parser.add_argument("--hil-serl", type=Path, help="directory serl_launcher of a checkout of HIL-SERL")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--trajectories", type=int, default=8)
    parser.add_argument("--steps", type=int, default=2000)
    options = parser.parse_args()
    if options.rlinf is not None:
        rlinf(options.rlinf, options.rounds, options.trajectories)
    if options.hil_serl is not None:
        hil_serl(options.hil_serl, options.rounds, options.steps)


if __name__ == "__main__":
    main()
