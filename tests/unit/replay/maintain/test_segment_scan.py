"""Segment scan: what one file holds, without the catalog."""

from pathlib import Path

import pytest

from understudy.core import Source
from understudy.replay.format.lost_commits import newest_commit
from understudy.replay.format.paths import segment_path
from understudy.replay.format.segment import Segment, read_layout
from understudy.replay.maintain.segment_scan import num_unrecorded, scan_segment


@pytest.fixture
def segment(path: Path):
    file = segment_path(path, 1)
    opened = Segment.open(read_layout(file), file, write=True)
    yield opened
    opened.close()


def test_rows_and_records(segment: Segment) -> None:
    found = scan_segment(segment)
    assert found.rows["episode"].tolist() == [e for e in (1, 2, 3, 4) for _ in range(6)]
    assert found.rows["index"].tolist() == [*range(6)] * 4
    assert found.rows["row"].tolist() == [*range(24)]
    assert found.rows["is_step"].sum() == 20
    assert set(found.rows["source"].tolist()) == {int(Source.POLICY)}
    assert {row: record["episode"] for row, record in found.records.items()} == {0: 1, 6: 2, 12: 3, 18: 4}
    assert found.rows["commit"].tolist() == [found.records[row // 6 * 6]["commit"] for row in range(24)]
    assert found.rows["heap_end"].max() <= segment.layout.heap_bytes
    assert newest_commit(segment.path) == found.records[18]["commit"]


def test_damaged_rows_and_records_are_left_out(segment: Segment) -> None:
    entry = segment.read_column("row/record", 6, 1)[0]
    with segment.path.open("r+b") as stream:
        for offset in (segment.layout.columns["reward"].at(3), segment.layout.heap_offset + int(entry[0])):
            stream.seek(offset)
            stream.write(b"\xa5\x5a")
    found = scan_segment(segment)
    assert found.rows["row"].tolist() == [row for row in range(24) if row != 3]
    assert sorted(found.records) == [0, 12, 18]
    assert found.rows["commit"][found.rows["episode"] == 2].tolist() == [0] * 6  # unknown without the record


def test_a_record_that_repair_has_blanked_is_none(segment: Segment) -> None:
    newest = scan_segment(segment).records[18]["commit"]
    segment.blank_heap(segment.read_column("row/record", 18, 1)[0])
    found = scan_segment(segment)
    assert (len(found.rows), sorted(found.records)) == (24, [0, 6, 12])
    assert newest_commit(segment.path) == found.records[12]["commit"] < newest


def test_whole_rows_after_the_last_one_that_is_listed(segment: Segment) -> None:
    assert [num_unrecorded(segment, num_rows) for num_rows in (24, 20, 0)] == [0, 4, 24]
