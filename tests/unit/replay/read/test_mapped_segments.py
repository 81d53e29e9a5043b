"""MappedSegments: rows of many files in one call, and never a byte outside of them."""

import numpy as np
import pytest

from understudy.replay import Reader
from understudy.replay.read.mapped_segments import MappedSegments, grown


@pytest.fixture
def mapped(reader: Reader) -> MappedSegments:
    made = MappedSegments()
    for segment in reader.catalog.segments():
        made.add(segment.id, reader.segment(segment.id))
    assert len(made.segments) > 1
    return made


def test_rows_of_several_segments_are_taken_at_once(mapped: MappedSegments) -> None:
    last = max(mapped.segments)
    segments, rows = np.array([last, 1, 1, last]), np.array([0, 3, 0, 1])
    taken = mapped.take("row/index", mapped.locate(segments, rows)).view(np.int32).reshape(-1)
    stored = [mapped.segments[s].read_column("row/index", r, 1)[0] for s, r in zip(segments, rows, strict=True)]
    assert taken.tolist() == stored == [mapped.view("row/index", s)[r] for s, r in zip(segments, rows, strict=True)]


@pytest.mark.parametrize("row", [-1, 64, 10**12])
def test_a_row_outside_is_refused(mapped: MappedSegments, row: int) -> None:
    capacity = mapped.segments[1].layout.capacity
    assert capacity == 64
    mapped.locate(np.array([1, 1]), np.array([0, capacity - 1]))  # the first and the last
    with pytest.raises(IndexError, match=f"segment 1: expected a row from 0 to 63, got {row}"):
        mapped.locate(np.array([1, 1]), np.array([0, row]))


@pytest.mark.parametrize("segment", [-1, 99])
def test_a_segment_that_is_not_mapped_is_refused(mapped: MappedSegments, segment: int) -> None:
    with pytest.raises(IndexError, match="expected mapped segments"):
        mapped.locate(np.array([1, segment]), np.array([0, 0]))


def test_a_number_between_mapped_segments_is_refused(reader: Reader) -> None:
    made = MappedSegments()
    made.add(2, reader.segment(2))
    assert made.missing(np.array([1, 2, 7, 7])) == [1, 7]
    with pytest.raises(IndexError, match="segment 1: expected a row from 0 to -1, got 0"):
        made.locate(np.array([2, 1]), np.array([0, 0]))


def test_grown_never_shrinks() -> None:
    assert grown(np.array([1, 2]), 4).tolist() == [1, 2, 0, 0]
    assert grown(np.array([1, 2]), 1).tolist() == [1, 2]
