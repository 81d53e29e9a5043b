"""Selectors: which steps are sampled next, and with which weight.

They return the rows after the steps, as the ViewIndex has them. A selector's state is a few numbers; only that of
Prioritized also holds the priorities.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import numpy as np

from understudy.core import StoreError
from understudy.replay.format.arrays import Array
from understudy.replay.read.view import ViewIndex
from understudy.replay.sample.sumtree import SumTree


class Drawn(NamedTuple):
    """The rows after the sampled steps, by span and offset, and the weight of each."""

    span: Array
    offset: Array
    weight: Array  # float32


class Selector(Protocol):
    """How steps are chosen."""

    def available(self, index: ViewIndex) -> int:
        """How many steps it can choose from now."""

    def draw(self, index: ViewIndex, rng: np.random.Generator, size: int) -> Drawn: ...

    def state(self) -> dict[str, Any]: ...

    def restore(self, state: dict[str, Any]) -> None: ...


class _Stateless:
    def available(self, index: ViewIndex) -> int:
        return len(index)

    def state(self) -> dict[str, Any]:
        return {}

    def restore(self, state: dict[str, Any]) -> None:
        if state:
            raise StoreError(
                f"{type(self).__name__} has no state, got {sorted(state)}; it was saved by another selector"
            )


class Uniform(_Stateless):
    """Every step with the same probability; only the newest `last_steps` of the view, if given."""

    def __init__(self, *, last_steps: int | None = None):
        if last_steps is not None and last_steps < 1:
            raise StoreError(f"last_steps: expected None or a number from 1, got {last_steps}")
        self._last_steps = last_steps
        self.options = {"last_steps": last_steps}

    def draw(self, index: ViewIndex, rng: np.random.Generator, size: int) -> Drawn:
        total = len(index)
        first = 0 if self._last_steps is None else max(total - self._last_steps, 0)
        return Drawn(*index.find(rng.integers(first, total, size)), np.ones(size, np.float32))


class UniformEpisodes(_Stateless):
    """An episode uniformly, then a step of it uniformly; only the newest `last_episodes`, if given.

    With `by_steps`, every step of those episodes has the same probability. With `from_start`, the first step of the
    episode is taken: together with a long padded Sequences, that gives whole episodes.
    """

    def __init__(self, *, last_episodes: int | None = None, by_steps: bool = False, from_start: bool = False):
        if by_steps and from_start:
            raise StoreError("by_steps and from_start exclude each other; choose one")
        if last_episodes is not None and last_episodes < 1:
            raise StoreError(f"last_episodes: expected None or a number from 1, got {last_episodes}")
        self._last_episodes = last_episodes
        self._by_steps = by_steps
        self._from_start = from_start
        self.options = {"last_episodes": last_episodes, "by_steps": by_steps, "from_start": from_start}

    def draw(self, index: ViewIndex, rng: np.random.Generator, size: int) -> Drawn:
        episodes = index.episodes()
        if self._last_episodes is not None:
            episodes = episodes[-self._last_episodes :]
        counts = index.episode_counts(episodes)
        if self._by_steps:
            ends = np.cumsum(counts)
            target = rng.integers(0, ends[-1], size)
            which = np.searchsorted(ends, target, side="right")
            into = target - (ends[which] - counts[which])
        else:
            which = rng.integers(0, len(episodes), size)
            into = np.zeros(size, np.int64) if self._from_start else rng.integers(0, counts[which])
        return Drawn(*index.find_in_episodes(episodes[which], into), np.ones(size, np.float32))


class Fifo:
    """First in, first out: each step once, or `times` times in a row, in the order in which outcomes were committed."""

    def __init__(self, *, times: int = 1):
        if times < 1:
            raise StoreError(f"times: expected a number from 1, got {times}")
        self._times = times
        self.options = {"times": times}
        self._next_row = 0  # number among all rows, in the order of the commits
        self._given = 0  # how often the step there was sampled already

    def available(self, index: ViewIndex) -> int:
        return (len(index) - index.position_of_row(self._next_row)) * self._times - self._given

    def draw(self, index: ViewIndex, rng: np.random.Generator, size: int) -> Drawn:
        if size > self.available(index):
            raise StoreError(f"the queue has {self.available(index)} steps left, asked for {size}; wait for more")
        first = index.position_of_row(self._next_row)
        positions = first + (self._given + np.arange(size)) // self._times
        span, offset = index.find(positions)
        end = self._given + size
        if size:
            self._next_row = int(index.step_index.row_number(span[-1:], offset[-1:])[0]) + (end % self._times == 0)
            self._given = end % self._times
        return Drawn(span, offset, np.ones(size, np.float32))

    def state(self) -> dict[str, Any]:
        return {"next_row": self._next_row, "given": self._given}

    def restore(self, state: dict[str, Any]) -> None:
        self._next_row, self._given = int(state["next_row"]), int(state["given"])


class Prioritized:
    """Steps with probability proportional to `priority ** alpha`; a new step has the highest priority so far.

    The weight of a sampled step is `(N * P) ** -beta`, divided by the largest of the batch.
    """

    def __init__(self, *, alpha: float = 0.6, beta: float = 0.4):
        if alpha < 0 or not 0 <= beta <= 1:
            raise StoreError(f"prioritized: expected alpha from 0 and beta from 0 to 1, got {alpha} and {beta}")
        self._alpha = alpha
        self._beta = beta
        self._highest = 1.0
        self._priority = np.zeros(0)  # by row; 0 if it was never in the view
        self._tree = SumTree(np.float64)
        self._seen = -1  # the commit of the index at the last update

    def available(self, index: ViewIndex) -> int:
        return len(index)

    def draw(self, index: ViewIndex, rng: np.random.Generator, size: int) -> Drawn:
        self._synchronize(index)
        total = float(self._tree.total)
        rows, _ = self._tree.find(rng.random(size) * total)
        chance = self._tree.weights(rows) / total
        weight = (len(index) * chance) ** -self._beta
        span, offset = index.step_index.row_position(rows)
        return Drawn(span, offset, (weight / weight.max(initial=1e-12)).astype(np.float32))

    def update(self, index: ViewIndex, episode: Array, step: Array, priority: Array) -> None:
        """Set the priorities of steps; steps that are no longer in the view are ignored."""
        if not (np.isfinite(priority).all() and (np.asarray(priority) > 0).all()):
            raise StoreError("priority: expected finite numbers above 0; add a small constant to the error")
        self._synchronize(index)
        rows = np.array(
            [index.step_index.row_number_of(int(e), int(i) + 1) for e, i in zip(episode, step, strict=True)]
        )
        inside = self._tree.weights(rows) > 0
        rows, priority = rows[inside], np.asarray(priority, np.float64)[inside]
        self._priority[rows] = priority
        self._highest = max(self._highest, float(priority.max(initial=0)))
        self._tree.set(rows, priority**self._alpha)

    def _synchronize(self, index: ViewIndex) -> None:
        if self._seen == index.commit:
            return
        self._seen = index.commit
        inside = index.row_mask()
        grown = len(inside) - len(self._tree)
        self._priority = np.concatenate([self._priority, np.zeros(len(inside) - len(self._priority))])
        if grown:
            self._tree.append(np.zeros(grown))
        known = self._tree.weights(np.arange(len(inside))) > 0
        new = np.flatnonzero(inside & ~known)
        fresh = new[self._priority[new] == 0]
        self._priority[fresh] = self._highest
        self._tree.set(new, self._priority[new] ** self._alpha)
        gone = np.flatnonzero(~inside & known)
        self._tree.set(gone, np.zeros(len(gone)))

    def state(self) -> dict[str, Any]:
        return {"highest": self._highest, "priority": self._priority.copy()}

    def restore(self, state: dict[str, Any]) -> None:
        self._highest = float(state["highest"])
        self._priority = np.array(state["priority"], np.float64)
        self._tree, self._seen = SumTree(np.float64), -1
