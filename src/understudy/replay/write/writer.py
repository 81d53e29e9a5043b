"""Writer: takes the steps of an actor one by one and commits them in chunks.

    writer = store.writer("actor-0", spec)
    writer.begin(task="pick", seed=7)
    ...
    writer.append(Step(observation=obs, action=action, reward=reward, terminated=terminated, truncated=truncated))
    ...
    writer.end(last_observation, success=True)

Every step is checked and copied on append, so that the caller may reuse its buffers. A step is durable once a commit
has taken it: every `commit_steps` rows, at `flush`, and, with `flush_each_episode`, at the end of each episode.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import TracebackType
from typing import Any, Protocol

import numpy as np

from understudy.core import EpisodeError, EpisodeInfo, SpecError, Step, StepSpec, StoreError, UnderstudyError
from understudy.core.episode import Column
from understudy.core.tree import Tree
from understudy.processes import forks
from understudy.replay.format.arrays import Array
from understudy.replay.format.chunk import Chunk, EpisodeState, Part


class ChunkSink(Protocol):
    """Where a writer commits its chunks: a Store, or the outbox of a remote one."""

    @property
    def keeps_columns(self) -> bool:
        """Whether it still reads a chunk's columns after `commit` has returned."""
        ...

    def commit(self, chunk: Chunk) -> int: ...


@dataclass(frozen=True, kw_only=True)
class FinishedEpisode:
    """One episode of `write_episodes`: how many rows it has, and whether the last is its last observation."""

    num_rows: int
    state: EpisodeState  # "ended" or "cut"
    info: EpisodeInfo


class Writer:
    """One stream of episodes, one open at a time. A call is refused while another thread is inside one."""

    def __init__(
        self,
        store: ChunkSink,
        name: str,
        incarnation: str,
        spec: StepSpec,
        *,
        commit_steps: int = 50,
        flush_each_episode: bool = True,
        keeps_lock: bool = True,
    ):
        check_commit_steps(commit_steps)
        self.name = name
        self.incarnation = incarnation
        self.spec = spec
        self._store = store
        self._turn = _Turn(name)
        self._flush_each_episode = flush_each_episode
        self._commit_rows = rows_per_chunk(spec, commit_steps)
        self._keeps_lock = keeps_lock  # while `append` copies, see `_copy_at_once`
        self._buffer = self._new_rows()
        self._spare: deque[_Rows] = deque(maxlen=4)  # buffers that the sink has released, perhaps from another thread
        self._parts: list[Part] = []  # ended parts that are not committed yet
        self._seq = 0
        self._number = -1  # of the current episode
        self._info: EpisodeInfo | None = None  # None between episodes
        self._index = 0  # of the next row in its episode
        self._part_start = 0  # in the buffer: where the current episode's uncommitted rows begin
        self._ended = False  # the last step appended was terminated or truncated
        self._num_refused = 0  # steps of the current episode, since the last one that was taken
        self._in_doubt = False  # a commit failed, but the store may have it: send the same chunk again first
        self._failed = False  # a write_episodes failed, but the store may have it
        self._last_commit = 0

    @property
    def num_uncommitted(self) -> int:
        """How many rows a crash would lose now."""
        return len(self._buffer)

    def begin(self, info: EpisodeInfo | None = None, **attributes: Any) -> int:
        """Begin an episode; attributes are those of EpisodeInfo. Returns the writer's number of it.

        The first one takes the memory of the buffers from the system: 0.1 s with three cameras of 480x640.
        """
        with self._turn:
            if self._info is not None:
                raise EpisodeError(
                    f"writer {self.name!r}: episode {self._number} is still open; call end() or cut() first"
                )
            self._info = (info or EpisodeInfo(actor=self.name)).with_attributes(**attributes)
            self._number += 1
            self._index = 0
            self._part_start = len(self._buffer)
            self._ended = False
            self._num_refused = 0
            if self._number == 0:
                self._touch_buffers()
            return self._number

    def append(self, step: Step) -> None:
        """Take a step. A step that does not fit the spec is refused and changes nothing.

        If the commit that it causes fails, the step is kept; the next call first tries that commit again, and refuses
        its step while that fails. The steps after such a gap become an episode of their own.
        """
        if not self._turn.acquire():  # as `with self._turn`, at half the cost
            raise self._turn.refusal()
        try:
            self._append(step)
        finally:
            self._turn.release()

    def _append(self, step: Step) -> None:
        self._check_open("append")
        if self._ended:
            raise EpisodeError(
                f"writer {self.name!r}: the last step was terminated or truncated; call end() with the last observation"
            )
        row = self.spec.row(step)
        if self._in_doubt:
            try:
                self._commit()
            except UnderstudyError:
                self._num_refused += 1
                raise
        if self._num_refused:
            self._begin_after_gap()
        self._buffer.append(row)
        self._index += 1
        self._ended = step.last
        if len(self._buffer) >= self._commit_rows:
            self._commit()

    def end(self, last_observation: Tree, **attributes: Any) -> int:
        """End the episode with the observation after its last action; `success` and other attributes may be set now.

        Labels are added to those that `begin` got. An episode whose last steps were refused is cut instead.
        """
        with self._turn:
            info = self._check_open("end")
            if self._num_refused:
                return self.cut(**attributes)
            if not self._ended:
                raise EpisodeError(
                    f"writer {self.name!r}: the last step is neither terminated nor truncated; mark it, or call cut() "
                    f"to stop the episode here"
                )
            return self._finish("ended", info.with_attributes(**attributes), last_observation)

    def cut(self, last_observation: Tree | None = None, **attributes: Any) -> int:
        """Stop the episode before its end: an operator's abort, a fault. Its steps are kept."""
        with self._turn:
            info = self._check_open("cut")
            if self._index == 0:  # nothing was written: there is no episode
                self._info = None
                return self._last_commit
            if self._num_refused:  # it does not follow the last step that was taken
                last_observation = None
            return self._finish("cut", info.with_attributes(**attributes), last_observation)

    def flush(self) -> int:
        """Commit all that was appended; returns the number of the commit when it is durable."""
        return self._commit()

    def write_episodes(self, columns: Mapping[str, Array], episodes: Sequence[FinishedEpisode]) -> int:
        """Store whole episodes in one commit, given as the flat columns [rows, ...] of the spec; durable on return.

        Far faster than a call per step. The columns must not change before this returns (with a remote writer: before
        they are delivered). After an error the store may have the episodes or not: continue with a new writer.
        """
        with self._turn:
            if self._info is not None:
                raise EpisodeError(
                    f"writer {self.name!r}: episode {self._number} is still open; call end() or cut() first"
                )
            self._commit_chunk()
            self._check_columns(columns, sum(episode.num_rows for episode in episodes))
            parts = []
            for episode in episodes:
                self._number += 1
                parts.append(
                    Part(
                        episode=self._number,
                        first_index=0,
                        num_rows=episode.num_rows,
                        state=episode.state,
                        info=episode.info,
                    )
                )
            chunk = Chunk(
                writer=self.name,
                incarnation=self.incarnation,
                seq=self._seq,
                spec=self.spec,
                columns=columns,
                parts=tuple(parts),
            )
            self._failed = True
            self._last_commit = self._commit_columns(chunk)
            self._failed = False
            self._seq += 1
            return self._last_commit

    def _commit_columns(self, chunk: Chunk) -> int:
        """Commit what `write_episodes` was given."""
        return self._store.commit(chunk)

    def _check_columns(self, columns: Mapping[str, Array], num_rows: int) -> None:
        """Refuse values that a step with them would be refused for."""
        for path, leaf in self.spec.columns.items():
            if path not in columns:
                raise SpecError(f"{path}: expected {num_rows} rows of {leaf}, got nothing; pass the column")
            if leaf.low is not None or leaf.high is not None:
                replace(leaf, shape=(num_rows, *leaf.shape)).check(columns[path], path)
        if not np.isfinite(columns["reward"]).all():
            raise SpecError("reward: expected finite numbers, got others; check the environment")

    def _commit(self) -> int:
        with self._turn:
            return self._commit_chunk()

    def _commit_chunk(self) -> int:
        if self._failed:
            raise StoreError(
                f"writer {self.name!r}: its last write_episodes failed, and the store may have it; make a new writer"
            )
        if self._info is not None:
            self._close_part("open", self._info)
        if self._parts:
            chunk = Chunk(
                writer=self.name,
                incarnation=self.incarnation,
                seq=self._seq,
                spec=self.spec,
                columns=self._buffer.columns(),
                parts=tuple(self._parts),
                release=partial(self._spare.append, self._buffer),
            )
            self._in_doubt = True
            self._last_commit = self._store.commit(chunk)
            self._in_doubt = False
            self._seq += 1
            self._parts.clear()
            if self._store.keeps_columns:
                self._buffer = self._spare.pop() if self._spare else self._new_rows()
            self._buffer.clear()
            self._part_start = 0
        return self._last_commit

    def _finish(self, state: EpisodeState, info: EpisodeInfo, last_observation: Tree | None) -> int:
        if self._in_doubt:
            self._commit()
        if last_observation is not None:
            self._buffer.append(self.spec.last_row(last_observation))
            self._index += 1
        self._close_part(state, info)
        self._info = None
        if self._flush_each_episode:
            return self._commit_episode()
        if len(self._buffer) >= self._commit_rows:
            return self._commit()
        return self._last_commit

    def _commit_episode(self) -> int:
        """Commit at the end of an episode."""
        return self._commit()

    def _begin_after_gap(self) -> None:
        """Cut the episode where steps were refused: the next step does not follow the last one that was taken."""
        info = self._check_open("append")
        if self._index:
            self._close_part("cut", info)
            self._number += 1
            self._index = 0
        self._info = info_after_gap(info, self._num_refused)
        self._num_refused = 0

    def _new_rows(self) -> _Rows:
        return _Rows(self.spec, self._commit_rows + 1, keeps_lock=self._keeps_lock)

    def _touch_buffers(self) -> None:
        """Take the memory of the buffers from the system now: in a control loop, that is milliseconds a step."""
        self._buffer.touch()
        if self._store.keeps_columns:
            spare = self._new_rows()
            spare.touch()
            self._spare.append(spare)

    def _close_part(self, state: EpisodeState, info: EpisodeInfo) -> None:
        num_rows = len(self._buffer) - self._part_start
        if num_rows or state != "open":
            self._parts.append(
                Part(
                    episode=self._number, first_index=self._index - num_rows, num_rows=num_rows, state=state, info=info
                )
            )
            self._part_start = len(self._buffer)

    def _check_open(self, what: str) -> EpisodeInfo:
        if self._info is None:
            raise EpisodeError(f"writer {self.name!r}: {what}() outside an episode; call begin() first")
        return self._info


MAX_CHUNK_BYTES = 64 * 2**20  # of a writer's buffer
LARGE_BYTES = 4096  # of a field: while numpy copied less than that, no other thread was seen to take Python's lock


def rows_per_chunk(spec: StepSpec, commit_steps: int, max_bytes: int = MAX_CHUNK_BYTES) -> int:
    """How many rows a writer commits together: fewer than asked for if they are large, and whole GOPs."""
    rows = min(commit_steps, max(max_bytes // max(sum(leaf.row_bytes for leaf in spec.columns.values()), 1), 1))
    gop_size = max((codec.gop_size for codec in spec.encoded.values()), default=1)
    return rows - rows % gop_size if rows > gop_size else rows


def check_commit_steps(commit_steps: int) -> None:
    """Refuse a wrong option before the new writer replaces an older one or opens its spool."""
    if commit_steps < 1:
        raise EpisodeError(f"commit_steps: expected at least 1, got {commit_steps}")


def info_after_gap(info: EpisodeInfo, num_steps: int) -> EpisodeInfo:
    """The attributes of the rest of an episode in which steps are missing."""
    return info.with_attributes(labels={"steps_missing_before": str(num_steps)})


class _Turn:
    """Refuses a second thread while one is inside, and every thread of a forked process."""

    def __init__(self, writer: str):
        self._writer = writer
        self._forked = False
        lock = threading.RLock()
        self.acquire: Callable[[], bool] = partial(lock.acquire, blocking=False)
        self.release = lock.release
        forks.register(self)

    def after_fork_in_child(self) -> None:
        self._forked, self.acquire = True, lambda: False

    def refusal(self) -> StoreError:
        """Why `acquire` returned False."""
        if self._forked:
            return forks.forked_error(f"writer {self._writer!r}", "make one of another name in this process")
        return StoreError(
            f"writer {self._writer!r}: another thread is inside a call of it, and this call was refused; give each "
            f"thread a writer of its own"
        )

    def __enter__(self) -> None:
        if not self.acquire():
            raise self.refusal()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


class _Rows:
    """Rows waiting to be committed, as columns that are reused. `keeps_lock`: see `_copy_at_once`."""

    def __init__(self, spec: StepSpec, capacity: int, *, keeps_lock: bool):
        self._fixed = {
            path: np.empty((capacity, *leaf.fixed_shape), leaf.dtype)
            for path, leaf in spec.columns.items()
            if not leaf.ragged
        }
        self._large = {path for path in self._fixed if spec.columns[path].row_bytes >= LARGE_BYTES}
        self._copied_at_once = self._large if keeps_lock else frozenset[str]()
        self._ragged: dict[str, list[str | Array]] = {path: [] for path, leaf in spec.columns.items() if leaf.ragged}
        self._order = tuple(spec.columns)
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def touch(self) -> None:
        for path in self._large:
            self._fixed[path].fill(0)

    def append(self, row: dict[str, Any]) -> None:
        for path, column in self._fixed.items():
            if path in self._copied_at_once:
                _copy_at_once(row[path], column[self._length])
            else:
                column[self._length] = row[path]
        for path, values in self._ragged.items():
            value = row[path]
            values.append(value if isinstance(value, str) else np.array(value))
        self._length += 1

    def columns(self) -> dict[str, Column]:
        return {
            path: self._fixed[path][: self._length] if path in self._fixed else self._ragged[path]
            for path in self._order
        }

    def clear(self) -> None:
        self._length = 0
        for values in self._ragged.values():
            values.clear()


def _copy_at_once(source: Array, target: Array) -> None:
    """Copy without releasing Python's lock, as numpy does: a control loop would wait for the encoders to give it back.

    Three frames of 480x640 take 0.7 ms; with numpy's copy, one in a hundred took more than 2.8 ms. Beside a thread that
    only commits, numpy's copy is better: that thread goes on meanwhile.
    """
    if source.flags.c_contiguous:
        target.data.cast("B")[:] = source.data.cast("B")
    else:
        target[...] = source
