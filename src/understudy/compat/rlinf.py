"""The trajectory replay buffer of RLinf over a store: the same calls, and added trajectories survive a kill.

    buffer = TrajectoryReplayBuffer(seed=1234, sample_window_size=100, auto_save_path="runs/pick/replay")
    buffer.add_trajectories(trajectories)  # durable when it returns
    batch = buffer.sample(256)  # {"actions": [256, ...], "curr_obs": {...}, "next_obs": {...}, ...}

Any number of threads may add and sample; one lock guards both. A trajectory that was only partly written when the
process died is deleted when the buffer is opened again.
"""

from __future__ import annotations

import json
import shutil
import threading
import uuid
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from understudy.compat.options import refuse_options
from understudy.compat.stitch import Stitcher
from understudy.compat.temporary_store import temporary_store_path
from understudy.compat.trajectory import Trajectory, check_same_fields, parse_trajectory
from understudy.core import EpisodeInfo, StepSpec, StoreClosedError, StoreError, StoreFormatError
from understudy.core.closeable import Closeable
from understudy.durable import files
from understudy.durable.errors import store_errors
from understudy.replay import Reader, Store, Writer
from understudy.replay.maintain.backup import backup
from understudy.replay.read.view import Clause, View
from understudy.replay.sample.sampler import Sampler
from understudy.replay.sample.selectors import Uniform

WRITER = "rlinf"
VIEW = View(name="trajectories", clauses=(Clause(where=f"actor = '{WRITER}'"),))
CHECKPOINT_FILE = "checkpoint.json"
COMMIT_BYTES = 32 * 2**20
COMPLETE = {"complete": "yes"}  # label of a trajectory's last episode: the trajectory is whole if it is there

_OPTIONS = ("seed", "sample_window_size", "auto_save", "auto_save_path")
_UNSUPPORTED = {
    "enable_cache": "there is nothing to turn on: batches are read from mapped files, which the system caches; "
    "leave it out",
    "cache_size": "there is no cache to size: batches are read from mapped files, which the system caches; "
    "leave it out",
    "trajectory_format": "there is one format, safetensors segments (docs/formats.md); leave it out",
    "cache_all_when_not_saving": "with auto_save=False everything is in a temporary directory; leave it out",
    "storage_dir": "is called auto_save_path here; rename it",
    "storage_format": "there is one format, safetensors segments (docs/formats.md); leave it out",
    "save_trajectories": "is called auto_save here; rename it",
}


@dataclass(kw_only=True)
class _StoredTrajectory:
    """A trajectory in the store. Its copies in other stores have the same `key`."""

    key: str
    episodes: list[int] = field(default_factory=list)
    num_steps: int = 0
    complete: bool = False
    deleted: bool = False


class TrajectoryReplayBuffer(Closeable):
    """Trajectories in the store at `auto_save_path`; with `auto_save=False`, in a temporary directory.

    An existing store is continued. Samples come from the newest `sample_window_size` trajectories; 0 means all.
    """

    def __init__(
        self,
        seed: int = 1234,
        *,
        sample_window_size: int = 100,
        auto_save: bool = True,
        auto_save_path: str | Path | None = None,
        **others: Any,
    ):
        refuse_options(type(self).__name__, others, _UNSUPPORTED, _OPTIONS)
        if sample_window_size < 0:
            raise StoreError(f"sample_window_size: expected a number from 0 (all), got {sample_window_size}")
        self.sample_window_size = sample_window_size
        self._remove_directory: Callable[[], Any] = lambda: None
        self.path = self._choose_path(auto_save, auto_save_path)
        self._lock = threading.RLock()
        self._closed = False
        self._seed = seed
        self._num_batches = 0
        self._spec: StepSpec | None = None
        self._writer: Writer | None = None  # None until the first trajectory tells the fields
        self._sampler: Sampler | None = None
        self._trajectories: list[_StoredTrajectory] = []
        self._last_episode = 0  # the newest that was read
        with ExitStack() as undo:
            self._store = undo.enter_context(Store.open(self.path))
            self._reader = undo.enter_context(Reader(self.path))
            incomplete = [
                trajectory
                for trajectory in _read_trajectories(self._reader)
                if not trajectory.complete and not trajectory.deleted
            ]
            self._store.delete(episode for trajectory in incomplete for episode in trajectory.episodes)
            self._refresh()
            undo.pop_all()

    def _choose_path(self, auto_save: bool, auto_save_path: str | Path | None) -> Path:
        if auto_save and auto_save_path is None:
            raise StoreError(
                "auto_save_path: expected a directory, since auto_save is True; pass one, or auto_save=False for a "
                "buffer that is removed when it is closed"
            )
        if not auto_save and auto_save_path is not None:
            raise StoreError("auto_save_path: given, but auto_save is False; drop one of the two")
        if auto_save_path is not None:
            return Path(auto_save_path)
        path, self._remove_directory = temporary_store_path(self)
        return path

    # ---- adding

    def add_trajectories(self, trajectories: Sequence[Any]) -> None:
        """Store trajectories durably; if one does not fit, none is stored.

        Each is a mapping or an object with fields [T, B, ...]: actions, rewards, curr_obs, next_obs, and others, which
        are returned unchanged. A column is cut into episodes at terminations and truncations, and where a `next_obs` is
        not the following `curr_obs`.
        """
        parsed = [parse_trajectory(trajectory, f"trajectories[{n}]") for n, trajectory in enumerate(trajectories)]
        with self._lock:
            self._check_open()
            specs = [trajectory.spec() for trajectory in parsed]
            for n, spec in enumerate(specs):
                check_same_fields(spec, self._spec or specs[0], f"trajectories[{n}]")
            for trajectory, spec in zip(parsed, specs, strict=True):
                self._write(trajectory, self._writer_of(spec))
            if self._writer is not None:
                self._writer.flush()
            new = _read_trajectories(self._reader, after=self._last_episode)
            if new:
                self._trajectories += new
                self._last_episode = new[-1].episodes[-1]

    def _write(self, trajectory: Trajectory, writer: Writer) -> None:
        stitcher = Stitcher(writer)
        key = uuid.uuid4().hex
        info = EpisodeInfo(actor=WRITER, group=uuid.uuid4().hex, labels={**trajectory.labels, "trajectory": key})
        for column in range(trajectory.batch):
            at_end = {"labels": {**info.labels, **COMPLETE}} if column == trajectory.batch - 1 else {}
            for time in range(trajectory.length):
                stitcher.add(
                    trajectory.step(time, column),
                    trajectory.next_observation(time, column),
                    info,
                    **(at_end if time == trajectory.length - 1 else {}),
                )
            stitcher.cut(**at_end)  # unless the last step ended it

    def _writer_of(self, spec: StepSpec) -> Writer:
        """The writer for steps of this spec, which becomes the buffer's spec."""
        if self._writer is None or spec != self._spec:
            self._close_sampler()
            row_bytes = sum(leaf.row_bytes for leaf in spec.columns.values())
            self._writer = self._store.writer(
                WRITER, spec, commit_steps=min(max(COMMIT_BYTES // row_bytes, 1), 1000), flush_each_episode=False
            )
            self._spec = spec
        return self._writer

    def clear(self) -> None:
        """Remove all trajectories from the buffer; `understudy compact` then frees their space."""
        with self._lock:
            self._check_open()
            self._store.delete(episode for trajectory in self._trajectories for episode in trajectory.episodes)
            self._refresh()

    # ---- sampling

    def sample(self, num_chunks: int) -> dict[str, Any]:
        """Transitions [num_chunks, ...] with the field names they were added with, uniformly from the window."""
        if num_chunks < 1:
            raise StoreError(f"num_chunks: expected a number from 1, got {num_chunks}")
        with self._lock:
            self._check_open()
            if not self._trajectories:
                raise StoreError(f"{self.path}: there is nothing to sample; add a trajectory first")
            sampler = self._updated_sampler()
            sampler.follow()
            # Steps are in the order in which they were written, so the last ones belong to the last trajectories.
            sampler.selector = Uniform(last_steps=sum(trajectory.num_steps for trajectory in self._window()))
            sampler.seed, sampler.num_batches = self._seed, self._num_batches
            batch = sampler.sample(size=num_chunks)
            self._num_batches += 1
        extras: Any = batch.extras
        return {
            "actions": batch.action,
            "rewards": batch.reward,
            **extras,
            "curr_obs": batch.observation,
            "next_obs": batch.next_observation,
        }

    def _updated_sampler(self) -> Sampler:
        if self._sampler is None:
            catalog = self._reader.catalog
            (spec,) = (number for number in catalog.spec_ids() if catalog.spec(number) == self._spec)
            self._sampler = Sampler(self._reader, VIEW, batch_size=1, spec=spec)
        return self._sampler

    def _window(self) -> list[_StoredTrajectory]:
        return self._trajectories[-self.sample_window_size :]  # all of them if it is 0

    @property
    def size(self) -> int:
        """How many trajectories there are."""
        return len(self._trajectories)

    @property
    def total_samples(self) -> int:
        """How many transitions there are."""
        return sum(trajectory.num_steps for trajectory in self._trajectories)

    def is_ready(self, min_size: int) -> bool:
        """Whether there are that many trajectories."""
        return self.size >= min_size

    def get_stats(self) -> dict[str, int]:
        with self._lock:
            window = self._window()
            return {
                "num_trajectories": self.size,
                "total_samples": self.total_samples,
                "window_trajectories": len(window),
                "window_samples": sum(trajectory.num_steps for trajectory in window),
            }

    # ---- checkpoints

    def save_checkpoint(self, path: str | Path) -> None:
        """Save the trajectories and the state of sampling in a directory; one that holds a checkpoint is replaced.

        Fast if the directory is on the store's file system: the data is linked, not copied. A crash leaves the old
        checkpoint or the new one.
        """
        path = Path(path)
        with self._lock:
            self._check_open()
            with store_errors(path, "create"):
                path.mkdir(parents=True, exist_ok=True)
            name = f"store-{uuid.uuid4().hex}"
            backup(self._store, path / name)
            state = {
                "store": name,
                "trajectories": [trajectory.key for trajectory in self._trajectories],
                "seed": self._seed,
                "num_batches": self._num_batches,
            }
        with store_errors(path / CHECKPOINT_FILE, "write"):
            files.write_durably(path / CHECKPOINT_FILE, json.dumps(state).encode())
        for old in path.glob("store-*"):
            if old.name != name:
                shutil.rmtree(old)

    def load_checkpoint(
        self, path: str | Path, is_distributed: bool = False, local_rank: int = 0, world_size: int = 1
    ) -> None:
        """Restore the trajectories of a checkpoint, and no others, and continue with the batches that came next.

        With `is_distributed`, rank r of w gets trajectories r, r + w, r + 2w ... of the checkpoint, and this buffer
        keeps its own seed. Trajectories that the store already has are kept, missing ones are copied.
        """
        if not is_distributed and (local_rank, world_size) != (0, 1):
            raise StoreError("local_rank, world_size: are for is_distributed=True; set it, or leave them out")
        if not 0 <= local_rank < world_size:
            raise StoreError(f"local_rank: expected a number from 0 to {world_size - 1}, got {local_rank}")
        state = _read_state(Path(path))
        keys = state["trajectories"][local_rank::world_size]
        with self._lock:
            self._check_open()
            here = {
                trajectory.key: trajectory for trajectory in _read_trajectories(self._reader) if trajectory.complete
            }
            first_episodes = [here[key].episodes[0] for key in keys if key in here]
            if len(first_episodes) == len(keys) and first_episodes == sorted(first_episodes):
                wanted = {episode for key in keys for episode in here[key].episodes}
                self._store.restore(wanted)
            else:
                wanted = set()
                self._copy(Path(path) / state["store"], keys)
            before = {episode for trajectory in self._trajectories for episode in trajectory.episodes}
            self._store.delete(before - wanted)
            self._refresh()
            self._num_batches = int(state["num_batches"])
            if not is_distributed:
                self._seed = int(state["seed"])

    def _copy(self, store: Path, keys: Sequence[str]) -> None:
        """Write trajectories of another store at the end of this one, in the order of `keys`."""
        with Reader(store) as source:
            there = {trajectory.key: trajectory for trajectory in _read_trajectories(source) if not trajectory.deleted}
            for key in keys:
                group = uuid.uuid4().hex
                for episode_id in there[key].episodes:
                    spec = source.spec(source.record(episode_id).spec)
                    _copy_episode(source, episode_id, self._writer_of(spec), group)
        if self._writer is not None:
            self._writer.flush()

    # ---- lifecycle and helpers

    def close(self) -> None:
        """Close the store. Everything added is durable whether or not this is called."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._close_sampler()
            self._reader.close()
            self._store.close()
            self._remove_directory()

    def _check_open(self) -> None:
        if self._closed:
            raise StoreClosedError(f"{self.path}: the buffer is closed; make a new one with this path")

    def _refresh(self) -> None:
        """Read which trajectories the store has. If there are none, the next one added decides the fields."""
        found = _read_trajectories(self._reader)
        self._last_episode = max((trajectory.episodes[-1] for trajectory in found), default=0)
        self._trajectories = [trajectory for trajectory in found if trajectory.complete and not trajectory.deleted]
        spec = (
            self._reader.spec(self._reader.record(self._trajectories[-1].episodes[0]).spec)
            if self._trajectories
            else None
        )
        if spec != self._spec:
            self._close_sampler()
            self._spec, self._writer = spec, None

    def _close_sampler(self) -> None:
        if self._sampler is not None:
            self._sampler.close()
            self._sampler = None


def _read_trajectories(reader: Reader, after: int = 0) -> list[_StoredTrajectory]:
    """The trajectories after an episode, the oldest first, without those whose rows were purged."""
    found: dict[str, _StoredTrajectory] = {}
    for record in reader.episodes("id > ? and actor = ? and not purged", (after, WRITER)):
        trajectory = found.setdefault(
            str(record.info.group), _StoredTrajectory(key=record.info.labels.get("trajectory", ""))
        )
        trajectory.episodes.append(record.id)
        trajectory.num_steps += record.num_rows - 1
        trajectory.complete |= COMPLETE.items() <= record.info.labels.items()
        trajectory.deleted |= record.deleted is not None
    return list(found.values())


def _copy_episode(source: Reader, episode_id: int, writer: Writer, group: str) -> None:
    episode = source.read(episode_id)
    writer.begin(replace(episode.info, group=group, labels={"trajectory": episode.info.labels["trajectory"]}))
    for step in episode.steps():
        writer.append(step)
    end = writer.end if episode.step(-1).last else writer.cut
    end(episode.last_observation, labels=episode.info.labels)


def _read_state(path: Path) -> dict[str, Any]:
    file = path / CHECKPOINT_FILE
    if not file.is_file():
        raise StoreFormatError(f"{path}: not a checkpoint (it has no {CHECKPOINT_FILE}); check the path")
    with store_errors(file, "read"):
        found: dict[str, Any] = json.loads(file.read_text())
    return found
