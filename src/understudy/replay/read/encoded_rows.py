"""Encoded rows: the decoded frames of neighbouring rows of one segment, for a page that shows a part of an episode."""

from __future__ import annotations

import numpy as np

from understudy.codecs import decode_frames
from understudy.core import DamageError
from understudy.core.step import decoded_checksum_of, frame_number_of
from understudy.replay.format.arrays import Array
from understudy.replay.format.encoded_columns import stored_gops
from understudy.replay.format.segment import Segment


def read_encoded_rows(segment: Segment, path: str, row: int, count: int) -> Array:
    """The frames [count, ...] of an encoded field; a DamageError if one is not what was written.

    Reads from the beginning of the GOP that the first row is in.
    """
    leaf = segment.layout.spec.columns[path]
    assert leaf.codec is not None
    before = int(segment.read_column(frame_number_of(path), row, 1)[0])
    first = max(row - before, 0)
    stored, good = segment.read_small(first, row + count - first)
    if not good.all():
        raise DamageError(
            f"{segment.path}: row {first + int(np.argmin(good))} is not what was written; run `understudy verify`, "
            f"then `understudy repair`"
        )
    packets = segment.read_heap_values(stored[path])
    checksums = stored[decoded_checksum_of(path)].tolist()
    frames: list[Array] = []
    for start, stop in stored_gops(stored[frame_number_of(path)]):
        frames += decode_frames(
            leaf.codec,
            leaf.fixed_shape,
            leaf.numpy_dtype,
            packets[start:stop],
            checksums[start:stop],
            range(stop - start),
        )
    return np.stack(frames[row - first :])
