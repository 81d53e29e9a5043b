"""Child: one life of a worker: its process, the channel to it, the memory they share, and its log.

Nothing here blocks for longer than `EXIT_WAIT_S`, and nothing is left behind: the child leads a process group of its
own, which is killed as a whole, and the log and the memory are files without names.
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
from pathlib import Path
from typing import Any

from understudy.core import StepSpec
from understudy.envs.source import WorldSource
from understudy.envs.workers.arena import Arena, Layout, create_memory, size_memory
from understudy.envs.workers.channel import Channel, ChannelClosed
from understudy.envs.world import WorldError

EXIT_WAIT_S = 2.0  # for a process that closed its channel, or was sent SIGKILL
LOG_TAIL_BYTES = 4096
_STACK_BYTES = 32 * 2**10
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_PACKAGE = Path(__file__).resolve().parents[2]

# Imports this very package and nothing else from where it lies: its folder may be a site-packages with a numpy that
# another interpreter cannot load, so it must not get onto the path.
_BOOT = """
import importlib.util as u, sys
s = u.spec_from_file_location("understudy", sys.argv[1] + "/__init__.py", submodule_search_locations=[sys.argv[1]])
sys.modules["understudy"] = m = u.module_from_spec(s)
s.loader.exec_module(m)
from understudy.envs.workers.process import main
main()
"""

# A simulator per core is faster than simulators that each want all cores. Variables that are set win.
_ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
_OF_THIS_PYTHON = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "__PYVENV_LAUNCHER__")


class Child:
    """A process that builds the world of `source`; it says hello on the channel when it has."""

    arena: Arena  # once `open_arena` was called

    def __init__(self, source: WorldSource, *, block_steps: int):
        ours, theirs = socket.socketpair()
        lifeline_read, self._lifeline = os.pipe()
        self._memory = create_memory()
        self._log = _log_file()
        self._statm: int | None = None
        given = (theirs.fileno(), lifeline_read, self._memory)
        command = [source.python or sys.executable, "-c", _BOOT, str(_PACKAGE), *map(str, given)]
        try:
            self._process = subprocess.Popen(
                command, pass_fds=given, env=_variables(source), stdin=subprocess.DEVNULL, stdout=self._log,
                stderr=self._log, start_new_session=True,
            )  # fmt: skip
        except OSError as error:
            ours.close()
            for descriptor in (self._lifeline, self._memory, self._log):
                os.close(descriptor)
            raise WorldError(
                f"python: expected an interpreter, got {command[0]!r} ({error.strerror}); name another"
            ) from error
        finally:
            theirs.close()
            os.close(lifeline_read)
        self.pid = self._process.pid
        self.channel = Channel(ours)
        with contextlib.suppress(ChannelClosed):  # it is dead already; whoever looks after it will see
            request = {"factory": source.factory, "options": source.options, "block_steps": block_steps}
            self.channel.send(request, timeout_s=1.0)

    def open_arena(self, spec: StepSpec, block_steps: int) -> None:
        """Lay out the shared memory, and let the child begin."""
        layout = Layout(spec, block_steps)
        size_memory(self._memory, layout.size_bytes)
        self.arena = Arena(layout, self._memory)
        os.close(self._memory)
        self._memory = -1
        self.channel.send({"do": "go"}, timeout_s=1.0)

    def exited(self) -> bool:
        """Whether the process has ended; it stays a zombie, so that nobody else gets the number of its group."""
        return self._process.returncode is not None or _has_ended(self.pid)

    def wait_exited(self, timeout_s: float) -> bool:
        deadline = time.monotonic() + timeout_s
        pause_s = 0.0005
        while not self.exited():
            if time.monotonic() > deadline:
                return False
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, 0.02)
        return True

    def kill(self) -> int | None:
        """Kill the process and all of its group; its exit code, or None if the system has not let go of it yet."""
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(EXIT_WAIT_S)
        return self._process.returncode

    def close(self) -> None:
        """Kill what is left and let go of everything; the log is gone."""
        self.kill()
        self.channel.close()
        for descriptor in (self._lifeline, self._memory, self._log, self._statm):
            if descriptor is not None and descriptor >= 0:
                os.close(descriptor)
        self._lifeline = self._memory = self._log = -1
        self._statm = None

    # --- what it says and takes ---

    def rss_bytes(self) -> int:
        """Memory of the process; not of those that it started. 0 if it has ended."""
        try:
            if self._statm is None:
                self._statm = os.open(f"/proc/{self.pid}/statm", os.O_RDONLY | os.O_CLOEXEC)
            return int(os.pread(self._statm, 200, 0).split()[1]) * _PAGE_BYTES
        except (OSError, IndexError):
            return 0

    def log_tail(self, size_bytes: int = LOG_TAIL_BYTES) -> str:
        """The end of what it wrote to stdout and stderr."""
        size = os.fstat(self._log).st_size
        return os.pread(self._log, size_bytes, max(0, size - size_bytes)).decode(errors="replace")

    def trim_log(self, max_bytes: int) -> None:
        """Keep only the end of a log that has grown beyond its limit."""
        if os.fstat(self._log).st_size > max_bytes:
            tail = self.log_tail(max_bytes // 4).encode()
            os.ftruncate(self._log, 0)  # the child appends, so that it goes on from here
            os.write(self._log, tail)

    def ask_for_stack(self) -> int:
        """Have the child write its stacks to the log; gives back where in it they will begin."""
        place = os.fstat(self._log).st_size
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGUSR1)
        return place

    def stack(self, place: int) -> str:
        """What was written since `ask_for_stack`, as far as it is stacks; empty if nothing is there yet."""
        text = os.pread(self._log, _STACK_BYTES, place).decode(errors="replace")
        start = text.find("Current thread 0x")
        threads = text.find("Thread 0x")
        begin = min((x for x in (start, threads) if x >= 0), default=-1)
        return text[begin:] if start >= 0 else ""


def _log_file() -> int:
    with tempfile.TemporaryFile() as file:
        descriptor = os.dup(file.fileno())
    fcntl.fcntl(descriptor, fcntl.F_SETFL, fcntl.fcntl(descriptor, fcntl.F_GETFL) | os.O_APPEND)
    return descriptor


def _has_ended(pid: int) -> bool:
    try:
        return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    except ChildProcessError:  # someone else has waited for it
        return True


def _variables(source: WorldSource) -> dict[str, str]:
    variables: dict[str, Any] = {**_ONE_THREAD, **os.environ}
    if source.python is not None:
        for name in _OF_THIS_PYTHON:
            variables.pop(name, None)
    variables["PYTHONUNBUFFERED"] = "1"  # what a killed process printed is in its log
    variables.update(source.env)
    return variables
