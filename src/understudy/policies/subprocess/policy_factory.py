"""PolicyFactory: how another interpreter builds a policy. PlainPolicy: the interface of that policy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from understudy.policies.protocol import Array, PolicyError
from understudy.processes.factory_spec import FactorySpec


class PolicyFactory(FactorySpec):
    """The callable that builds a PlainPolicy, `factory(**options)`, and the interpreter it runs in."""

    error = PolicyError
    example = "my_vla:Policy"


class PlainPolicy(Protocol):
    """A block policy in the other interpreter. It takes and returns dicts of numpy arrays by the paths of their fields.

    A tree that is one array has the path ''. Log-probs, entropies and values are float32. Row i is drawn with
    `rngs[i]`, and its bits do not depend on the other rows, as for every block policy.

    A policy that makes its blocks of noise may have `noise_shape`, that of one row; then `act` also takes `noise`, an
    array [B, *noise_shape] or None, which replaces what it would draw to begin with.
    """

    block_steps: int
    log_prob_size: int
    replay_spec: Mapping[str, tuple[Sequence[int], str]]  # such as {"tokens": ((8, 7), "int32")}, of one row
    has_value: bool

    def act(
        self,
        observation: Mapping[str, Array],
        instructions: Sequence[str],
        *,
        rngs: Sequence[np.random.Generator],
        temperature: float,
        greedy: bool,
    ) -> Mapping[str, Any]:
        """Action [B, H, ...] (or a dict of such by path), replay (a dict), log_prob [B, H, D], perhaps value [B]."""
        ...

    def evaluate(
        self,
        observation: Mapping[str, Array],
        instructions: Sequence[str],
        replay: Mapping[str, Array],
        *,
        temperature: float,
    ) -> Mapping[str, Any]:
        """log_prob and entropy [B, H, D], and perhaps value [B]."""
        ...

    def load(self, path: str) -> None:
        """Take the weights from a file or directory; needed only if weights are given as a path."""
        ...

    def set_parameters(self, parameters: Mapping[str, Array]) -> None:
        """Take these weights, by name; needed only if weights are given as arrays."""
        ...
