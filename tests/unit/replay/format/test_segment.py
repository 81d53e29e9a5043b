"""Segment: rows come back as they were written, and damage is found where it is."""

from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from understudy.core import H264, ArraySpec, DamageError, Spec, StepSpec
from understudy.core.episode import stack
from understudy.core.examples import random_steps, text_spec
from understudy.core.tree import equal_leaf
from understudy.durable.open_files import OpenFile, close_removed
from understudy.replay.format import segment as segment_module
from understudy.replay.format.layout import Layout
from understudy.replay.format.segment import (
    HEAP_CHECKSUM,
    Segment,
    digest_of_checksums,
    from_bytes,
    read_layout,
    signed,
    to_bytes,
)

SPEC = text_spec()
NUM_ROWS = 5
POSE = ArraySpec(shape=(3,), dtype="float32")


@pytest.fixture
def columns():
    rows = [SPEC.row(step) for step in random_steps(SPEC, NUM_ROWS, seed=1)[0]]
    return {path: stack([row[path] for row in rows], leaf) for path, leaf in SPEC.columns.items()}


@pytest.fixture
def segment(tmp_path: Path, columns):
    layout = Layout(spec=SPEC, capacity=64, heap_bytes=4096, store_id="s", segment_id=1)
    made = Segment.create(layout, tmp_path / "1.safetensors")
    written = made.write(
        columns,
        first_row=2,
        heap_offset=10,
        episode=np.full(NUM_ROWS, 9),
        index=np.arange(NUM_ROWS, dtype=np.int32),
        records={0: b'{"commit":1}'},
    )
    made.sync()
    yield made, written
    made.close()


def test_rows_come_back(segment, columns) -> None:
    opened, written = segment
    found, good = opened.read_checked(2, NUM_ROWS)
    assert good.all()
    for path, column in columns.items():
        assert equal_leaf(found[path], column), path
    assert found["row/episode"].tolist() == [9] * NUM_ROWS
    assert opened.read_heap(found["row/record"][0]) == b'{"commit":1}'
    assert written.checksums.tolist() == opened.read_column("row/checksum", 2, NUM_ROWS).tolist()


def test_a_changed_byte_damages_one_row(segment) -> None:
    opened, _ = segment
    with opened.path.open("r+b") as file:
        file.seek(opened.layout.columns["reward"].at(3))
        file.write(b"\xff")
    assert opened.read_checked(2, NUM_ROWS)[1].tolist() == [True, False, True, True, True]


def test_a_changed_byte_in_the_heap_damages_the_row_it_belongs_to(segment) -> None:
    opened, _ = segment
    entry = opened.read_column("observation/jpeg", 2, NUM_ROWS)[4]
    with opened.path.open("r+b") as file:
        file.seek(opened.layout.heap_offset + int(entry[0]))  # its checksum
        file.write(b"\0\1\2\3")
    assert opened.read_checked(2, NUM_ROWS)[1].tolist() == [True, True, True, True, False]
    opened_again = Segment.open(opened.layout, opened.path, write=True)
    opened_again.blank_heap(opened.read_column("row/record", 2, 1)[0])
    assert (opened_again.read_heap(opened.read_column("row/record", 2, 1)[0]) or b"").strip() == b"{}"
    opened_again.close()


def test_an_entry_behind_the_heap_is_no_value(segment) -> None:
    opened, _ = segment
    assert opened.read_heap((4096 - HEAP_CHECKSUM.size, 1)) is None


def test_the_unused_part_is_cleared(segment) -> None:
    opened, written = segment
    end = 2 + NUM_ROWS
    heap_used = 10 + written.heap_bytes
    assert opened.dirty_tail(end, heap_used) == []
    assert opened.dirty_tail(end - 1, heap_used) != []  # as if the last row had not been committed
    assert opened.clear_tail(end - 1, heap_used) > 0
    assert opened.dirty_tail(end - 1, heap_used) == []
    assert opened.read_checked(2, NUM_ROWS - 1)[1].all()


def test_a_file_that_is_not_the_layouts_is_refused(segment, tmp_path: Path) -> None:
    opened, _ = segment
    assert read_layout(opened.path) == opened.layout
    other = Layout(spec=SPEC, capacity=128, heap_bytes=4096, store_id="s", segment_id=1)
    with pytest.raises(DamageError, match=r"expected \d+ bytes, got \d+; run `understudy verify`"):
        Segment.open(other, opened.path)
    with pytest.raises(DamageError, match="the file is gone; restore it from a backup, or run `understudy repair`"):
        Segment.open(opened.layout, tmp_path / "2.safetensors")
    (tmp_path / "3.safetensors").write_bytes(b"no segment at all")
    with pytest.raises(DamageError, match="not a readable segment"):
        read_layout(tmp_path / "3.safetensors")


def test_a_flipped_bit_in_the_header_is_damage_or_another_layout(tmp_path: Path) -> None:
    spec = StepSpec(
        observation=Spec(
            {"camera": ArraySpec(shape=(144, 160, 3), dtype="uint8", codec=H264()), "arm": {"pose": POSE}}
        ),
        action=Spec(POSE),
    )
    layout = Layout(spec=spec, capacity=10, heap_bytes=1000, store_id="s", segment_id=1)
    path, num_damaged = tmp_path / "00000001.safetensors", 0
    for at in range(len(layout.header.rstrip())):
        flipped = bytearray(layout.header)
        flipped[at] ^= 1 << at % 8
        path.write_bytes(flipped)
        try:
            read_layout(path)
        except DamageError:
            num_damaged += 1
    assert num_damaged > 500


def test_ragged_values_as_bytes() -> None:
    leaf = SPEC.columns["action"]
    value = np.arange(8, dtype=np.int32).reshape(2, 4)
    assert np.array_equal(from_bytes(to_bytes(value), leaf), value)
    assert from_bytes(to_bytes("猫"), SPEC.columns["observation/prompt"]) == "猫"


def test_checksums_fit_sqlites_integers() -> None:
    assert (signed(2**63 - 1), signed(2**63), signed(2**64 - 1)) == (2**63 - 1, -(2**63), -1)
    assert -(2**63) <= digest_of_checksums(np.arange(3, dtype=np.uint64)) < 2**63


def test_a_file_that_is_removed_while_it_is_opened_is_gone(segment, monkeypatch: pytest.MonkeyPatch) -> None:
    """As by a compaction of this process: a sampler that follows then looks into the catalog again."""

    def opened(path: Path, flags: int) -> OpenFile:
        file = OpenFile(path, flags)
        path.unlink()
        close_removed()
        return file

    monkeypatch.setattr(segment_module, "OpenFile", opened)
    with pytest.raises(DamageError, match="the file is gone"):
        Segment.open(segment[0].layout, segment[0].path)


def test_a_file_that_is_removed_between_two_reads_is_gone(segment) -> None:
    path = segment[0].path
    with closing(Segment.open(read_layout(path), path)) as opened:
        path.unlink()
        close_removed()  # as compaction does
        for read in (opened.expect_random_reads, opened.file_problem, lambda: opened.read_small(2, 1)):
            with pytest.raises(DamageError, match="the file is gone; restore it from a backup"):
                read()
