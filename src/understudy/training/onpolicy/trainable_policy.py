"""The policy that an on-policy run trains: a block policy with a network that is trained in place."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import nn

from understudy.core import Tree
from understudy.policies import BlockPolicy

Array = np.ndarray[Any, Any]


class TrainablePolicy(BlockPolicy, Protocol):
    """A block policy whose network can be trained in place."""

    version: int
    model: nn.Module
    forward: Callable[..., Any]  # the model, or what wraps it
    device: torch.device

    @property
    def why_no_policy_gradient(self) -> str | None:
        """Why its log-probs cannot be learned from, as a sentence; None if they can."""
        ...

    def num_tokens(self, instruction: str) -> int:
        """Number of tokens of one row in a forward pass."""
        ...

    def prepared(self, observation: Tree) -> Tree:
        """The observations of many rows, with what is slow in `evaluate` done already, for who evaluates them often."""
        ...

    def parameters(self, weights: Mapping[str, Array] | None = None) -> Tree:
        """All arrays of the policy file; `weights` are the model's if this process does not hold all of them."""
        ...

    def save(self, path: Path, weights: Mapping[str, Any] | None = None) -> None: ...
