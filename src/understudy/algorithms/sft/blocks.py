"""Blocks: a batch of demonstrated blocks of actions. Importing it does not import torch."""

from __future__ import annotations

from dataclasses import dataclass

from understudy.core import Tree
from understudy.policies.protocol import Array


@dataclass(frozen=True, kw_only=True, eq=False)
class Blocks:
    """B demonstrated blocks of H actions."""

    observation: Tree  # [B, ...]: before the first action of each block
    instruction: tuple[str, ...]  # B
    action: Tree  # [B, H, ...]
    weight: Array  # [B, H] float32: 0 behind the end of an episode
    good: Array | None = None  # [B] bool: which blocks are worth repeating; None: all, or the policy is not told
