"""OpenFile: open whenever it is used, and closed between uses when the limit of open files asks for it."""

from __future__ import annotations

import os
import resource
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from understudy.durable.open_files import OpenFile, max_open_files, num_open_files, raise_limit


@pytest.fixture
def limit() -> Iterator[int]:
    """A limit that leaves room for 100 files more than are open now."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    room = len(list(Path("/proc/self/fd").iterdir())) + 100
    resource.setrlimit(resource.RLIMIT_NOFILE, (room, before[1]))
    yield room
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


def make(directory: Path, num_files: int) -> list[OpenFile]:
    made = []
    for number in range(num_files):
        (directory / str(number)).write_text(f"content {number}")
        made.append(OpenFile(directory / str(number)))
    return made


def test_more_files_than_the_system_allows(tmp_path: Path, limit: int) -> None:
    before = num_open_files()
    files = make(tmp_path, limit + 100)
    for _ in range(2):
        for number, file in enumerate(files):
            with file as fd:
                assert os.pread(fd, 100, 0) == f"content {number}".encode()
    assert num_open_files() - before <= max_open_files() == limit // 4
    for file in files:
        file.close()
    assert num_open_files() <= before


def test_a_file_in_use_is_never_closed(tmp_path: Path, limit: int) -> None:
    first, *others = make(tmp_path, limit + 100)
    with first as fd:
        for other in others:
            with other:
                pass
        assert os.pread(fd, 100, 0) == b"content 0"
        first.close()
        assert os.pread(fd, 100, 0) == b"content 0"
    with pytest.raises(OSError, match="used after close"):
        first.__enter__()
    for other in others:
        other.close()


def test_others_may_use_up_the_limit(tmp_path: Path, limit: int) -> None:
    files = make(tmp_path, 20)
    taken: list[int] = []
    with suppress(OSError):
        while True:
            taken.append(os.open("/dev/null", os.O_RDONLY))
    another = OpenFile(tmp_path / "19")  # one of the 20 makes room
    with another as fd, files[0] as other:
        assert (os.pread(fd, 100, 0), os.pread(other, 100, 0)) == (b"content 19", b"content 0")
    for fd in taken:
        os.close(fd)
    for file in (*files, another):
        file.close()


def test_a_file_that_was_replaced_while_it_was_closed_is_gone(tmp_path: Path, limit: int) -> None:
    first, *others = make(tmp_path, limit + 100)
    (tmp_path / "new").write_text("another file")
    (tmp_path / "new").rename(tmp_path / "0")
    with pytest.raises(FileNotFoundError, match="another file has its name now"):
        first.__enter__()
    for file in (first, *others):
        file.close()


def test_many_threads_read_what_they_ask_for(tmp_path: Path, limit: int) -> None:
    files = make(tmp_path, 100)
    wrong: list[int] = []

    def read(offset: int) -> None:
        for turn in range(300):
            number = (turn * 7 + offset) % len(files)
            with files[number] as fd:
                if os.pread(fd, 100, 0) != f"content {number}".encode():
                    wrong.append(number)

    threads = [threading.Thread(target=read, args=(offset,)) for offset in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    for file in files:
        file.close()


def test_the_limit_is_raised_to_the_highest(limit: int) -> None:
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    assert raise_limit() == hard == resource.getrlimit(resource.RLIMIT_NOFILE)[0]
