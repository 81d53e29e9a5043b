"""Layout: where columns lie in a segment file."""

import numpy as np
import pytest

from understudy.core.examples import robot_spec, small_spec, text_spec
from understudy.replay.format.layout import (
    HEADER_ALIGN,
    MAX_HEAP_BYTES,
    ROW_ALIGN,
    Layout,
    checksum_of,
    parse_header,
    plan_capacity,
    row_bytes_of,
)


def layout(spec, capacity: int = 64) -> Layout:
    return Layout(spec=spec, capacity=capacity, heap_bytes=1000, store_id="abc", segment_id=7)


def test_columns_follow_each_other_without_gaps_and_the_heap_comes_last() -> None:
    made = layout(robot_spec(32))
    offset = len(made.header)
    assert offset % HEADER_ALIGN == 0
    for column in made.columns.values():
        assert column.offset == offset == column.at(0)
        assert column.offset % column.dtype.itemsize == 0
        offset = column.at(made.capacity)
    assert offset == made.heap_offset == len(made.header) + row_bytes_of(made.spec) * made.capacity
    assert made.file_bytes == offset + 1000


def test_large_fields_have_checksums_of_their_own() -> None:
    made = layout(robot_spec(32))  # 3072 bytes a frame
    assert made.large == ("observation/wrist_1", "observation/wrist_2")
    names = {column.name for column in made.small}
    assert {checksum_of(path) for path in made.large} <= names
    assert not names & {*made.large, "row/checksum"}
    assert layout(robot_spec(16)).large == ()  # 768 bytes


def test_a_ragged_field_is_an_offset_and_a_length() -> None:
    made = layout(text_spec())
    assert made.ragged == ("observation/prompt", "observation/jpeg", "action", "proposal", "extras/thought")
    for path in made.ragged:
        assert (made.columns[path].dtype, made.columns[path].shape) == (np.uint32, (2,))


def test_the_header_describes_the_layout() -> None:
    metadata, tensors = parse_header(layout(small_spec()).header)
    assert (metadata["store"], metadata["segment"]) == ("abc", "7")
    assert tensors["observation"]["shape"] == [64, 4]
    assert tensors["heap"]["shape"] == [1000]
    with pytest.raises(ValueError, match="no metadata"):
        parse_header(b"\0" * 8 + b"{}")


def test_a_plan_has_room_for_what_must_fit() -> None:
    spec = small_spec()
    capacity, heap = plan_capacity(spec, 100_000)
    assert capacity % ROW_ALIGN == 0
    assert capacity * row_bytes_of(spec) >= 100_000 - row_bytes_of(spec)
    assert heap == 25_000
    assert plan_capacity(spec, 100, 1000, 5000) == (1024, 5000)
    assert plan_capacity(text_spec(), 2**40)[1] == MAX_HEAP_BYTES
