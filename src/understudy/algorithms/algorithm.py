"""Algorithm: an update rule. It learns from batches; others store, act and publish. Needs no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, TypeAlias

from understudy.core import TransitionBatch, Tree, UnderstudyError

State: TypeAlias = dict[str, Any]  # flat: path to numpy array, or to what JSON can hold


class AlgorithmError(UnderstudyError, ValueError):
    """An algorithm cannot use a config, a batch or a saved state."""


class Algorithm(Protocol):
    """The same seed, batches and state give the same weights, bit for bit on the CPU with as many threads.

    metrics = algorithm.update(sampler.next())
    actor_policy = actor_policy.with_parameters(algorithm.parameters(), version=7)
    saved = algorithm.state()  ...  another.restore(saved)
    """

    @property
    def num_updates(self) -> int: ...

    def update(self, batch: TransitionBatch, *, report: bool = True) -> dict[str, float]:
        """Learn from a batch; returns metrics. Without `report` no number leaves the device, and there are none."""
        ...

    def parameters(self) -> Tree:
        """The arrays that an actor needs, in memory of their own."""
        ...

    def description(self) -> dict[str, Any]:
        """Plain JSON that, with `parameters`, is the whole policy."""
        ...

    def state(self) -> State:
        """Everything that the next updates depend on."""
        ...

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue as the algorithm whose state this is, bit for bit; or refuse the state."""
        ...
