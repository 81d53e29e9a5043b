"""Commit mark: the last number that was written, or an error; nothing else."""

from pathlib import Path

import pytest

from understudy.core import DamageError
from understudy.replay import Reader, Store
from understudy.replay.format.commit_mark import CommitMark, read_mark
from understudy.replay.format.paths import MARK_FILE


def test_the_last_number_is_read_back(tmp_path: Path) -> None:
    assert read_mark(tmp_path) == 0
    mark = CommitMark(tmp_path, 7)
    assert read_mark(tmp_path) == 7
    mark.write(2**40)
    assert read_mark(tmp_path) == 2**40
    mark.close()
    assert (tmp_path / MARK_FILE).stat().st_size == 16


@pytest.mark.parametrize("content", [b"", b"\0" * 16, b"\7" * 16, b"\7" * 17])
def test_a_mark_that_was_not_written_so_is_damage(content: bytes, tmp_path: Path) -> None:
    (tmp_path / MARK_FILE).write_bytes(content)
    with pytest.raises(DamageError, match="run `understudy repair`, which writes it again"):
        read_mark(tmp_path)


def test_every_commit_of_a_store_is_marked(path: Path) -> None:
    with Reader(path) as reader:
        last = reader.last_commit()
    assert read_mark(path) == last
    with Store.open(path) as store:
        for number, edit in enumerate((lambda: store.delete([1]), lambda: store.begin_writer("v", "1")), 1):
            edit()
            assert read_mark(path) == store.last_commit == last + number
