"""Child: one subprocess of any interpreter: the process, the socket to it, and its log.

No call blocks for longer than `KILLED_WAIT_S`, and nothing is left behind. The child leads its own process group, which
is killed as a whole: by the parent, or, if the parent dies, by the kernel (see child_main.py). The log is an unnamed
file.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from understudy.core import UnderstudyError
from understudy.processes.factory_spec import FactorySpec

EXIT_WAIT_S = 2.0  # time that a process has to exit after it closed its socket
KILLED_WAIT_S = (
    10.0  # time that the system has to end a process that got SIGKILL: seconds, if the machine is overloaded
)
LOG_TAIL_BYTES = 4096
_STACK_BYTES = 32 * 2**10
_PACKAGE = Path(__file__).resolve().parents[1]
_OF_THIS_PYTHON = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "__PYVENV_LAUNCHER__")

# Loads one file of this package, and what it imports, by its path. The parent directory of the package may be a
# site-packages with a numpy that another interpreter cannot load, so it must not get onto sys.path. The packages around
# the file may need torch, so they are not imported, and the file is loaded under another name.
_BOOT = """
import importlib.util as u, sys
def load(name, file, folders=None):
    s = u.spec_from_file_location(name, file, submodule_search_locations=folders)
    sys.modules[name] = m = u.module_from_spec(s)
    s.loader.exec_module(m)
    return m
folder, program = sys.argv[1:3]
load("understudy", folder + "/__init__.py", [folder])
load("understudy_process", folder + "/" + program).main()
"""


class StartError(UnderstudyError):
    """The interpreter cannot be started."""


class Child:
    """A subprocess that runs `main` of one of our files, which starts with `child_main.enter`."""

    def __init__(
        self, program: str, source: FactorySpec, *, given: Sequence[int] = (), defaults: Mapping[str, str] | None = None
    ):
        """Start it with a socket, a lifeline and the descriptors `given`. `defaults` are environment variables for
        what neither this process nor the spec sets."""
        self.socket, theirs = socket.socketpair()
        lifeline_read, self._lifeline = os.pipe()
        self._log = _log_file()
        descriptors = (theirs.fileno(), lifeline_read, *given)
        command = [source.python or sys.executable, "-c", _BOOT, str(_PACKAGE), program, *map(str, descriptors)]
        try:
            self._process = subprocess.Popen(
                command,
                pass_fds=descriptors,
                env=_variables(source, defaults or {}),
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=self._log,
                start_new_session=True,
            )
        except OSError as error:
            self._close_descriptors()
            raise StartError(
                f"python: expected an interpreter, got {command[0]!r} ({error.strerror}); name another"
            ) from error
        finally:
            theirs.close()
            os.close(lifeline_read)
        self.pid = self._process.pid

    # ---- the end of the process

    def exited(self) -> bool:
        """Whether the process has ended; it stays a zombie, so that its process group id is not reused."""
        if self._process.returncode is not None:
            return True
        try:
            return os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
        except ChildProcessError:  # someone else has waited for it
            return True

    def wait_exited(self, timeout_s: float) -> bool:
        deadline = time.monotonic() + timeout_s
        pause_s = 0.0005
        while not self.exited():
            if time.monotonic() > deadline:
                return False
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, 0.02)
        return True

    def reap(self) -> int | None:
        """The exit code of a process that closed its socket, once its whole group is dead; None if it still runs."""
        return self.kill() if self.wait_exited(EXIT_WAIT_S) else None

    def kill(self) -> int | None:
        """Kill the process and its group; returns the exit code, or None if the system has not ended it yet."""
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(KILLED_WAIT_S)
        return self._process.returncode

    def close(self) -> None:
        """Kill what still runs and close all descriptors; the log is deleted."""
        self.kill()
        self._close_descriptors()

    def _close_descriptors(self) -> None:
        self.socket.close()
        for descriptor in (self._lifeline, self._log):
            if descriptor >= 0:
                os.close(descriptor)
        self._lifeline = self._log = -1

    # ---- its log

    def log_tail(self, size_bytes: int = LOG_TAIL_BYTES) -> str:
        """The end of what it wrote to stdout and stderr."""
        size = os.fstat(self._log).st_size
        return os.pread(self._log, size_bytes, max(0, size - size_bytes)).decode(errors="replace")

    def trim_log(self, max_bytes: int) -> None:
        """Keep only the end of a log that has grown beyond its limit."""
        if os.fstat(self._log).st_size > max_bytes:
            tail = self.log_tail(max_bytes // 4).encode()
            os.ftruncate(self._log, 0)  # the child writes in append mode, so it continues here
            os.write(self._log, tail)

    def request_stack(self) -> int:
        """Make the child write the stacks of its threads to the log; returns the offset where they will begin."""
        offset = os.fstat(self._log).st_size
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGUSR1)
        return offset

    def stack(self, offset: int) -> str:
        """The stacks written to the log since `request_stack` returned `offset`; empty if there are none yet."""
        text = os.pread(self._log, _STACK_BYTES, offset).decode(errors="replace")
        start = text.find("Current thread 0x")
        threads = text.find("Thread 0x")
        begin = min((x for x in (start, threads) if x >= 0), default=-1)
        return text[begin:] if start >= 0 else ""


def _log_file() -> int:
    with tempfile.TemporaryFile() as file:
        descriptor = os.dup(file.fileno())
    fcntl.fcntl(descriptor, fcntl.F_SETFL, fcntl.fcntl(descriptor, fcntl.F_GETFL) | os.O_APPEND)
    return descriptor


def _variables(source: FactorySpec, defaults: Mapping[str, str]) -> dict[str, str]:
    variables = {**defaults, **os.environ}
    if source.python is not None:
        for name in _OF_THIS_PYTHON:
            variables.pop(name, None)
    variables["PYTHONUNBUFFERED"] = "1"  # so that the log holds what a killed process printed
    variables.update(source.env)
    return variables
