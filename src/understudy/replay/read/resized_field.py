"""Resized field: a camera field in another size, made of the stored frames and kept in derived files."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from understudy.codecs import FrameError, decode_frames
from understudy.core import DamageError
from understudy.core.resize import Resize, resize_frame
from understudy.core.spec import ArraySpec
from understudy.core.step import decoded_checksum_of, frame_number_of
from understudy.replay.format.arrays import Array
from understudy.replay.format.layout import checksum_of
from understudy.replay.format.segment import Segment, digest
from understudy.replay.read.derived_frames import DerivedFrames
from understudy.replay.read.row_blocks import damage


class ResizedField:
    """One field in one size, of frames that have a checksum: encoded ones, and raw ones of 1,024 bytes or more."""

    def __init__(self, path: str, leaf: ArraySpec, resize: Resize, derived: DerivedFrames):
        self.path = path
        self.derived = derived
        self.source_checksum = checksum_of(path) if leaf.codec is None else decoded_checksum_of(path)
        self.gop_size = 1 if leaf.codec is None else leaf.codec.gop_size
        self._leaf = leaf
        self._resize = resize

    def frame_numbers(self, segment: Segment, row: int, num_rows: int) -> Array:
        """The number of each frame in its GOP, unchecked; a raw frame stands for itself."""
        if self._leaf.codec is None:
            return np.zeros(num_rows, np.uint8)
        return segment.read_column(frame_number_of(self.path), row, num_rows)

    def make(self, segment: Segment, first_row: int, last_row: int) -> list[Array]:
        """Decode the GOP that begins at `first_row`, and keep its frames; returns those up to `last_row`, at least.

        A DamageError if one of these is not what was written.
        """
        num_rows = last_row - first_row + 1
        if num_rows < self.gop_size and not self.derived.directory.is_full:
            try:
                return self._make(segment, first_row, self._gop_end(segment, first_row))
            except DamageError:  # perhaps of a frame behind the last one
                pass
        return self._make(segment, first_row, num_rows)

    def _gop_end(self, segment: Segment, first_row: int) -> int:
        """How many frames the GOP has; rows behind the last one that was written do not count."""
        num_rows = min(self.gop_size, segment.layout.capacity - first_row)
        stored, good = segment.read_small(first_row, num_rows)
        follows = good & (stored[frame_number_of(self.path)] == np.arange(num_rows))
        return num_rows if follows.all() else int(np.argmin(follows))

    def _make(self, segment: Segment, first_row: int, num_rows: int) -> list[Array]:
        stored, good = segment.read_small(first_row, num_rows)
        if not good.all():
            raise damage(segment, "a field", first_row + int(np.argmin(good)))
        sources = stored[self.source_checksum].tolist()
        read: Callable[..., list[Array]] = self._read_raw if self._leaf.codec is None else self._decode
        frames = [resize_frame(frame, self._resize) for frame in read(segment, first_row, stored, sources)]
        self.derived.write(segment.layout.segment_id, first_row, sources, frames)
        return frames

    def _decode(self, segment: Segment, first_row: int, stored: dict[str, Array], sources: list[int]) -> list[Array]:
        leaf = self._leaf
        assert leaf.codec is not None
        packets = segment.read_heap_values(stored[self.path])
        try:
            return decode_frames(leaf.codec, leaf.fixed_shape, leaf.numpy_dtype, packets, sources, range(len(packets)))
        except FrameError as error:
            raise FrameError(f"{segment.path}: {self.path} of row {first_row} on: {error}") from None

    def _read_raw(self, segment: Segment, first_row: int, stored: dict[str, Array], sources: list[int]) -> list[Array]:
        frames = list(segment.read_column(self.path, first_row, len(sources)))
        for row, (frame, source) in enumerate(zip(frames, sources, strict=True), first_row):
            if digest(np.ascontiguousarray(frame)) != source:
                raise damage(segment, self.path, row)
        return frames
