"""RowBlocks: rows of many segments in one call, from memory that is bounded, and never a row that is not there."""

import os
from pathlib import Path

import numpy as np
import pytest
from tests.writing import write_episode

from understudy.core import DamageError
from understudy.core.examples import random_episode, small_spec
from understudy.replay import Reader, Store
from understudy.replay.format.paths import segment_files
from understudy.replay.read.row_blocks import RowBlocks, grown


@pytest.fixture
def blocks(reader: Reader) -> RowBlocks:
    assert len(reader.catalog.segments()) > 1
    return RowBlocks(reader, small_spec())


def rewards(blocks: RowBlocks, segments: list[int], rows: list[int]) -> list[float]:
    blocks.begin()
    places = blocks.locate(np.array(segments), np.array(rows))
    return blocks.take("reward", places).view(np.float32).reshape(-1).tolist()


def stored(reader: Reader, segments: list[int], rows: list[int]) -> list[float]:
    columns = {segment: reader.segment(segment).read_column("reward", 0, max(rows) + 1) for segment in set(segments)}
    return [float(columns[segment][row]) for segment, row in zip(segments, rows, strict=True)]


def test_rows_of_several_segments_are_taken_at_once(blocks: RowBlocks, reader: Reader) -> None:
    last = max(segment.id for segment in reader.catalog.segments())
    segments, rows = [last, 1, 1, last], [0, 3, 0, 1]
    assert rewards(blocks, segments, rows) == stored(reader, segments, rows)


@pytest.mark.parametrize("row", [-1, 64, 10**12])
def test_a_row_outside_is_refused(blocks: RowBlocks, reader: Reader, row: int) -> None:
    assert reader.segment(1).layout.capacity == 64
    with pytest.raises(IndexError, match=f"segment 1: expected a row from 0 to 63, got {row}"):
        rewards(blocks, [1, 1], [0, row])


@pytest.mark.parametrize(("segment", "text"), [(-1, "expected a number from 0, got -1"), (99, "not in the catalog")])
def test_a_segment_that_is_not_there_is_refused(blocks: RowBlocks, segment: int, text: str) -> None:
    with pytest.raises((IndexError, DamageError), match=text):
        rewards(blocks, [1, segment], [0, 0])


def test_rows_that_are_committed_later_are_read_then(path: Path) -> None:
    with Store.open(path) as store, Reader(path) as reader:
        blocks = RowBlocks(reader, small_spec())
        assert rewards(blocks, [1, 1], [0, 23]) == stored(reader, [1, 1], [0, 23])
        write_episode(store.writer("w", small_spec()), random_episode(small_spec(), 5, 9))
        assert rewards(blocks, [1, 1, 1], [24, 0, 29]) == stored(reader, [1, 1, 1], [24, 0, 29])


def test_memory_is_bounded_and_every_row_is_still_found(tmp_path: Path) -> None:
    with Store.open(tmp_path / "store", segment_bytes=100_000) as store:
        writer = store.writer("w", small_spec(), commit_steps=1000)
        for seed in range(16):
            write_episode(writer, random_episode(small_spec(), 1000, seed))
    with Reader(tmp_path / "store") as reader:
        spans = reader.catalog.spans()
        segments = np.repeat(spans["segment"], spans["num_rows"])
        rows = np.concatenate([np.arange(n) + f for f, n in zip(spans["first_row"], spans["num_rows"], strict=True)])
        blocks = RowBlocks(reader, small_spec(), max_bytes=300_000)
        order = np.random.default_rng(0).permutation(len(rows))
        for some in np.array_split(order, 1000):
            one, other = segments[some].tolist(), rows[some].tolist()
            assert rewards(blocks, one, other) == stored(reader, one, other)
        assert len(rows) * 40 > 300_000 > 0.9 * blocks.num_bytes
        before = blocks.num_bytes
        blocks.forget(range(100))  # what is forgotten is read again, into the same memory
        for some in np.array_split(order, 1000)[:9]:
            one, other = segments[some].tolist(), rows[some].tolist()
            assert rewards(blocks, one, other) == stored(reader, one, other)
        assert blocks.num_bytes == before


def test_what_was_compared_is_served_and_never_what_came_later(path: Path) -> None:
    (file,) = segment_files(path)
    with Reader(path) as reader:
        blocks = RowBlocks(reader, small_spec())
        known = rewards(blocks, [1, 1], [3, 7])
        os.truncate(file, 5000)  # under a map, the next touch would end the process
        assert rewards(blocks, [1, 1], [3, 7]) == known
        with pytest.raises(DamageError, match=r"the disk does not give .* of row 3 back"):
            rewards(RowBlocks(reader, small_spec()), [1], [3])


def test_grown_never_shrinks() -> None:
    assert grown(np.array([1, 2]), 4).tolist() == [1, 2, 0, 0]
    assert grown(np.array([1, 2]), 3, -1).tolist() == [1, 2, -1]
    assert grown(np.array([1, 2]), 1).tolist() == [1, 2]
