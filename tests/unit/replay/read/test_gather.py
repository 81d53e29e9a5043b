"""Gatherer: fields of rows into given arrays, each compared with its checksum when it is first read."""

import os
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from tests.writing import write_episode

from understudy.core import DamageError
from understudy.core.examples import random_episode, robot_spec, text_spec
from understudy.replay import Reader, Store
from understudy.replay.format.paths import segment_files
from understudy.replay.format.segment import read_layout
from understudy.replay.read.gather import CHECK_EVERY, Gatherer, ReadRequest

NUM_ROWS = 7


def make(path: Path, spec) -> tuple[Reader, Gatherer]:
    with Store.open(path) as store:
        write_episode(store.writer("w", spec), random_episode(spec, NUM_ROWS - 1, 1))
    reader = Reader(path)
    return reader, Gatherer(reader, spec, num_threads=2)


def read(gatherer: Gatherer, field: str, rows: list[int], shape=(), dtype=np.float32) -> np.ndarray:
    out = np.empty((len(rows), *shape), dtype)
    gatherer.read([ReadRequest(field, np.ones(len(rows), np.int32), np.array(rows), out)])
    return out


@pytest.mark.parametrize("again", [False, True])
def test_large_and_small_fields(tmp_path: Path, again: bool) -> None:
    reader, gatherer = make(tmp_path / "store", robot_spec(32))
    _, columns = reader.rows(1)
    rows = [5, 0, 1, 2, 5]
    for _ in range(1 + again):  # from the disk, then from the mapped file
        frames = read(gatherer, "observation/wrist_1", rows, (32, 32, 3), np.uint8)
        assert np.array_equal(frames, columns["observation/wrist_1"][rows])
    assert np.array_equal(gatherer.field("reward", np.ones(5, np.int32), np.array(rows)), columns["reward"][rows])
    gatherer.close()
    reader.close()


def test_arrays_that_are_not_contiguous(tmp_path: Path) -> None:
    reader, gatherer = make(tmp_path / "store", robot_spec(32))
    _, columns = reader.rows(1)
    out = np.zeros((2, 32, 32, 6), np.uint8)[..., ::2]
    gatherer.read([ReadRequest("observation/wrist_2", np.ones(2, np.int32), np.array([3, 1]), out)])
    assert np.array_equal(out, columns["observation/wrist_2"][[3, 1]])
    gatherer.close()
    reader.close()


def test_ragged_fields(tmp_path: Path) -> None:
    reader, gatherer = make(tmp_path / "store", text_spec())
    _, columns = reader.rows(1)
    assert read(gatherer, "observation/prompt", [4, 2], dtype=object).tolist() == [
        columns["observation/prompt"][row] for row in (4, 2)
    ]
    gatherer.close()
    reader.close()


@pytest.mark.parametrize(
    ("field", "shape", "dtype"), [("observation/wrist_1", (32, 32, 3), np.uint8), ("reward", (), np.float32)]
)
def test_a_damaged_row_is_never_returned(tmp_path: Path, field: str, shape, dtype) -> None:
    reader, gatherer = make(tmp_path / "store", robot_spec(32))
    (file,) = segment_files(tmp_path / "store")
    with file.open("r+b") as content:
        content.seek(read_layout(file).columns[field].at(4))
        byte = content.read(1)
        content.seek(-1, 1)
        content.write(bytes([byte[0] ^ 1]))
    read(gatherer, field, [0, 3], shape, dtype)
    for _ in range(2):
        with pytest.raises(DamageError, match="of row 4 is not what was written; run `understudy verify`"):
            read(gatherer, field, [0, 4], shape, dtype)
    gatherer.close()
    reader.close()


def test_a_row_outside_its_segment_is_refused(tmp_path: Path) -> None:
    reader, gatherer = make(tmp_path / "store", text_spec())
    with pytest.raises(IndexError, match="expected a row from 0 to"):
        read(gatherer, "reward", [10**9])
    gatherer.close()
    reader.close()


def test_a_frame_that_is_damaged_after_its_first_read_is_found(tmp_path: Path) -> None:
    reader, gatherer = make(tmp_path / "store", robot_spec(32))
    frame = ("observation/wrist_1", [4], (32, 32, 3), np.uint8)
    read(gatherer, *frame)
    (file,) = segment_files(tmp_path / "store")
    with file.open("r+b") as content:
        content.seek(read_layout(file).columns["observation/wrist_1"].at(4))
        content.write(b"\0\1\2\3")
    num_served = 0
    with suppress(DamageError):
        for num_served in range(1000):  # noqa: B007
            read(gatherer, *frame)
    assert num_served < CHECK_EVERY
    with pytest.raises(DamageError, match="observation/wrist_1 of row 4 is not what was written"):
        read(gatherer, *frame)
    gatherer.close()
    reader.close()


def test_small_fields_that_are_damaged_after_their_first_read_are_not_served(tmp_path: Path) -> None:
    reader, gatherer = make(tmp_path / "store", robot_spec(32))
    before = read(gatherer, "reward", [0, 4])
    (file,) = segment_files(tmp_path / "store")
    with file.open("r+b") as content:
        content.seek(read_layout(file).columns["reward"].at(0))
        content.write(b"\1" * 100)
    assert np.array_equal(read(gatherer, "reward", [0, 4]), before)
    gatherer.close()
    reader.close()


def test_a_file_cut_short_is_an_error_that_names_it(tmp_path: Path) -> None:
    reader, gatherer = make(tmp_path / "store", robot_spec(32))
    frame = ("observation/wrist_1", [0, 4], (32, 32, 3), np.uint8)
    for _ in range(3):
        read(gatherer, *frame)
    (file,) = segment_files(tmp_path / "store")
    os.truncate(file, 5000)
    with pytest.raises(DamageError, match=r"00000001\.safetensors: the disk does not give .* of row 0 back; run `unde"):
        read(gatherer, *frame)
    gatherer.close()
    reader.close()
