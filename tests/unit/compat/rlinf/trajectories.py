"""Trajectories in which every field of every step says which step it is, and a check of batches of them."""

from pathlib import Path
from typing import Any

import numpy as np

from understudy.compat import TrajectoryReplayBuffer


def make(path: Path, **options: Any) -> TrajectoryReplayBuffer:
    return TrajectoryReplayBuffer(**{"auto_save_path": path, "sample_window_size": 0, **options})


def trajectory(number: int, length: int = 6, batch: int = 3, done_at: int | None = None, **others: Any) -> dict:
    """Every field of every step says which trajectory, time and column it is of."""
    time, column = np.meshgrid(np.arange(length), np.arange(batch), indexing="ij")
    code = (number * 10_000 + time * 100 + column).astype(np.int64)
    dones = np.zeros((length, batch, 1), bool)
    if done_at is not None:
        dones[done_at] = True
    return {
        "actions": np.repeat(code[..., None], 4, 2).astype(np.float32),
        "rewards": code[..., None].astype(np.float32),
        "terminations": dones,
        "truncations": np.zeros_like(dones),
        "dones": dones,
        "prev_logprobs": code[..., None].astype(np.float64),
        "versions": np.full((length, batch, 1), number, np.float32),
        "forward_inputs": {"tokens": code[..., None] + np.arange(3)},
        "curr_obs": _observation(code),
        "next_obs": _observation(code + 100),
        **others,
    }


def _observation(code: np.ndarray) -> dict[str, np.ndarray]:
    image = np.zeros((*code.shape, 4, 4, 3), np.uint8)
    for n in range(3):
        image[..., n] = (code // 256**n % 256)[..., None, None]
    return {"main_images": image, "states": code[..., None].astype(np.float64)}


def shown(tree: dict[str, np.ndarray]) -> np.ndarray:
    image = tree["main_images"].astype(np.int64)
    code = image[..., 0] + 256 * image[..., 1] + 65536 * image[..., 2]
    assert (code == code[:, :1, :1]).all()
    assert np.array_equal(code[:, 0, 0], tree["states"][:, 0])
    return code[:, 0, 0]


def check(batch: dict[str, Any]) -> set[int]:
    """Every transition is one that was added, in all of its fields; returns which."""
    code = shown(batch["curr_obs"])
    assert np.array_equal(shown(batch["next_obs"]), code + 100)
    assert np.array_equal(batch["actions"], np.repeat(code[:, None], 4, 1).astype(np.float32))
    assert np.array_equal(batch["rewards"], code[:, None].astype(np.float32))
    assert np.array_equal(batch["prev_logprobs"][:, 0], code)
    assert np.array_equal(batch["versions"][:, 0], code // 10_000)
    assert np.array_equal(batch["forward_inputs"]["tokens"], code[:, None] + np.arange(3))
    return set(code.tolist())


def codes(*numbers: int, length: int = 6, batch: int = 3) -> set[int]:
    return {n * 10_000 + t * 100 + b for n in numbers for t in range(length) for b in range(batch)}
