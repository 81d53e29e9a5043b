"""The replay buffer of HIL-SERL over a store: the same calls, and every frame next to its true successor.

    buffer = MemoryEfficientReplayBuffer(env.observation_space, env.action_space, 200_000, image_keys=("wrist_1",),
                                         path="runs/pick")
    buffer.insert(transition)
    batch = buffer.sample(256, pack_obs_and_next_obs=True)

Any number of threads may insert and sample; one lock guards both. An inserted transition is durable after 50 more, at
the end of its episode, and when `sample`, `flush` or `close` returns. The newest one of an open episode is durable only
after `flush`, `close` or the next insert, because its next observation is not written until it is known whether the
next transition begins with it.

A buffer may also be served (`begin_serving`; trainer.py does it). Then actors write to its store over the network, and
their transitions are counted and sampled like those that were inserted here.
"""

from __future__ import annotations

import logging
import secrets
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from understudy.compat.arrays import freeze, place
from understudy.compat.hil_serl.packed_images import image_path, pack, with_packed_images
from understudy.compat.hil_serl.transitions import step_of
from understudy.compat.options import accept_options
from understudy.compat.spaces import spec_of
from understudy.compat.stitch_episodes import Stitcher
from understudy.compat.stored_content import StoredContent
from understudy.compat.temporary_store import temporary_store_path
from understudy.core import (
    ArraySpec,
    EpisodeInfo,
    Source,
    Spec,
    StepSpec,
    StoreClosedError,
    StoreError,
    StoreFormatError,
    TransitionBatch,
)
from understudy.core.closeable import Closeable
from understudy.core.tree import AnyTree
from understudy.replay import Reader, Store
from understudy.replay.maintain.compaction import compact
from understudy.replay.read.view import EVERYTHING, Clause, View
from understudy.replay.sample.prefetch import Prefetch
from understudy.replay.sample.sampler import Sampler
from understudy.replay.sample.selectors import Uniform
from understudy.replay.write.store import SEGMENT_BYTES

Array = np.ndarray[Any, Any]

logger = logging.getLogger(__name__)

WRITER = "hil-serl"
MIN_SEGMENT_BYTES = 2**20
RETIRE_EVERY = 100  # steps, or a tenth of the capacity if that is more

_OPTIONS = (
    "observation_space",
    "action_space",
    "capacity",
    "image_keys",
    "path",
    "seed",
    "include_next_actions",
    "include_label",
    "include_grasp_penalty",
)
_NO_EFFECT = {"next_observation_space": "next observations have the space of observations"}


class MemoryEfficientReplayBuffer(Closeable):
    """A buffer of the newest `capacity` transitions in the store at `path`; without one, in a temporary directory."""

    def __init__(
        self,
        observation_space: Any,
        action_space: Any,
        capacity: int,
        image_keys: Iterable[str] = ("image",),
        path: str | Path | None = None,
        *,
        seed: int = 0,
        include_next_actions: bool = False,
        include_label: bool = False,
        include_grasp_penalty: bool = False,
        **others: Any,
    ):
        image_keys = others.pop("pixel_keys", image_keys)  # what serl_launcher's own class calls them
        accept_options(type(self).__name__, others, _NO_EFFECT, _OPTIONS)
        if capacity < 1:
            raise StoreError(f"capacity: expected a number from 1, got {capacity}")
        self.capacity = capacity
        action = spec_of(action_space, "actions")
        extras: dict[str, Any] = {}
        if include_next_actions:
            extras |= {"next_actions": action.tree, "next_intvn": ArraySpec(shape=(), dtype="bool")}
        if include_label:
            extras["labels"] = ArraySpec(shape=(), dtype="int64")
        if include_grasp_penalty:
            extras["grasp_penalty"] = ArraySpec(shape=(), dtype="float32")
        self.spec = StepSpec(observation=spec_of(observation_space, "observations"), action=action, extras=Spec(extras))
        self.image_keys = tuple(image_path(self.spec.observation, key) for key in image_keys)
        self._seed = seed
        self._lock = threading.RLock()
        self._closed = False
        self._remove_directory: Callable[[], Any] = lambda: None
        if path is None:
            path, self._remove_directory = temporary_store_path(self)
        self.path = Path(path)
        self._num_since_retired = 0
        self._stop_serving: Callable[[], object] | None = None
        self._human_steps: _HumanSteps | None = None  # of another buffer, which are sampled as if they were here
        self._human_capacity = 0  # how many human steps to keep beyond `capacity`, for a buffer that shows them
        with ExitStack() as undo:
            self._store = undo.enter_context(Store.open(self.path, segment_bytes=_segment_bytes(self.spec, capacity)))
            self._reader = undo.enter_context(Reader(self.path))
            self._check_store()
            self._stitcher = Stitcher(
                self._store.writer(WRITER, self.spec, flush_each_episode=False), max_steps=capacity
            )
            self._sampler = self._open_sampler()
            self._num_steps, self._num_ever = self._count(), self._count_ever()
            self._stored = StoredContent(self._reader, self.spec, self._spec_id())
            undo.pop_all()

    # ---- inserting

    def insert(self, transition: Mapping[str, Any], *, human: bool = False) -> None:
        """Add a transition; arrays are copied. Only two entries of `infos` are read: `intervene_action` marks a step as
        a human's, as `human` does, and `succeed` is the success of the episode that ends here.

        One that the store had when it was opened adds nothing, so a script may load its demonstrations at each start.
        """
        step, next_observation, succeed = step_of(self.spec, transition, human=human)
        with self._lock:
            self._check_open()
            if self._stored.take(step, next_observation):
                return
            self._stitcher.add(step, next_observation, EpisodeInfo(actor=WRITER), success=succeed)
            self._num_steps += 1
            self._num_ever += 1
            self._num_since_retired += 1
            if step.last:
                self._stitcher.flush()
            if self._num_since_retired >= self._slack:
                self._num_since_retired = 0
                self._retire()

    def batch_insert(self, batch_data: Iterable[Mapping[str, Any]]) -> None:
        """Insert transitions one after the other."""
        for transition in batch_data:
            self.insert(transition)

    def flush(self) -> None:
        """Make everything inserted durable. An open episode is cut here, so its next frame is stored twice."""
        with self._lock:
            self._check_open()
            self._stitcher.cut()
            self._stitcher.flush()

    # ---- the human steps of another buffer

    def include_human_steps(self, other: MemoryEfficientReplayBuffer) -> None:
        """Count and sample the steps of `other` that a human took as if they had been inserted here too.

        They are stored once, there, and kept as long as they are among the newest `capacity` of this buffer.
        """
        with self._lock:
            self._check_open()
            if self._human_steps is not None:
                self._human_steps.close()
            self._human_steps = _HumanSteps(other, self.capacity, self._seed)
        with other._lock:
            other._human_capacity = self.capacity

    # ---- serving the store to actors

    def begin_serving(self, stop: Callable[[], object]) -> Store:
        """Give a server the store to write to; `close` calls `stop` first. Call `retire` regularly meanwhile."""
        with self._lock:
            self.flush()
            if self._stop_serving is not None:
                raise StoreError(f"{self.path}: the buffer is served already; stop that server first")
            self._stop_serving = stop
            return self._store

    def end_serving(self) -> None:
        """The server has stopped, so only this buffer writes."""
        with self._lock:
            if self._stop_serving is not None and not self._closed:
                self._num_steps, self._num_ever = self._count(), self._count_ever()
            self._stop_serving = None

    def retire(self) -> None:
        """Free the space of steps older than the newest `capacity`, once there are enough of them."""
        with self._lock:
            if not self._closed and self._count() >= self.capacity + self._slack:
                self._retire()

    @property
    def _slack(self) -> int:
        return max(self.capacity // 10, RETIRE_EVERY)

    def _count(self) -> int:
        """How many steps the store has, whoever wrote them."""
        self._stitcher.flush()
        if self._sampler is None:
            self._sampler = self._open_sampler()
        num_known = self._sampler.follow() if self._sampler is not None else 0
        return num_known + self._stitcher.open

    def _count_ever(self) -> int:
        self._stitcher.flush()
        ((found,),) = self._reader.catalog.select("select coalesce(sum(num_steps), 0) from episodes")
        return int(found)

    def _retire(self) -> None:
        """Delete the episodes that are entirely older than the newest `capacity` steps, and free their space."""
        self._stitcher.flush()
        with self._store.snapshot() as catalog:
            found = catalog.select(
                "select id, state = 'open', num_steps, num_human from episodes where deleted is null order by id desc"
            )
        rows = np.array(found, np.int64).reshape(-1, 4)
        newer, newer_human = (np.cumsum(rows[:, n]) - rows[:, n] for n in (2, 3))
        shown = (rows[:, 3] > 0) & (newer_human < self._human_capacity)
        old = rows[(newer >= self.capacity) & (rows[:, 1] == 0) & ~shown]
        if not len(old):
            return
        self._store.delete(old[:, 0].tolist())
        if compact(self._store, min_dead=0.9).segments_removed:
            self._reopen_reader()

    def _reopen_reader(self) -> None:
        """Open the reader again: a mapped file keeps its space on the disk even after it was removed."""
        num_batches = 0
        if self._sampler is not None:
            num_batches = self._sampler.num_batches
            self._sampler.close()
        self._reader.close()
        self._reader = Reader(self.path)
        self._sampler = self._open_sampler()
        if self._sampler is not None:
            self._sampler.num_batches = num_batches

    # ---- sampling

    def sample(
        self,
        batch_size: int,
        keys: Iterable[str] | None = None,
        indx: Any = None,
        pack_obs_and_next_obs: bool = False,
    ) -> Mapping[str, Any]:
        """Transitions drawn uniformly from the newest `capacity`, as a nested dict of arrays [batch_size, ...].

        In a program that uses flax it is a FrozenDict, as HIL-SERL's agents expect.

        With `pack_obs_and_next_obs` an image key of `observations` holds the frames of both, [batch_size, T + 1, ...],
        and `next_observations` has no image keys. `keys` are the fields to return; all of them without it.
        """
        if batch_size < 1:
            raise StoreError(f"batch_size: expected a number from 1, got {batch_size}")
        if indx is not None:
            raise StoreError(
                "indx: a batch is drawn, and not chosen by position; read episodes with understudy.replay.Reader on "
                f"{self.path}"
            )
        frames: dict[str, Array] = {}
        with self._lock:
            self._check_open()
            num_human = 0 if self._human_steps is None else self._human_steps.follow()
            sampler = None if num_human and not self._count() else self._updated_sampler()
            batch = (self._human_sampler() if sampler is None else sampler).make(batch_size)
            if pack_obs_and_next_obs and self.image_keys:
                batch, frames = with_packed_images(batch, self.image_keys)
            self._fill(batch, batch_size, sampler, num_human)
        observations, next_observations = batch.observation, batch.next_observation
        if frames:
            observations, next_observations = pack(observations, next_observations, frames)
        extras: AnyTree = batch.extras
        found = {
            "observations": observations,
            "actions": batch.action,
            "next_observations": next_observations,
            "rewards": batch.reward,
            "masks": 1 - batch.terminated.astype(np.float32),
            "dones": batch.terminated | batch.truncated,
            **extras,
        }
        drawn: Mapping[str, Any] = freeze(found if keys is None else {name: found[name] for name in keys})
        return drawn

    def _fill(self, batch: TransitionBatch, size: int, sampler: Sampler | None, num_human: int) -> None:
        """Draw from the own steps and from the human ones of the other buffer, each step equally likely."""
        if not num_human:
            assert sampler is not None
            sampler.sample(batch, size=size)
            return
        human = self._human_sampler()
        num_own = 0 if sampler is None else min(len(sampler), self.capacity)
        rng = np.random.Generator(np.random.Philox(key=self._seed, counter=[0, 0, 1, human.num_batches]))
        first = int(rng.binomial(size, num_own / (num_own + num_human)))
        if sampler is not None and first:
            sampler.sample(batch, at=slice(0, first), size=first)
        human.sample(batch, at=slice(first, size), size=size - first)

    def _human_sampler(self) -> Sampler:
        assert self._human_steps is not None
        assert self._human_steps.sampler is not None
        return self._human_steps.sampler

    def get_iterator(
        self, queue_size: int = 2, sample_args: Mapping[str, Any] | None = None, device: Any = None
    ) -> Iterator[Mapping[str, Any]]:
        """Endless batches; a thread samples `queue_size` of them ahead until the iterator is closed.

        With `device` they are there: tensors on a device of torch ("cuda:0"), or arrays on one of jax or a sharding.
        """
        if queue_size < 1:
            raise StoreError(f"queue_size: expected a number from 1, got {queue_size}")
        return self._batches(queue_size, dict(sample_args or {}), device)

    def seed(self, seed: int | None = None) -> list[int]:
        """Draw from now on with the random numbers of another seed."""
        with self._lock:
            self._seed = secrets.randbits(32) if seed is None else seed
            if self._sampler is not None:
                self._sampler.seed = self._seed
            return [self._seed]

    def _batches(self, queue_size: int, sample_args: dict[str, Any], device: Any) -> Iterator[Mapping[str, Any]]:
        with Prefetch(_PrefetchSource(self, sample_args, device), depth=queue_size) as ahead:
            for (batch,) in ahead:
                yield batch

    def __len__(self) -> int:
        with self._lock:
            num_steps = self._num_steps if self._stop_serving is None else self._count()
            if self._human_steps is not None and not self._closed:
                num_steps += self._human_steps.follow()
        return min(num_steps, self.capacity)

    def latest_data_id(self) -> int:
        """How many transitions were ever inserted into this store."""
        with self._lock:
            return self._num_ever if self._stop_serving is None else self._count_ever()

    def get_latest_data(self, from_id: int) -> None:
        raise StoreError(
            "get_latest_data: a buffer hands out batches, not its log; open understudy.replay.Reader on "
            f"{self.path} in any process and follow() it"
        )

    # ---- lifecycle and helpers

    def close(self) -> None:
        """Make everything durable and close the store."""
        stop = self._stop_serving
        if stop is not None:
            stop()
        with self._lock:
            if self._closed:
                return
            self._closed = True
            try:
                self._stitcher.cut()
                self._stitcher.flush()
            finally:
                if self._human_steps is not None:
                    self._human_steps.close()
                if self._sampler is not None:
                    self._sampler.close()
                self._reader.close()
                self._store.close()
                self._remove_directory()

    def _check_open(self) -> None:
        if self._closed:
            raise StoreClosedError(f"{self.path}: the buffer is closed; make a new one with this path")

    def _check_store(self) -> None:
        """Refuse a store whose steps have another spec: a buffer has only one."""
        if self._reader.catalog.spec_ids() and self._spec_id() is None:
            raise StoreFormatError(
                f"{self.path}: holds steps of another spec (`understudy info` shows it); "
                f"choose another path, or make the buffer with the spaces that it was made with"
            )

    def _spec_id(self) -> int | None:
        catalog = self._reader.catalog
        return next((number for number in catalog.spec_ids() if catalog.spec(number) == self.spec), None)

    def _open_sampler(self) -> Sampler | None:
        spec = self._spec_id()
        if spec is None:  # nothing was committed yet
            return None
        return Sampler(
            self._reader,
            EVERYTHING,
            batch_size=1,
            seed=self._seed,
            selector=Uniform(last_steps=self.capacity),
            spec=spec,
        )

    def _updated_sampler(self) -> Sampler:
        """The sampler, up to date. The newest step of an open episode is left out, unless it is the only one."""
        self._stitcher.flush()
        for _ in range(2):
            if self._sampler is None:  # not `not`: an empty sampler is false
                self._sampler = self._open_sampler()
            if self._sampler is not None and self._sampler.follow():
                return self._sampler
            self._stitcher.cut()
            self._stitcher.flush()
        raise StoreError(f"{self.path}: there is nothing to sample; insert a transition first")


class _HumanSteps:
    """A view of another buffer's store: the steps that a human took."""

    def __init__(self, other: MemoryEfficientReplayBuffer, capacity: int, seed: int):
        self._other = other
        self._capacity = capacity
        self._seed = seed
        self._reader = Reader(other.path)
        self.sampler: Sampler | None = None  # None until the other store knows the spec

    def follow(self) -> int:
        """How many steps can be drawn now; none once the other buffer is closed."""
        if self._other._closed:
            return 0
        if self.sampler is None and self._reader.catalog.spec_ids():
            self.sampler = Sampler(
                self._reader,
                _HUMAN,
                batch_size=1,
                seed=self._seed,
                selector=Uniform(last_steps=self._capacity),
                spec=self._other.spec,
            )
        return 0 if self.sampler is None else self.sampler.follow()

    def close(self) -> None:
        if self.sampler is not None:
            self.sampler.close()
        self._reader.close()


_HUMAN = View(name="human", clauses=(Clause(where="split = 'train'", sources=frozenset({Source.HUMAN})),))

MemoryEfficientReplayBufferDataStore = MemoryEfficientReplayBuffer  # the name in HIL-SERL's training script


class ReplayBuffer(MemoryEfficientReplayBuffer):
    """The buffer without images of serl_launcher; here it is the same one."""

    def __init__(
        self,
        observation_space: Any,
        action_space: Any,
        capacity: int,
        next_observation_space: Any = None,
        include_next_actions: bool = False,
        include_label: bool = False,
        include_grasp_penalty: bool = False,
        **options: Any,
    ):
        if next_observation_space is not None:
            options["next_observation_space"] = next_observation_space
        super().__init__(
            observation_space,
            action_space,
            capacity,
            (),
            include_next_actions=include_next_actions,
            include_label=include_label,
            include_grasp_penalty=include_grasp_penalty,
            **options,
        )


ReplayBufferDataStore = ReplayBuffer


class _PrefetchSource:
    """The buffer with the interface that Prefetch samples from; each batch has its own arrays."""

    def __init__(self, buffer: MemoryEfficientReplayBuffer, sample_args: dict[str, Any], device: Any):
        self._buffer = buffer
        self._device = device
        self._sample_args = sample_args

    def follow(self) -> int:
        return len(self._buffer)  # `sample` follows

    def make(self) -> list[Any]:
        return []

    def sample(self, out: list[Any]) -> list[Any]:
        batch = self._buffer.sample(**self._sample_args)
        out[:] = [batch if self._device is None else freeze(place(batch, self._device))]
        return out

    def state(self) -> dict[str, Any]:
        return {}


def _segment_bytes(spec: StepSpec, capacity: int) -> int:
    """An eighth of the buffer's size, so that space is freed in small pieces."""
    row_bytes = sum(leaf.row_bytes for leaf in spec.columns.values())
    return min(max(capacity * row_bytes // 8, MIN_SEGMENT_BYTES), SEGMENT_BYTES)
