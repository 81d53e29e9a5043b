"""The trajectory replay buffer of RLinf over a store: the same calls, and added trajectories survive a kill.

    buffer = TrajectoryReplayBuffer(seed=1234, auto_save=True, auto_save_path="runs/pick/replay")
    buffer.add_trajectories(trajectories)  # durable when it returns; with durability="async", after wait()
    batch = buffer.sample(256)  # {"actions": [256, ...], "curr_obs": {...}, "next_obs": {...}, ...}

Tensors in, tensors out: a field comes back as it was given, of torch or of numpy, or as a tensor on `device`. Any
number of threads may add and sample; one lock guards both. A trajectory that was only partly written when the process
died is deleted when the buffer is opened again.

| loop | takes from | blocks on | woken by |
|---|---|---|---|
| writing thread (durability="async") | added trajectories, up to PENDING_BYTES | the disk | adding; `close` |
"""

from __future__ import annotations

import hashlib
import json
import logging
import secrets
import shutil
import threading
import uuid
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from understudy.compat.options import accept_options
from understudy.compat.rlinf import files as rlinf_files
from understudy.compat.rlinf.rows import Rows, arrays_of, rows_of
from understudy.compat.rlinf.stored import WRITER, StoredTrajectory, read_trajectories
from understudy.compat.rlinf.tensors import decode_value, to_tensor
from understudy.compat.rlinf.trajectory import (
    Field,
    Layout,
    ParsedTrajectory,
    Trajectory,
    as_given,
    build,
    check_same_fields,
    parse_trajectory,
)
from understudy.compat.temporary_store import temporary_store_path
from understudy.core import EpisodeInfo, StepSpec, StoreClosedError, StoreError, StoreFormatError
from understudy.core import tree as trees
from understudy.core.closeable import Closeable
from understudy.durable import files
from understudy.durable.errors import store_errors
from understudy.replay import Reader, Store, Writer
from understudy.replay.format.paths import CATALOG_FILE
from understudy.replay.maintain.backup import backup
from understudy.replay.maintain.compaction import compact
from understudy.replay.read.view import Clause, View
from understudy.replay.sample.sampler import Sampler
from understudy.replay.sample.selectors import Uniform
from understudy.replay.write.writer import FinishedEpisode

Array = np.ndarray[Any, Any]
Durability = Literal["sync", "async"]

logger = logging.getLogger(__name__)

VIEW = View(name="trajectories", clauses=(Clause(where=f"actor = '{WRITER}'"),))
CHECKPOINT_FILE = "checkpoint.json"
STATE_FILE = "understudy.json"  # beside RLinf's files: the state of sampling, which they do not have
COMMIT_BYTES = 32 * 2**20
PENDING_BYTES = 256 * 2**20  # added with durability="async" and not on disk yet; then `add_trajectories` waits
FREE_EVERY = 8  # trajectories outside the window of a temporary buffer, or a quarter of the window if that is more

_OPTIONS = ("seed", "sample_window_size", "auto_save", "auto_save_path", "trajectory_format", "device", "durability")
_NO_EFFECT = {
    "enable_cache": "small fields are kept in memory, and frames are read from files that the system caches",
    "cache_size": "small fields are kept in memory, and frames are read from files that the system caches",
    "cache_all_when_not_saving": "with auto_save=False everything is in a temporary directory",
    "auto_save_path": "auto_save is False, so the buffer is in a temporary directory",
}


class EmptyBufferError(StoreError, RuntimeError):
    """There is nothing to sample; RLinf raises RuntimeError for it."""


class NoCheckpointError(StoreFormatError, FileNotFoundError):
    """The directory is no checkpoint; RLinf raises FileNotFoundError for it."""


@dataclass(frozen=True, kw_only=True)
class _Window:
    """The newest trajectories: the fields that all of them have, and how many steps they have of each spec."""

    fields: tuple[Field, ...]
    num_steps: tuple[tuple[StepSpec, int], ...]


class TrajectoryReplayBuffer(Closeable):
    """Trajectories in the store at `auto_save_path`; without one, or with `auto_save=False`, in a temporary directory.

    An existing store is continued. Samples come from the newest `sample_window_size` trajectories; 0 means all.
    `trajectory_format` ("pt" or "pkl") lets `save_checkpoint` write RLinf's own files; without it, a checkpoint links
    the store's. `device` places batches, for example on "cuda:0".
    """

    def __init__(
        self,
        seed: int | None = 1234,
        enable_cache: bool | None = None,
        cache_size: int | None = None,
        sample_window_size: int = 100,
        auto_save: bool | None = None,
        auto_save_path: str | Path | None = None,
        trajectory_format: str | None = None,
        *,
        device: Any = None,
        durability: Durability = "sync",
        **others: Any,
    ):
        auto_save_path = others.pop("storage_dir", auto_save_path)  # older names of RLinf
        auto_save = others.pop("save_trajectories", auto_save)
        trajectory_format = others.pop("storage_format", trajectory_format)
        if sample_window_size < 0:
            raise StoreError(f"sample_window_size: expected a number from 0 (all), got {sample_window_size}")
        if trajectory_format not in (None, *rlinf_files.FORMATS):
            raise StoreError(f"trajectory_format: expected pt or pkl, got {trajectory_format!r}")
        if durability not in ("sync", "async"):
            raise StoreError(f"durability: expected sync or async, got {durability!r}")
        no_effect = {"enable_cache": enable_cache, "cache_size": cache_size}
        if auto_save is False and auto_save_path:
            no_effect["auto_save_path"] = auto_save_path  # type: ignore[assignment]
        given = {name: value for name, value in no_effect.items() if value is not None}
        accept_options(type(self).__name__, {**given, **others}, _NO_EFFECT, _OPTIONS)
        self.seed = secrets.randbits(32) if seed is None else seed
        self.enable_cache = enable_cache is not False
        self.sample_window_size = sample_window_size
        self.trajectory_format = trajectory_format
        self.device = device
        self.durability = durability
        self._remove_directory: Callable[[], Any] | None = None
        self.path = self._choose_path(auto_save, auto_save_path)
        self.auto_save = self._remove_directory is None
        self.auto_save_path = auto_save_path if self.auto_save else None
        self._lock = threading.RLock()
        self._closed = False
        self._num_batches = 0
        self._counter = 0
        self._writers: dict[str, Writer] = {}  # by the spec's text
        self._num_writers = 0
        self._samplers: dict[str, Sampler[Any]] = {}  # by the spec's text
        self._trajectories: list[StoredTrajectory] = []
        self._num_freed, self._num_freed_steps = 0, 0  # left out of the window of a temporary buffer
        self._window_now: _Window | None = None  # None if it has changed
        self._known_fields: dict[str, Field] = {}
        self._last_episode = 0  # the newest that was read
        self._executor: ThreadPoolExecutor | None = None
        self._pending: deque[tuple[Future[None], int]] = deque()  # of the writing thread, with their bytes
        with ExitStack() as undo:
            self._store = undo.enter_context(Store.open(self.path))
            self._reader = undo.enter_context(Reader(self.path))
            self._delete_incomplete()
            self._refresh()
            undo.pop_all()

    def _choose_path(self, auto_save: bool | None, auto_save_path: str | Path | None) -> Path:
        if auto_save and not auto_save_path:
            raise StoreError(
                "auto_save_path: expected a directory, since auto_save is True; pass one, or auto_save=False for a "
                "buffer that is removed when it is closed"
            )
        if auto_save is not False and auto_save_path:
            path = Path(auto_save_path)
            is_rlinf = rlinf_files.is_saved_buffer(path) and not (path / CATALOG_FILE).exists()
            return path / "store" if is_rlinf else path
        path, self._remove_directory = temporary_store_path(self)
        return path

    # ---- adding

    def add_trajectories(self, trajectories: Sequence[Any]) -> None:
        """Store trajectories; if one does not fit, none is stored. Durable on return, or with "async" after `wait`.

        Each is a mapping or an object with fields [T, B, ...] of torch or numpy; all are returned unchanged. A column
        is cut into episodes at terminations and truncations, and where a `next_obs` is not the following `curr_obs`.
        One that has neither rewards nor prev_logprobs, as RLinf's empty ones, is left out.
        """
        parsed = []
        for n, given in enumerate(trajectories):
            trajectory = parse_trajectory(given, f"trajectories[{n}]")
            if trajectory is None:
                logger.warning("trajectories[%d]: has neither rewards nor prev_logprobs, so it is left out", n)
            else:
                parsed.append((f"trajectories[{n}]", trajectory))
        with self._lock:
            self._check_open()
            known = dict(self._known_fields)
            for where, trajectory in parsed:
                check_same_fields(trajectory.layout, known, where)
                known |= trajectory.layout.by_path
            for _, trajectory in parsed:
                self._add(trajectory, uuid.uuid4().hex, self._counter)
            if self.durability == "sync":
                self._settle()

    def _add(self, trajectory: ParsedTrajectory, key: str, trajectory_id: int) -> None:
        stored = StoredTrajectory.of(trajectory, key, trajectory_id)
        info = EpisodeInfo(actor=WRITER, group=uuid.uuid4().hex, labels={**trajectory.labels, "trajectory": key})
        groups = rows_of(trajectory, info, stored.last_labels(trajectory), COMMIT_BYTES)
        self._counter = max(self._counter, trajectory_id + 1)
        self._trajectories.append(stored)
        self._known_fields |= trajectory.layout.by_path
        self._window_now = None
        spec = trajectory.layout.spec
        if self.durability == "async":
            self._write_later(spec, list(groups))  # copied now: the caller may reuse its tensors
            return
        try:
            for rows in groups:
                self._write(spec, rows)
        except BaseException:
            self._forget_unwritten()
            raise

    def _write(self, spec: StepSpec, rows: Rows) -> None:
        """Commit some episodes of a trajectory. With "async" only the writing thread is here."""
        name = spec.json_text
        if name not in self._writers:
            self._writers[name] = self._store.writer(
                f"{WRITER}/{self._num_writers}", spec, flush_each_episode=False, background=False
            )
            self._num_writers += 1
        try:
            self._writers[name].write_episodes(rows.columns, rows.episodes)
        except BaseException:
            del self._writers[name]
            raise

    def _write_later(self, spec: StepSpec, groups: list[Rows]) -> None:
        if self._executor is None:
            self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="rlinf-writer")
        size = sum(rows.size_bytes for rows in groups)
        while self._pending and size + sum(bytes for _, bytes in self._pending) > PENDING_BYTES:
            self._finish_oldest()

        def write() -> None:
            for rows in groups:
                self._write(spec, rows)

        self._pending.append((self._executor.submit(write), size))

    def _finish_oldest(self) -> None:
        future, _ = self._pending[0]
        try:
            future.result()
        except BaseException:
            for later, _ in self._pending:
                later.cancel()
            for later, _ in self._pending:  # one may be under way
                if not later.cancelled():
                    later.exception()
            self._pending.clear()
            self._forget_unwritten()
            raise
        self._pending.popleft()

    def wait(self) -> None:
        """Return when all that was added is durable; raises if a write has failed, and then it is not there."""
        with self._lock:
            self._check_open()
            self._settle()

    def _settle(self) -> None:
        """Wait for the writing thread, and read which episodes were written."""
        while self._pending:
            self._finish_oldest()
        unwritten = {trajectory.key: trajectory for trajectory in self._trajectories if not trajectory.episodes}
        if unwritten:
            for found in read_trajectories(self._reader, after=self._last_episode):
                unwritten[found.key].episodes = found.episodes
                self._last_episode = found.episodes[-1]
            self._free_outside_window()

    def _forget_unwritten(self) -> None:
        """After a failed write: what is not whole in the store is not in the buffer."""
        with suppress(StoreError):  # the store may have failed for good
            self._delete_incomplete()
            self._refresh()
            return
        self._trajectories = [trajectory for trajectory in self._trajectories if trajectory.episodes]
        self._window_now = None

    def _delete_incomplete(self) -> None:
        torn = [t for t in read_trajectories(self._reader) if not t.complete and not t.deleted]
        self._store.delete(episode for trajectory in torn for episode in trajectory.episodes)

    def clear(self) -> None:
        """Remove all trajectories from the buffer. Those of a store that stays are freed by `understudy compact`."""
        with self._lock:
            self._check_open()
            self._settle()
            self._store.delete(episode for trajectory in self._trajectories for episode in trajectory.episodes)
            self._num_freed, self._num_freed_steps = 0, 0
            if not self.auto_save:
                self._compact()
            self._refresh()
            self._counter = 0

    def _free_outside_window(self) -> None:
        """Free the space of what a temporary buffer will never sample again; it still counts."""
        if self.auto_save or not self.sample_window_size:
            return
        old = self._trajectories[: -self.sample_window_size]
        if len(old) >= max(self.sample_window_size // 4, FREE_EVERY):
            self._store.delete(episode for trajectory in old for episode in trajectory.episodes)
            self._num_freed += len(old)
            self._num_freed_steps += sum(trajectory.num_steps for trajectory in old)
            del self._trajectories[: len(old)]
            self._compact()

    def _compact(self) -> None:
        if compact(self._store, min_dead=0.9).segments_removed:
            # An open file keeps its space on the disk even after it was removed.
            self._close_samplers()
            self._reader.close()
            self._reader = Reader(self.path)

    # ---- sampling

    def sample(self, num_chunks: int = 0) -> dict[str, Any]:
        """Transitions [num_chunks, ...] with the field names they were added with, uniformly from the window.

        A field that some trajectory of the window does not have is left out.
        """
        if num_chunks < 1:
            raise StoreError(f"num_chunks: expected a number from 1, got {num_chunks}")
        with self._lock:
            self._check_open()
            self._settle()
            if not self._trajectories:
                raise EmptyBufferError(f"{self.path}: there is nothing to sample; add a trajectory first")
            window = self._window()
            arrays = self._draw(window, num_chunks)
            self._num_batches += 1
        return _tree({field.path: as_given(field, arrays[field.path], self.device) for field in window.fields})

    def sample_chunks(self, num_chunks: int) -> dict[str, Any]:
        """The same as `sample`, which RLinf has under both names."""
        return self.sample(num_chunks)

    def _draw(self, window: _Window, size: int) -> dict[str, Array]:
        """Arrays [size, ...] by path; with steps of several specs, each is drawn as often as it has steps."""
        if len(window.num_steps) == 1:
            ((spec, num_steps),) = window.num_steps
            return self._draw_spec(spec, num_steps, size)
        rng = np.random.Generator(np.random.Philox(key=self.seed, counter=[0, 0, 1, self._num_batches]))
        share = np.array([num_steps for _, num_steps in window.num_steps], np.float64)
        chosen = rng.choice(len(share), size=size, p=share / share.sum())
        found = {field.path: np.empty((size, *field.shape), field.stored.dtype) for field in window.fields}
        for number, (spec, num_steps) in enumerate(window.num_steps):
            mine = np.flatnonzero(chosen == number)
            if len(mine):
                drawn = self._draw_spec(spec, num_steps, len(mine))
                for path, array in found.items():
                    array[mine] = drawn[path]
        return found

    def _draw_spec(self, spec: StepSpec, num_steps: int, size: int) -> dict[str, Array]:
        """Steps drawn from the newest `num_steps` of a spec, which are those in the window."""
        sampler = self._samplers.get(spec.json_text)
        if sampler is None:
            sampler = self._samplers[spec.json_text] = Sampler(self._reader, VIEW, batch_size=1, spec=spec)
        sampler.follow()
        # Steps are in the order in which they were written, so the last ones belong to the last trajectories.
        sampler.selector = Uniform(last_steps=num_steps)
        sampler.seed, sampler.num_batches = self.seed, self._num_batches
        batch = sampler.sample(size=size)
        found: dict[str, Array] = {
            "actions": batch.action,
            "rewards": batch.reward,
            **trees.flatten(batch.extras),
            **trees.flatten(batch.observation, "curr_obs"),
            **trees.flatten(batch.next_observation, "next_obs"),
        }
        return found

    def _window(self) -> _Window:
        if self._window_now is None:
            newest = self._newest()
            specs = {trajectory.layout.spec.json_text: trajectory.layout.spec for trajectory in newest}
            num_steps = Counter[str]()
            for trajectory in newest:
                num_steps[trajectory.layout.spec.json_text] += trajectory.num_steps
            layouts = [*dict.fromkeys(trajectory.layout for trajectory in newest)]
            common = [f for f in layouts[-1].fields if all(f.path in layout.by_path for layout in layouts)]
            left_out = sorted({f.path for layout in layouts for f in layout.fields} - {f.path for f in common})
            if left_out:
                logger.info("%s: not in every trajectory of the window, so in no batch", ", ".join(left_out))
            self._window_now = _Window(
                fields=tuple(common), num_steps=tuple((specs[text], count) for text, count in num_steps.items())
            )
        return self._window_now

    def _newest(self) -> list[StoredTrajectory]:
        return self._trajectories[-self.sample_window_size :]  # all of them if it is 0

    # ---- what there is

    @property
    def size(self) -> int:
        """How many trajectories there are."""
        return self._num_freed + len(self._trajectories)

    def __len__(self) -> int:
        return self.size

    def __bool__(self) -> bool:
        return True  # also an empty one: it is a buffer, not a list

    @property
    def total_samples(self) -> int:
        """How many transitions there are."""
        return self._num_freed_steps + sum(trajectory.num_steps for trajectory in self._trajectories)

    @property
    def trajectory_counter(self) -> int:
        """The `trajectory_id` that the next trajectory gets."""
        return self._counter

    @property
    def trajectory_ids(self) -> list[int]:
        """The ids of the trajectories that are there, the oldest first."""
        return [trajectory.trajectory_id for trajectory in self._trajectories]

    @property
    def trajectory_index(self) -> dict[int, dict[str, Any]]:
        """By id: uuid, trajectory_id, num_samples, shape, max_episode_length and model_weights_id."""
        return {
            trajectory.trajectory_id: {"uuid": trajectory.key, **trajectory.entry(), "shape": trajectory.shape}
            for trajectory in self._trajectories
        }

    def get_trajectory(self, trajectory_id: int) -> Trajectory:
        """A trajectory as it was added: all its fields [T, B, ...], with the values that are in no batch."""
        with self._lock:
            self._check_open()
            self._settle()
            trajectory = Trajectory()
            for name, value in self._read(self._find(trajectory_id)).items():
                setattr(trajectory, name, value)
            return trajectory

    def _find(self, trajectory_id: int) -> StoredTrajectory:
        for trajectory in reversed(self._trajectories):
            if trajectory.trajectory_id == trajectory_id:
                return trajectory
        raise StoreError(
            f"trajectory_id: there is no trajectory {trajectory_id}; see trajectory_ids, which has {self.size} of them"
        )

    def _read(self, stored: StoredTrajectory) -> dict[str, Any]:
        """The fields of a trajectory as they were added, in their order."""
        if not stored.shape:
            raise StoreError(
                f"trajectory {stored.trajectory_id}: was stored by a version that did not keep its shape [T, B]; "
                f"sample it, or read its episodes with understudy.replay.Reader"
            )
        found = [self._reader.rows(episode) for episode in stored.episodes]
        values = json.loads(found[-1][0].info.labels["values"])
        arrays, edges = arrays_of(stored.layout, stored.shape, [rows for _, rows in found])
        built: dict[str, Any] = build(
            stored.layout, arrays, edges, {path: decode_value(value) for path, value in values.items()}
        )
        return built

    def is_ready(self, min_size: int) -> bool:
        """Whether there are that many trajectories."""
        return self.size >= min_size

    async def is_ready_async(self, min_size: int) -> bool:
        """The same, for code that awaits it."""
        return self.is_ready(min_size)

    def get_stats(self) -> dict[str, int]:
        """`cache_size` is how many trajectories samples come from: none of them is loaded as a whole."""
        with self._lock:
            newest = self._newest()
            return {
                "num_trajectories": self.size,
                "total_samples": self.total_samples,
                "cache_size": len(newest),
                "window_trajectories": len(newest),
                "window_samples": sum(trajectory.num_steps for trajectory in newest),
            }

    def clear_cache(self) -> None:
        """Wait until all is durable. There is no cache of trajectories to clear."""
        self.wait()

    # ---- checkpoints

    def save_checkpoint(self, save_path: str | Path) -> None:
        """Save the trajectories and the state of sampling in a directory; one that holds a checkpoint is replaced.

        Fast if the directory is on the store's file system: the data is linked, not copied. A crash leaves the old
        checkpoint or the new one. With `trajectory_format` it holds RLinf's own files instead (`export_rlinf`).
        """
        path = Path(save_path)
        if self.trajectory_format is not None:
            self.export_rlinf(path, self.trajectory_format)
            return
        with self._lock:
            self._check_open()
            self._settle()
            with store_errors(path, "create"):
                path.mkdir(parents=True, exist_ok=True)
            name = f"store-{uuid.uuid4().hex}"
            backup(self._store, path / name)
            state = {
                "store": name,
                "trajectories": [trajectory.key for trajectory in self._trajectories],
                "trajectory_counter": self._counter,
                "seed": self.seed,
                "num_batches": self._num_batches,
            }
        with store_errors(path / CHECKPOINT_FILE, "write"):
            files.write_durably(path / CHECKPOINT_FILE, json.dumps(state).encode())
        for old in path.glob("store-*"):
            if old.name != name:
                shutil.rmtree(old)

    def export_rlinf(self, path: str | Path, trajectory_format: str = "pt") -> None:
        """Write what RLinf's own buffer loads: the newest `sample_window_size` trajectories, an index and metadata."""
        path = Path(path)
        if trajectory_format not in rlinf_files.FORMATS:
            raise StoreError(f"trajectory_format: expected pt or pkl, got {trajectory_format!r}")
        with self._lock:
            self._check_open()
            self._settle()
            newest = self._newest()
            metadata = {
                "trajectory_format": trajectory_format,
                "size": len(newest),
                "total_samples": sum(trajectory.num_steps for trajectory in newest),
                "trajectory_counter": self._counter,
                "seed": self.seed,
            }
            index = {trajectory.trajectory_id: trajectory.entry() for trajectory in newest}

            def trajectories() -> Iterator[tuple[int, dict[str, Any]]]:
                for stored in newest:
                    yield stored.trajectory_id, _with_tensors(self._read(stored), stored.layout)

            rlinf_files.write_saved_buffer(path, trajectory_format, metadata, index, trajectories())
            state = {"num_batches": self._num_batches}
        (path / CHECKPOINT_FILE).unlink(missing_ok=True)
        with store_errors(path / STATE_FILE, "write"):
            files.write_durably(path / STATE_FILE, json.dumps(state).encode())

    def load_checkpoint(
        self, load_path: str | Path, is_distributed: bool = False, local_rank: int = 0, world_size: int = 1
    ) -> None:
        """Restore the trajectories of a checkpoint, and no others, and continue with the batches that came next.

        It may also be a directory that RLinf's own buffer wrote. With `is_distributed`, rank r of w gets trajectories
        r, r + w, r + 2w ... of the checkpoint, and this buffer keeps its own seed. Trajectories that the store already
        has are kept, missing ones are copied.
        """
        path = Path(load_path)
        if not is_distributed:
            if (local_rank, world_size) != (0, 1):
                logger.info("load_checkpoint: local_rank and world_size change nothing without is_distributed=True")
            local_rank, world_size = 0, 1
        if not 0 <= local_rank < world_size:
            raise StoreError(f"local_rank: expected a number from 0 to {world_size - 1}, got {local_rank}")
        part = slice(local_rank, None, world_size)
        with self._lock:
            self._check_open()
            self._settle()
            if (path / CHECKPOINT_FILE).is_file():
                state = self._load_store(path, part)
            elif rlinf_files.is_saved_buffer(path):
                state = self._load_rlinf(rlinf_files.read_saved_buffer(path), part)
            else:
                raise NoCheckpointError(
                    f"{path}: not a checkpoint (it has neither {CHECKPOINT_FILE} nor {rlinf_files.METADATA_FILE} and "
                    f"{rlinf_files.INDEX_FILE}); check the path"
                )
            self._num_freed, self._num_freed_steps = 0, 0
            self._num_batches = int(state.get("num_batches", 0))
            if not is_distributed:
                self.seed = int(state.get("seed", self.seed))
                self._counter = max(self._counter, int(state.get("trajectory_counter", 0)))

    def _load_store(self, path: Path, part: slice) -> dict[str, Any]:
        state = json.loads((path / CHECKPOINT_FILE).read_text())
        keys = state["trajectories"][part]
        self._keep_only(keys, lambda: self._copy(path / state["store"], keys))
        return dict(state)

    def _load_rlinf(self, saved: rlinf_files.SavedBuffer, part: slice) -> dict[str, Any]:
        ids = saved.ids[part]
        missing = [number for number in ids if number not in saved.index]
        if missing:
            raise StoreFormatError(f"{saved.path}: trajectory {missing[0]} is in the list of ids and not in the index")
        # RLinf keeps all in its index and may have saved the files of its window alone.
        ids = [number for number in ids if saved.file(number).is_file()] or list(ids)
        keys = [_digest(saved.file(number).name, saved.read_bytes(number)) for number in ids]

        def copy() -> None:
            known: dict[str, Field] = {}
            for number, key in zip(ids, keys, strict=True):
                fields = saved.load(number)
                for name in ("max_episode_length", "model_weights_id"):
                    fields.setdefault(name, saved.index[number].get(name, 0 if name == "max_episode_length" else ""))
                trajectory = parse_trajectory(fields, str(saved.file(number)))
                if trajectory is not None:
                    check_same_fields(trajectory.layout, known, str(saved.file(number)))
                    known |= trajectory.layout.by_path
                    self._add(trajectory, key, number)
            self._settle()

        self._keep_only(keys, copy)
        state = saved.path / STATE_FILE
        return {**saved.metadata, **(json.loads(state.read_text()) if state.is_file() else {})}

    def _keep_only(self, keys: Sequence[str], copy: Callable[[], None]) -> None:
        """Let the buffer hold the trajectories with these keys, in this order: those that are there, or a copy."""
        here = {trajectory.key: trajectory for trajectory in read_trajectories(self._reader) if trajectory.complete}
        first_episodes = [here[key].episodes[0] for key in keys if key in here]
        before = {episode for trajectory in self._trajectories for episode in trajectory.episodes}
        wanted: set[int] = set()
        if len(first_episodes) == len(keys) and first_episodes == sorted(first_episodes):
            wanted = {episode for key in keys for episode in here[key].episodes}
            self._store.restore(wanted)
        else:
            copy()
        self._store.delete(before - wanted)
        self._counter = 0
        self._refresh()

    def _copy(self, store: Path, keys: Sequence[str]) -> None:
        """Write trajectories of another store at the end of this one, in the order of `keys`."""
        with Reader(store) as source:
            there = {trajectory.key: trajectory for trajectory in read_trajectories(source) if not trajectory.deleted}
            for key in keys:
                group = uuid.uuid4().hex
                for episode_id in there[key].episodes:
                    record, columns = source.rows(episode_id)
                    episode = FinishedEpisode(
                        num_rows=record.num_rows,
                        state="ended" if record.state == "ended" else "cut",
                        info=replace(record.info, group=group),
                    )
                    rows = Rows(columns=columns, episodes=(episode,), size_bytes=0)
                    self._write(source.spec(record.spec), rows)

    # ---- lifecycle and helpers

    def close(self, wait: bool = True) -> None:
        """Close the store. Everything added is durable then; with `wait=False` a thread still does that."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            if wait or self._executor is None:
                try:
                    self._settle()
                finally:
                    self._close_store()
                    if self._executor is not None:
                        self._executor.shutdown()
            else:
                self._executor.submit(self._close_store)
                self._executor.shutdown(wait=False)

    def _close_store(self) -> None:
        self._close_samplers()
        self._reader.close()
        self._store.close()
        if self._remove_directory is not None:
            self._remove_directory()

    def _check_open(self) -> None:
        if self._closed:
            raise StoreClosedError(f"{self.path}: the buffer is closed; make a new one with this path")

    def _refresh(self) -> None:
        """Read which trajectories the store has."""
        found = read_trajectories(self._reader)
        self._last_episode = max((trajectory.episodes[-1] for trajectory in found), default=0)
        self._trajectories = [trajectory for trajectory in found if trajectory.complete and not trajectory.deleted]
        self._counter = max([self._counter, *(trajectory.trajectory_id + 1 for trajectory in self._trajectories)])
        self._known_fields = {}
        for layout in dict.fromkeys(trajectory.layout for trajectory in self._trajectories):
            self._known_fields |= layout.by_path
        self._window_now = None

    def _close_samplers(self) -> None:
        for sampler in self._samplers.values():
            sampler.close()
        self._samplers.clear()

    # RLinf's tools that look into its buffer (its viewer of trajectories does) find these names.

    @property
    def _trajectory_id_list(self) -> list[int]:
        return self.trajectory_ids

    @property
    def _trajectory_index(self) -> dict[int, dict[str, Any]]:
        return self.trajectory_index

    def _load_trajectory(self, trajectory_id: int, model_weights_id: str = "") -> Trajectory:
        return self.get_trajectory(trajectory_id)


def _with_tensors(fields: dict[str, Any], layout: Layout) -> dict[str, Any]:
    """The fields with tensors in place of arrays: RLinf's buffer has no others."""
    by_path = layout.by_path

    def convert(path: str, leaf: Any) -> Any:
        return to_tensor(leaf, by_path[path].dtype) if path in by_path and isinstance(leaf, np.ndarray) else leaf

    return dict(trees.map_with_paths(convert, fields))


def _tree(flat: dict[str, Any]) -> dict[str, Any]:
    tree: Any = trees.unflatten(flat)
    return dict(tree)


def _digest(name: str, content: bytes) -> str:
    """A name for the content of a trajectory's file, its number included: loading it again adds nothing."""
    return hashlib.blake2b(name.encode() + b"\0" + content, digest_size=16).hexdigest()
