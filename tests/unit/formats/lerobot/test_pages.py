"""The sizes that are read from a parquet file's footer and page headers are those that pyarrow finds in it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tests.unit.formats.lerobot.made import GOLDEN

from understudy.formats import FormatError
from understudy.formats.lerobot import pages
from understudy.formats.lerobot.tables import Rows

FILES = sorted(GOLDEN.rglob("*.parquet"))
COLUMNS = {"number": 1, "row": 3, "text": 1, "flag": 1}


def table(num_rows: int) -> pa.Table:
    rng = np.random.default_rng(0)
    numbers = rng.normal(size=3 * num_rows)
    return pa.table(
        {
            "number": np.arange(num_rows),
            "row": pa.FixedSizeListArray.from_arrays(pa.array(numbers), 3),
            "text": [f"t{n % 5}" for n in range(num_rows)],
            "flag": np.arange(num_rows) % 2 == 0,
        }
    )


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(GOLDEN)))
def test_golden_files(path: Path) -> None:
    metadata = pq.read_metadata(path)
    groups = pages.read_footer(path)
    assert [group.num_rows for group in groups] == [metadata.row_group(n).num_rows for n in range(len(groups))]
    assert len(groups) == metadata.num_row_groups
    with path.open("rb") as file:
        for number, group in enumerate(groups):
            for index, (start, end) in enumerate(group.chains):
                column = metadata.row_group(number).column(index)
                num_values, num_bytes, _ = pages._walk(file, start, end)
                assert num_values == column.num_values
                assert num_bytes <= column.total_uncompressed_size  # which counts the headers


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"compression": "zstd"},
        {"data_page_version": "2.0"},
        {"use_dictionary": False},
        {"data_page_size": 64},
        {"row_group_size": 7},
        {"write_page_index": True},
        {"write_page_checksum": True},
    ],
)
def test_whatever_writers_choose(tmp_path: Path, options: dict[str, object]) -> None:
    wanted = table(1000)
    pq.write_table(wanted, tmp_path / "t", **options)
    rows = Rows(tmp_path / "t", COLUMNS)
    try:
        assert rows.num_rows == 1000
        for start, count in [(0, 1), (1, 99), (500, 300), (799, 1), (10, 5), (0, 1000)]:
            assert rows.take(start, count).equals(wanted.slice(start, count).combine_chunks())
    finally:
        rows.close()


def test_rows_go_on_where_they_stopped(tmp_path: Path) -> None:
    """Taking runs in order decodes the file once: the batches that were read are counted by what is left of them."""
    pq.write_table(table(200), tmp_path / "t", row_group_size=50)
    rows = Rows(tmp_path / "t", COLUMNS, batch_rows=8)
    begun = []
    for start in range(0, 200, 10):
        rows.take(start, 10)
        begun.append(id(rows._batches))
    assert len(set(begun)) == 1
    rows.close()


@pytest.mark.parametrize(
    ("columns", "said"),
    [
        ({"row": 2}, "200 rows of 'row' would unpack to 600 values"),
        ({"text": 3}, "200 rows of 'text' would unpack to 200 values"),
        ({"colour": 1}, "expected one column 'colour', got 0"),
    ],
)
def test_other_shapes_are_refused(tmp_path: Path, columns: dict[str, int], said: str) -> None:
    pq.write_table(table(200), tmp_path / "t")
    with pytest.raises(FormatError, match=said):
        Rows(tmp_path / "t", columns)


def test_a_footer_that_makes_pyarrow_end_the_process_is_refused(tmp_path: Path) -> None:
    """A histogram of another length than the schema asks for: pyarrow 26 aborts when it is asked about the column."""
    pq.write_table(table(20), tmp_path / "t")
    data = bytearray((tmp_path / "t").read_bytes())
    refused = read = 0
    for at in range(len(data) - 8 - int.from_bytes(data[-8:-4], "little"), len(data)):
        damaged = bytearray(data)
        damaged[at] ^= 0x10
        (tmp_path / "d").write_bytes(damaged)
        try:
            rows = Rows(tmp_path / "d", COLUMNS)
        except FormatError:
            refused += 1
            continue
        try:
            rows.take(0, rows.num_rows)
            read += 1
        except FormatError:
            refused += 1
        finally:
            rows.close()
    assert refused > 20
    assert read > 20


def test_a_page_that_claims_too_much_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pq.write_table(pa.table({"x": np.zeros(100_000, np.int64)}), tmp_path / "t")  # 800 kB in some hundred bytes
    Rows(tmp_path / "t", {"x": 1}).close()
    monkeypatch.setattr(pages, "MOST_FREE_BYTES", 0)
    monkeypatch.setattr(pages, "MOST_RATIO", 0)
    with pytest.raises(FormatError, match="would unpack to 100000 values and"):
        Rows(tmp_path / "t", {"x": 1})
    monkeypatch.setattr(pages, "MOST_PAGE_BYTES", 1)
    with pytest.raises(FormatError, match="a page claims"):
        Rows(tmp_path / "t", {"x": 1})
