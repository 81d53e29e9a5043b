"""A temporary store is removed by a call, or with its owner."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from understudy.compat.temporary_store import temporary_store_path


class Owner:
    pass


def test_it_is_removed_by_the_call() -> None:
    owner = Owner()
    path, remove = temporary_store_path(owner)
    assert path.parent.is_dir()
    assert not path.exists()
    remove()
    assert not path.parent.exists()


def test_it_is_removed_with_its_owner() -> None:
    owner = Owner()
    path, _ = temporary_store_path(owner)
    del owner
    gc.collect()
    assert not path.parent.exists()


KILLED = """
import os, signal
from understudy.compat.temporary_store import temporary_store_path
class Owner: pass
owner = Owner()
path, _ = temporary_store_path(owner)
path.mkdir()
print(path, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_one_of_a_killed_process_is_removed_by_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    alive = Owner()
    kept, _ = temporary_store_path(alive)
    done = subprocess.run(
        [sys.executable, "-c", KILLED],
        env={**os.environ, "TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    left = Path(done.stdout.strip())
    assert left.is_dir()
    other = Owner()
    mine, _ = temporary_store_path(other)
    assert not left.parent.exists()
    assert kept.parent.is_dir()
    assert mine.parent.is_dir()
