"""Frames of a made-up camera: a smooth picture that moves, as a camera's do, and says which frame it is."""

from __future__ import annotations

from typing import Any

import numpy as np


def moving_frames(num_frames: int, height: int = 48, width: int = 64, seed: int = 0) -> np.ndarray[Any, Any]:
    """[num_frames, height, width, 3] uint8."""
    rng = np.random.default_rng(seed)
    coarse = rng.integers(30, 226, (height // 8 + 2, width // 8 + num_frames // 4 + 3, 3)).astype(np.float64)
    rows, columns = np.arange(height) / 8, np.arange(width)
    frames = []
    for number in range(num_frames):
        at = (columns + 2 * number) / 8
        frames.append(_interpolated(coarse, rows, at))
    return np.stack(frames).round().astype(np.uint8)


def _interpolated(coarse: np.ndarray[Any, Any], rows: Any, columns: Any) -> np.ndarray[Any, Any]:
    top, left = rows.astype(int), columns.astype(int)
    down, right = (rows - top)[:, None, None], (columns - left)[None, :, None]
    upper = coarse[top][:, left] * (1 - right) + coarse[top][:, left + 1] * right
    lower = coarse[top + 1][:, left] * (1 - right) + coarse[top + 1][:, left + 1] * right
    found: np.ndarray[Any, Any] = upper * (1 - down) + lower * down
    return found


def psnr(a: np.ndarray[Any, Any], b: np.ndarray[Any, Any]) -> float:
    """Peak signal to noise ratio in dB."""
    error = float(np.mean((a.astype(np.float64) - b) ** 2))
    return float("inf") if error == 0 else 10 * float(np.log10(255**2 / error))
