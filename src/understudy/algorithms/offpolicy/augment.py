"""Augmentation: each image is shifted at random by a few pixels, and its edges are repeated."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor


def random_shift(images: Tensor, pixels: int, generator: torch.Generator) -> Tensor:
    """uint8 [B, H, W, C], each shifted by -pixels to pixels along both axes; no values are interpolated."""
    num, height, width, channels = images.shape
    device = images.device
    shifts = torch.randint(-pixels, pixels + 1, (2, num), generator=generator, device=device)
    rows = (torch.arange(height, device=device) + shifts[0, :, None]).clamp_(0, height - 1)  # [B, H]
    columns = (torch.arange(width, device=device) + shifts[1, :, None]).clamp_(0, width - 1)  # [B, W]
    starts = (torch.arange(num, device=device)[:, None] * height + rows) * width
    positions = starts[:, :, None] + columns[:, None, :]
    return images.reshape(-1, channels).index_select(0, positions.reshape(-1)).view(images.shape)


def shifted(
    observation: Mapping[str, Tensor], cameras: Sequence[str], pixels: int, generator: torch.Generator
) -> dict[str, Tensor]:
    """An observation with each camera's images shifted independently; 0 pixels draw no random numbers."""
    if pixels == 0 or not cameras:
        return dict(observation)
    return {**observation, **{path: random_shift(observation[path], pixels, generator) for path in cameras}}
