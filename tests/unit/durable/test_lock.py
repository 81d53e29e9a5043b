import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from understudy.core import StoreLockedError
from understudy.durable.lock import FileLock, LockHeldError, WriterLock, lock_is_held

HOLD = (
    "import sys, pathlib; from understudy.durable.lock import FileLock\n"
    "lock = FileLock(pathlib.Path(sys.argv[1])); print('held', flush=True); sys.stdin.read()"
)


def test_one_process_holds_it_and_the_next_gets_it_when_the_first_is_killed(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    command = [sys.executable, "-c", HOLD, str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"held\n"
        assert lock_is_held(path)
        with pytest.raises(LockHeldError, match=rf"^{path}: held by another process \(pid {other.pid} on .*; stop it"):
            FileLock(path)
        with pytest.raises(StoreLockedError, match=rf"^{tmp_path}: another process is writing .*pid {other.pid} on"):
            WriterLock(path)
        other.kill()
    assert not lock_is_held(path)
    lock = FileLock(path)
    assert json.loads(path.read_text())["pid"] == os.getpid()
    lock.release()
    assert not lock.held
    lock.release()


def test_a_lock_file_without_an_owner_is_refused_in_a_sentence(tmp_path: Path) -> None:
    lock = FileLock(tmp_path / "lock")
    (tmp_path / "lock").write_text("{")
    with pytest.raises(LockHeldError, match="it has not written who it is"):
        FileLock(tmp_path / "lock")
    lock.release()


def test_nobody_holds_a_lock_that_is_not_there(tmp_path: Path) -> None:
    assert not lock_is_held(tmp_path / "lock")
