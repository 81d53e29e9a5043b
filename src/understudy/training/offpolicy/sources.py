"""Supply: the steps of a view to draw from, in a store here or on a server elsewhere; sharded.py has several of it."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from understudy.core import StepSpec, StoreError, TransitionBatch, Tree, UnavailableError
from understudy.replay import Reader, Sampler, Transitions, View

if TYPE_CHECKING:
    from understudy.service.client.connection import Connection
    from understudy.service.client.remote_sampler import RemoteSampler

logger = logging.getLogger(__name__)

PATIENCE_S = 10.0  # for an answer, before a shard is away
RETRY_S = 5.0  # between two looks at one that is


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What a supply is to give."""

    view: View
    spec: StepSpec
    seed: int
    shape: Transitions


class Supply(Protocol):
    """The steps of one view. Not for several threads at once."""

    def __len__(self) -> int:
        """Steps that there are, as far as is known."""
        ...

    @property
    def num_lived(self) -> int:
        """Steps that there ever were: with those that were lost."""
        ...

    @property
    def as_of(self) -> str:
        """Up to where they are known, for people."""
        ...

    @property
    def away(self) -> Mapping[str, str]:
        """Shards that do not answer now, and why."""
        ...

    def follow(self) -> int:
        """Take in what is new; returns how many there are."""
        ...

    def fill(self, batch: TransitionBatch, at: slice) -> None:
        """Draw the next steps into a part of a batch."""

    def sample(self, size: int) -> TransitionBatch:
        """The next steps as a batch of their own."""
        ...

    def look(self, num_steps: int) -> Tree:
        """Observations of some steps, the same ones for the same contents; moves no cursor."""
        ...

    def state(self) -> dict[str, Any] | None: ...

    def restore(self, state: Mapping[str, Any] | None) -> None: ...


def batch_of(supply: Supply, asked: Asked, size: int, where: str) -> TransitionBatch:
    """The next steps of a supply as a batch of their own."""
    if not len(supply):
        raise StoreError(f"{where}: has no steps; record demonstrations, or practise first")
    batch = asked.shape.make(asked.spec, size)
    supply.fill(batch, slice(0, size))
    return batch


# ---- a store here


class StoreSupply:
    """The steps of a store on this machine, from the moment it has any of the right spec."""

    def __init__(self, undo: ExitStack, store: Path, asked: Asked):
        self._undo = undo
        self._reader = undo.enter_context(Reader(store))
        self._asked = asked
        self._sampler: Sampler | None = None
        self._number = 0  # of the spec in the store
        self._find()

    def _find(self) -> None:
        """Make the sampler, if the store knows the spec by now."""
        known = {number: self._reader.spec(number) for number in self._reader.catalog.spec_ids()}
        for number, spec in known.items():
            if spec == self._asked.spec:
                self._number = number
                self._sampler = Sampler(
                    self._reader,
                    self._asked.view,
                    batch_size=1,
                    seed=self._asked.seed,
                    spec=number,
                    shape=self._asked.shape,
                )
                self._undo.callback(self._sampler.close)
                return
        if known:
            raise _of_another_kind(str(self._reader.path), next(iter(known.values())), self._asked.spec)

    @property
    def as_of(self) -> str:
        return f"commit {self._commit}"

    @property
    def away(self) -> Mapping[str, str]:
        return {}

    @property
    def _commit(self) -> int:
        """The last commit that was taken in."""
        return 0 if self._sampler is None else self._sampler.step_index.commit

    @property
    def store(self) -> str:
        """Its identity."""
        return self._reader.catalog.store_id

    def __len__(self) -> int:
        return 0 if self._sampler is None else len(self._sampler)

    @property
    def num_lived(self) -> int:
        return len(self)

    def follow(self) -> int:
        if self._sampler is None:
            self._find()
        return 0 if self._sampler is None else self._sampler.follow()

    def fill(self, batch: TransitionBatch, at: slice) -> None:
        assert self._sampler is not None
        self._sampler.sample(batch, at=at, size=at.stop - at.start)

    def sample(self, size: int) -> TransitionBatch:
        return batch_of(self, self._asked, size, str(self._reader.path))

    def look(self, num_steps: int) -> Tree:
        assert self._sampler is not None
        looking = Sampler(self._reader, self._asked.view, batch_size=num_steps, seed=0, spec=self._number)
        try:
            looking.follow(self._commit)
            found: TransitionBatch = looking.sample()
            return found.observation
        finally:
            looking.close()

    def state(self) -> dict[str, Any] | None:
        return None if self._sampler is None else self._sampler.state()

    def restore(self, state: Mapping[str, Any] | None) -> None:
        if state is not None:
            if self._sampler is None:
                raise StoreError(f"{self._reader.path}: has lost the steps that the checkpoint counts on; restore it")
            self._sampler.restore(state)


# ---- a server


class ServerSupply:
    """The steps of a shard that is elsewhere. What cannot be had makes it `problem`, and nothing raises. If there is
    another store there some day, the steps of the one before are `lost`."""

    def __init__(self, undo: ExitStack, connection: Connection, asked: Asked):
        self.problem: str | None = None  # why it does not answer
        self._connection = connection
        self._asked = asked
        self._sampler = self._new(asked.seed, asked.shape)
        undo.callback(lambda: self._sampler.close())  # noqa: PLW0108 (it may be another by then)
        self.lost = 0
        self._checked = False
        self._told = 0  # steps that it had when it was heard last
        self._retry = ("", 0.0)  # its address when it failed, and when to look again

    def _new(self, seed: int, shape: Transitions) -> RemoteSampler:
        from understudy.service.client.remote_sampler import RemoteSampler  # only now: it needs gRPC

        return RemoteSampler(
            self._connection, self._asked.view, batch_size=1, seed=seed, shape=shape, depth=0, timeout_s=PATIENCE_S
        )

    @property
    def as_of(self) -> str:
        return f"commit {0 if self._sampler.known is None else self._sampler.known['commit']}"

    def __len__(self) -> int:
        return self._told

    # Asking and hearing are two calls, so that all shards work at the same time.

    def ask(self, size: int) -> None:
        """Ask for steps; for none, to hear what there is. Who is away is not asked, until it is time to look again."""
        if self.problem is None or self._is_back():
            self._sampler.ask(size)

    def hear(self) -> bool:
        """Take in what it says after `ask(0)`; False if it is away."""
        return self.problem is None and self._try(self._sampler.hear)

    def fill(self, batch: TransitionBatch, at: slice) -> bool:
        """What was asked for, into a part of a batch; False if it is away."""
        return self.problem is None and self._try(lambda: self._sampler.collect(batch, at))

    def look(self, num_steps: int) -> Tree | None:
        found: list[Tree] = []

        def look() -> None:
            looking = self._new(0, Transitions())
            try:
                found.append(looking.sample(size=num_steps).observation)
            finally:
                looking.close()

        return found[0] if self.problem is None and self._try(look) else None

    def _try(self, call: Callable[[], object]) -> bool:
        from understudy.service.wire.protocol import ReplacedError  # only now: it needs gRPC

        try:
            call()
        except UnavailableError as error:
            logger.warning("%s: is away (%s); going on without it until it is back", self._connection.name, error)
            self.problem = str(error)
            self._retry = (self._connection.address, time.monotonic() + RETRY_S)
            self._sampler.give_up()
            return False
        except ReplacedError:
            logger.warning(
                "%s: has another store, and %d steps of view %s that were learned from are lost",
                self._connection.name,
                self._told,
                self._asked.view.name,
            )
            self.lost, self._told = self.lost + self._told, 0
            self._sampler.close()
            self._sampler = self._new(self._asked.seed, self._asked.shape)
            return False
        self._check()
        self._told = len(self._sampler)
        return True

    def _check(self) -> None:
        if not self._checked and self._sampler.known is not None:
            if self._sampler.spec != self._asked.spec:
                raise _of_another_kind(self._connection.name, self._sampler.spec, self._asked.spec)
            self._checked = True

    def _is_back(self) -> bool:
        address, at = self._retry
        if address == self._connection.address and time.monotonic() < at:
            return False
        problem = self._connection.problem()
        if problem is not None:
            self._retry = (self._connection.address, time.monotonic() + RETRY_S)
            return False
        logger.info("%s: is back", self._connection.name)
        self.problem = None
        return True

    @property
    def store(self) -> str | None:
        """The identity of the store there, once it was heard."""
        return self._sampler.store

    def state(self) -> dict[str, Any] | None:
        return self._sampler.known

    def restore(self, state: Mapping[str, Any] | None, num_steps: int, store: str | None) -> None:
        """Go on where a state of a store was taken, with so many steps; the shard need not be there yet."""
        self._told = num_steps
        if state is not None:
            self._sampler.go_on_from(state, store)


def _of_another_kind(where: str, one: StepSpec, other: StepSpec) -> StoreError:
    return StoreError(
        f"{where}: holds steps of another kind ({_difference(one, other)}); "
        f"record and train in the same world with the same options"
    )


def _difference(one: StepSpec, other: StepSpec) -> str:
    """Where two specs part, for an error."""
    flat, other_flat = (
        dict([*spec.observation.leaves("observation"), *spec.action.leaves("action")]) for spec in (one, other)
    )
    for path in sorted({*flat, *other_flat}):
        if flat.get(path) != other_flat.get(path):
            return f"{path} is {flat.get(path, 'not there')}, expected {other_flat.get(path, 'nothing')}"
    return "its reward or extras differ"
