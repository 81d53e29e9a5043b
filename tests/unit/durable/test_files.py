import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from understudy.core import StoreFailedError
from understudy.durable import files
from understudy.durable.errors import store_errors

OLD, NEW = b"old", [b"new ", bytearray(b"con"), memoryview(b"tent")]
REPLACE = [files.write_durably, files.write_atomically]


@pytest.mark.parametrize("offset", [0, 1, files.PIECE_BYTES - 1, files.PIECE_BYTES, 12345])
@pytest.mark.parametrize(
    "size", [0, 1, files.LARGE_WRITE_BYTES - 1, files.LARGE_WRITE_BYTES, files.PIECE_BYTES, 3 * files.PIECE_BYTES + 7]
)
def test_every_byte_is_written_at_its_offset(tmp_path: Path, offset: int, size: int) -> None:
    data = np.random.default_rng(size).integers(1, 256, size, np.uint8)
    path = tmp_path / "file"
    with path.open("w+b") as file:
        files.write_at(file.fileno(), data, offset)
        files.sync_data(file.fileno())
        assert files.read_at(file.fileno(), size + 10, offset) == data.tobytes()
    assert path.read_bytes() == (bytes(offset) + data.tobytes() if size else b"")


def test_a_failed_write_to_a_store_names_the_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.touch()
    fd = os.open(path, os.O_RDONLY)
    try:
        with (
            pytest.raises(StoreFailedError, match=f"^{path}: write failed: Bad file descriptor; check the disk"),
            store_errors(path, "write"),
        ):
            files.write_at(fd, b"x", 0)
    finally:
        os.close(fd)


@pytest.mark.parametrize("write", REPLACE)
def test_a_whole_file_is_replaced_and_nothing_else_is_left(
    tmp_path: Path, write: Callable[[Path, files.Content], None]
) -> None:
    path = tmp_path / "file"
    write(path, OLD)
    assert path.read_bytes() == OLD
    write(path, NEW)
    assert path.read_bytes() == b"new content"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("write", REPLACE)
def test_a_write_that_is_killed_leaves_the_old_content(
    tmp_path: Path, write: Callable[[Path, files.Content], None]
) -> None:
    path = tmp_path / "file"
    path.write_bytes(OLD)
    code = (
        "import os, sys, pathlib; from understudy.durable import files\n"
        "def pieces():\n    yield b'half'\n    os.kill(os.getpid(), 9)\n"
        f"files.{write.__name__}(pathlib.Path(sys.argv[1]), pieces())"
    )
    assert subprocess.run([sys.executable, "-c", code, str(path)], check=False).returncode == -9
    assert path.read_bytes() == OLD
    write(path, NEW)  # what the killed process left is no obstacle
    assert path.read_bytes() == b"new content"


def test_a_new_file_never_replaces_another(tmp_path: Path) -> None:
    path = tmp_path / "file"
    files.create_durably(path, NEW)
    with pytest.raises(FileExistsError):
        files.create_durably(path, OLD)
    assert path.read_bytes() == b"new content"


def test_a_finished_directory_gets_its_name(tmp_path: Path) -> None:
    (tmp_path / "new" / "deeper").mkdir(parents=True)
    files.write_synced(tmp_path / "new" / "deeper" / "file", OLD)
    files.move_durably(tmp_path / "new", tmp_path / "final")
    assert (tmp_path / "final" / "deeper" / "file").read_bytes() == OLD
    assert [path.name for path in tmp_path.iterdir()] == ["final"]


def test_removing_twice_is_no_error(tmp_path: Path) -> None:
    files.write_durably(tmp_path / "file", OLD)
    files.remove_durably(tmp_path / "file")
    files.remove_durably(tmp_path / "file")
    assert not list(tmp_path.iterdir())


def test_a_file_written_over_itself_is_the_same(tmp_path: Path) -> None:
    content = np.random.default_rng(0).bytes(files.PIECE_BYTES + 5)
    files.write_durably(tmp_path / "file", content)
    files.rewrite(tmp_path / "file")
    assert (tmp_path / "file").read_bytes() == content


def test_what_is_synced_and_in_which_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    replace, fsync = os.replace, os.fsync

    def record_fsync(fd: int) -> None:
        calls.append(f"fsync {Path(f'/proc/self/fd/{fd}').readlink().name}")
        fsync(fd)

    def record_replace(path: Path, target: Path) -> None:
        calls.append(f"rename {path.name} {target.name}")
        replace(path, target)

    monkeypatch.setattr(os, "fsync", record_fsync)
    monkeypatch.setattr(os, "replace", record_replace)
    directory = tmp_path / "directory"
    directory.mkdir()
    files.write_durably(directory / "a", OLD)
    assert calls == ["fsync a.new", "rename a.new a", "fsync directory"]
    calls.clear()
    files.write_atomically(directory / "a", OLD)
    assert calls == ["rename a.new a"]
    calls.clear()
    files.move_durably(directory, tmp_path / "final")
    assert calls == ["fsync a", "fsync directory", "rename directory final", f"fsync {tmp_path.name}"]


def test_an_error_names_the_file(tmp_path: Path) -> None:
    (tmp_path / "file.new").mkdir()
    with pytest.raises(OSError, match=r"file\.new"):
        files.write_durably(tmp_path / "file", OLD)
    with pytest.raises(OSError, match="nowhere"):
        files.sync_directory(tmp_path / "nowhere")
    full = Path("/dev/full")
    if full.exists():
        with pytest.raises(OSError, match="No space left on device: '/dev/full'"):
            files.write_synced(full, OLD)


def test_only_this_package_syncs_and_replaces_files() -> None:
    root = Path(files.__file__).parents[1]
    own = {
        "durable/files.py",
        "replay/format/segment.py",  # makes a file of a fixed size, header first
        "replay/maintain/repair.py",  # mends a file in place
        "selftest/bench_sample.py",  # measures the bare system calls
        "selftest/bench_store.py",
    }
    for path in root.rglob("*.py"):
        if str(path.relative_to(root)) not in own:
            text = path.read_text()
            for call in ("os.fsync(", "os.fdatasync(", "os.replace(", "NamedTemporaryFile"):
                assert call not in text, f"{path}: {call}: use understudy.durable.files"
