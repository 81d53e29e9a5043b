"""Child: one life of a policy's process: the process, the socket to it, and its log.

Nothing here blocks for longer than its deadline, and nothing is left behind: the child leads a process group of its
own, which is killed as a whole, and the log is a file without a name.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from understudy.policies.elsewhere.process import Arrays, receive
from understudy.policies.elsewhere.source import PolicySource
from understudy.policies.protocol import PolicyError

EXIT_WAIT_S = 2.0  # for a process that closed its socket, or was sent SIGKILL
STACK_WAIT_S = 5.0  # for a hung process to say where it is
LOG_TAIL_BYTES = 4096
LOG_BYTES = 2**20  # of what it prints, the end is kept
_OF_THIS_PYTHON = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "__PYVENV_LAUNCHER__")

# Loads this one file and nothing else from where it lies: its folder belongs to packages of this interpreter.
_BOOT = """
import importlib.util as u, sys
s = u.spec_from_file_location("understudy_elsewhere", sys.argv[1])
sys.modules["understudy_elsewhere"] = m = u.module_from_spec(s)
s.loader.exec_module(m)
m.main()
"""


class Late(Exception):
    """The deadline is over."""


class Ended(Exception):
    """The process closed its end of the socket."""


class Child:
    """A process that builds nothing until it is asked to."""

    def __init__(self, source: PolicySource):
        ours, theirs = socket.socketpair()
        lifeline_read, self._lifeline = os.pipe()
        self._log = _log_file()
        given = (theirs.fileno(), lifeline_read)
        program = str(Path(__file__).with_name("process.py"))
        command = [source.python or sys.executable, "-c", _BOOT, program, *map(str, given)]
        try:
            self._process = subprocess.Popen(
                command, pass_fds=given, env=_variables(source), stdin=subprocess.DEVNULL, stdout=self._log,
                stderr=self._log, start_new_session=True,
            )  # fmt: skip
        except OSError as error:
            ours.close()
            for descriptor in (self._lifeline, self._log):
                os.close(descriptor)
            raise PolicyError(
                f"python: expected an interpreter, got {command[0]!r} ({error.strerror}); name another"
            ) from error
        finally:
            theirs.close()
            os.close(lifeline_read)
        self.pid = self._process.pid
        ours.setblocking(False)
        self._socket = ours
        self._poll = select.poll()

    def send(self, parts: list[memoryview], deadline: float) -> None:
        """Hand over a message that `encode` made; `Late` if it is not read in time."""
        for part in parts:
            while len(part):
                try:
                    part = part[self._socket.send(part) :]
                except BlockingIOError:
                    self._wait(select.POLLOUT, deadline)
                except OSError:
                    raise Ended from None

    def receive(self, deadline: float) -> tuple[dict[str, Any], Arrays]:
        """The next whole message; `Late` if it does not come in time."""

        def fill(buffer: memoryview) -> None:
            while len(buffer):
                try:
                    got = self._socket.recv_into(buffer)
                except BlockingIOError:
                    self._wait(select.POLLIN, deadline)
                    continue
                except OSError:
                    raise Ended from None
                if not got:
                    raise Ended
                buffer = buffer[got:]

        return receive(fill)

    def _wait(self, event: int, deadline: float) -> None:
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            raise Late
        self._poll.register(self._socket, event)
        self._poll.poll(max(1.0, left_s * 1000))

    def exit_code(self) -> int:
        """How it ended, once its socket is closed; it is killed if it goes on all the same."""
        deadline = time.monotonic() + EXIT_WAIT_S
        while not self._has_ended() and time.monotonic() < deadline:
            time.sleep(0.005)
        return self.kill()

    def _has_ended(self) -> bool:
        """Whether it has; it stays a zombie, so that nobody else gets the number of its group."""
        try:
            return os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
        except ChildProcessError:  # someone else has waited for it
            return True

    def stack(self) -> str:
        """Where a process that does not answer is, by itself; the end of its log if it does not say."""
        place = os.fstat(self._log).st_size
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGUSR1)
        deadline, before = time.monotonic() + STACK_WAIT_S, ""
        while time.monotonic() < deadline and not self._has_ended():
            time.sleep(0.05)
            text = os.pread(self._log, 32 * 2**10, place).decode(errors="replace")
            if "Current thread 0x" in text and text == before:  # it is written line by line
                return text
            before = text
        return before or self.log_tail()

    def log_tail(self) -> str:
        """The end of what it wrote to stdout and stderr."""
        size = os.fstat(self._log).st_size
        return os.pread(self._log, LOG_TAIL_BYTES, max(0, size - LOG_TAIL_BYTES)).decode(errors="replace")

    def trim_log(self) -> None:
        """Keep only the end of a log that has grown beyond its limit."""
        if os.fstat(self._log).st_size > LOG_BYTES:
            tail = self.log_tail().encode()
            os.ftruncate(self._log, 0)  # the child appends, so that it goes on from here
            os.write(self._log, tail)

    def kill(self) -> int:
        """Kill the process and all of its group; its exit code."""
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)
        return self._process.wait()

    def close(self) -> None:
        """Kill what is left and let go of everything."""
        if self._lifeline >= 0:
            self.kill()
            self._socket.close()
            for descriptor in (self._lifeline, self._log):
                os.close(descriptor)
            self._lifeline = self._log = -1


def _log_file() -> int:
    with tempfile.TemporaryFile() as file:
        descriptor = os.dup(file.fileno())
    fcntl.fcntl(descriptor, fcntl.F_SETFL, fcntl.fcntl(descriptor, fcntl.F_GETFL) | os.O_APPEND)
    return descriptor


def _variables(source: PolicySource) -> dict[str, str]:
    variables = dict(os.environ)
    if source.python is not None:
        for name in _OF_THIS_PYTHON:
            variables.pop(name, None)
    variables["PYTHONUNBUFFERED"] = "1"  # what a killed process printed is in its log
    variables.update(source.env)
    return variables
