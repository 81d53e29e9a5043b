"""Encoded columns: the camera fields of some rows as they are stored, and back.

A GOP that depend on each other never crosses a chunk or an episode, so its rows lie next to each other in
one segment for ever. Groups are encoded and decoded by threads, because the codecs work outside of Python's lock.

| thread | takes from | blocks on | woken by |
|---|---|---|---|
| caller | - | the results of its GOPs | the last of them to finish |
| frame threads, one less than cores | the pool's queue | the queue | any caller |
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TypeVar

import numpy as np

from understudy.codecs import EncodedFrames, decode_frames, encode_frames, join_frames
from understudy.core import Codec, StepSpec
from understudy.core.episode import Column
from understudy.core.step import decoded_checksum_of, frame_number_of
from understudy.processes import forks
from understudy.replay.format.arrays import Array
from understudy.replay.format.chunk import Chunk, Part

_Task = TypeVar("_Task")
_Result = TypeVar("_Result")


def encode_columns(spec: StepSpec, columns: Mapping[str, Column], parts: Sequence[Part]) -> dict[str, Column]:
    """The stored columns of checked rows; fields that are encoded already stay as they are."""
    stored = dict(columns)
    new = {path: codec for path, codec in spec.encoded.items() if frame_number_of(path) not in columns}
    gops = [(path, codec, first, stop) for path, codec in new.items() for first, stop in _new_gops(codec, parts)]

    def encode(task: tuple[str, Codec, int, int]) -> EncodedFrames:
        path, codec, first, stop = task
        frames = columns[path]
        assert isinstance(frames, np.ndarray)
        return encode_frames(codec, frames[first:stop])

    for path in new:
        stored[path] = []
    numbers: dict[str, list[int]] = {path: [] for path in new}
    checksums: dict[str, list[int]] = {path: [] for path in new}
    for (path, *_), gop in zip(gops, frame_threads.run(encode, gops), strict=True):
        packets = stored[path]
        assert isinstance(packets, list)
        packets.extend(np.frombuffer(packet, np.uint8) for packet in gop.packets)
        numbers[path].extend(range(len(gop.packets)))
        checksums[path].extend(gop.checksums)
    for path in new:
        stored[frame_number_of(path)] = np.array(numbers[path], np.uint8)
        stored[decoded_checksum_of(path)] = np.array(checksums[path], np.uint64)
    return stored


def decode_columns(spec: StepSpec, stored: Mapping[str, Column]) -> dict[str, Column]:
    """The columns that a user knows, from the stored columns of whole episodes or whole chunks."""
    columns = {path: stored[path] for path in spec.columns}
    gops = []
    for path in spec.encoded:
        leaf = spec.columns[path]
        columns[path] = np.empty((len(stored[path]), *leaf.fixed_shape), leaf.dtype)
        gops += [(path, first, stop) for first, stop in stored_gops(np.asarray(stored[frame_number_of(path)]))]

    def decode(task: tuple[str, int, int]) -> None:
        path, first, stop = task
        leaf, out = spec.columns[path], columns[path]
        packets = [bytes(packet) for packet in stored[path][first:stop]]
        checksums = np.asarray(stored[decoded_checksum_of(path)])[first:stop].tolist()
        assert leaf.codec is not None
        assert isinstance(out, np.ndarray)
        frames = decode_frames(leaf.codec, leaf.fixed_shape, leaf.numpy_dtype, packets, checksums, range(stop - first))
        for row, frame in zip(range(first, stop), frames, strict=True):
            out[row] = frame

    for _ in frame_threads.run(decode, gops):
        pass
    return columns


def cut_columns(spec: StepSpec, stored: Mapping[str, Column], first: int, stop: int) -> dict[str, Column]:
    """The stored columns of the rows from `first` up to `stop`: every frame decodes to what it decodes to now.

    Where `first` is inside of a GOP, its packet gets those before it in the GOP as well, and is frame 0 of a new GOP.
    """
    cut = {path: column[first:stop] for path, column in stored.items()}
    for path, codec in spec.encoded.items():
        numbers = np.array(cut[frame_number_of(path)])
        num_before = int(numbers[0])
        if num_before:
            packets = [bytes(packet) for packet in stored[path][first - num_before : first + 1]]
            cut[path][0] = np.frombuffer(join_frames(codec, packets), np.uint8)
            num_left = int(np.argmax(numbers == 0)) or len(numbers)  # of the GOP
            numbers[:num_left] -= num_before
            cut[frame_number_of(path)] = numbers
    return cut


def encoded_chunk(chunk: Chunk) -> Chunk:
    """The chunk with the columns that are stored: its camera fields are encoded, if they are not yet."""
    if all(frame_number_of(path) in chunk.columns for path in chunk.spec.encoded):
        return chunk
    return replace(chunk, columns=encode_columns(chunk.spec, chunk.columns, chunk.parts))


def stored_gops(numbers: Array) -> Iterator[tuple[int, int]]:
    """The GOPs among neighbouring rows, by the number of each frame in its GOP: first row and stop."""
    starts = np.flatnonzero(numbers == 0).tolist()
    yield from zip(starts, [*starts[1:], len(numbers)], strict=True)


def broken_numbers(numbers: Array, parts: Sequence[Part]) -> bool:
    """Whether the numbers of frames in their GOPs are impossible: a GOP crosses a part, or misses a frame."""
    firsts = np.cumsum([0, *(part.num_rows for part in parts)])[:-1]
    follows = np.zeros(len(numbers), bool)
    follows[1:] = numbers[1:].astype(np.int64) == numbers[:-1].astype(np.int64) + 1
    follows[firsts[firsts < len(numbers)]] = False
    return not (follows | (numbers == 0)).all()


def _new_gops(codec: Codec, parts: Iterable[Part]) -> Iterator[tuple[int, int]]:
    """The rows of each GOP that is to be encoded."""
    row = 0
    for part in parts:
        for first in range(row, row + part.num_rows, codec.gop_size):
            yield first, min(first + codec.gop_size, row + part.num_rows)
        row += part.num_rows


class _FrameThreads:
    """Threads that encode and decode, shared by all stores of the process; made when they are first needed.

    Their priority is that of all others: one that is lower makes a control loop wait for Python's lock while the thread
    that has it waits for a core (measured: p99.9 of `append` 16 ms instead of 6).
    """

    def __init__(self) -> None:
        self._pool: ThreadPoolExecutor | None = None
        forks.register(self)

    def after_fork_in_child(self) -> None:
        self._pool = None  # its threads are not here

    def run(self, work: Callable[[_Task], _Result], tasks: Sequence[_Task]) -> Iterator[_Result]:
        """The results in the order of the tasks; a single task is done by the caller."""
        if len(tasks) <= 1:
            return map(work, tasks)
        if self._pool is None:
            num_threads = max((os.cpu_count() or 1) - 1, 1)  # a core is left to the control loop
            self._pool = ThreadPoolExecutor(num_threads, "frames")
        try:
            return self._pool.map(work, tasks)
        except RuntimeError:  # at the end of the process there are no more threads
            return map(work, tasks)


frame_threads = _FrameThreads()
