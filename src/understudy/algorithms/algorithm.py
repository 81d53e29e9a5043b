"""Algorithm: an update rule without input or output. It is given batches; others store, act and publish."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, TypeAlias

from understudy.core import TransitionBatch, Tree, UnderstudyError

State: TypeAlias = dict[str, Any]  # flat: path to numpy array, or to what JSON can hold


class AlgorithmError(UnderstudyError, ValueError):
    """A config, a batch or a saved state that an algorithm cannot use."""


class Algorithm(Protocol):
    """The same seed, batches and state give the same weights, bit for bit on the CPU with as many threads.

    metrics = algorithm.update(sampler.next())
    actor_policy = actor_policy.with_parameters(algorithm.parameters(), version=7)
    saved = algorithm.state()  ...  another.restore(saved)
    """

    @property
    def num_updates(self) -> int: ...

    def update(self, batch: TransitionBatch, *, report: bool = True) -> dict[str, float]:
        """Learn from a batch. Without `report` no number leaves the device, and the dict is empty."""
        ...

    def parameters(self) -> Tree:
        """The arrays that an actor needs, in memory of their own."""
        ...

    def description(self) -> dict[str, Any]:
        """Plain JSON that, with `parameters`, is the whole policy."""
        ...

    def state(self) -> State:
        """All that the next updates depend on."""
        ...

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on as the algorithm that the state was taken of would have; or refuse it."""
        ...
