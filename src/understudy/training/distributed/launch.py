"""Launch: starts several ranks on this machine as processes; when one fails, all end, and the error says which and why.

| thread | takes from | blocks on | woken by |
|---|---|---|---|
| main, in `launch` | the ranks' exits | a short wait | each TICK_S; Ctrl-C |
| one per rank | the rank's output | its pipe | the rank; its end |

The ranks meet at a loopback socket that listens before the first of them starts, so no other process can take the port
and nobody from outside can join. Each rank has its own process group: Ctrl-C reaches it through the launcher, once, and
it dies with the launcher. Across machines, use torchrun: `join` reads the same environment variables.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from types import FrameType
from typing import Any, BinaryIO

from understudy.core import UnderstudyError
from understudy.processes.failures import describe_exit
from understudy.processes.stop import Interrupted
from understudy.training.distributed.errors import RanksError
from understudy.training.distributed.launcher_fds import LIFELINE_FD, LISTEN_FD

TICK_S = 0.05
LAST_LINES = 20
QUIT_S = 3.0  # that ranks have to end after a second signal
INTERRUPTED = (128 + signal.SIGINT, 128 + signal.SIGTERM)  # exit codes of a command that a signal has ended
_ENTRY = "import sys; from understudy.training.distributed.launch import enter; enter(*sys.argv[1:])"


def launch(
    num_ranks: int,
    argv: Sequence[str],
    *,
    env: Mapping[str, str] | None = None,
    grace_s: float = 20.0,
    stop_s: float | None = None,
) -> int:
    """Run `python *argv` as ranks 0 to num_ranks - 1 and return the exit code of rank 0.

    If one fails, the others get SIGTERM, `grace_s` later SIGKILL, and RanksError names the rank and its last lines.
    Rank 0 prints as usual; the output of the others goes to standard error with their number. Ctrl-C and SIGTERM are
    passed on to all ranks, which may save and clean up within `stop_s` (by default `grace_s`). A second signal is
    passed on too, and ranks that have not ended QUIT_S later are killed.
    """
    if num_ranks < 1:
        raise RanksError(f"num_ranks: expected at least 1, got {num_ranks}")
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.socket())
        listener.bind(("127.0.0.1", 0))
        listener.listen(num_ranks)
        children = [_Child(rank, num_ranks, argv, listener, env or {}, stack) for rank in range(num_ranks)]
        listener.close()  # rank 0 has inherited it
        return _Watch(children, grace_s, grace_s if stop_s is None else stop_s).wait()


def launch_function(num_ranks: int, function: str, *, grace_s: float = 20.0, **options: Any) -> int:
    """Call `module:function` with these options, which must be JSON, in each rank; the function calls `join`."""
    return launch(num_ranks, ["-c", _ENTRY, function, json.dumps(options)], grace_s=grace_s)


def enter(function: str, options: str) -> None:
    """The entry point of a rank that `launch_function` started."""
    module, _, name = function.partition(":")
    try:
        getattr(importlib.import_module(module), name)(**json.loads(options))
    except UnderstudyError as error:
        sys.exit(str(error))


class _Child:
    """One rank and its last lines of output."""

    def __init__(
        self,
        rank: int,
        size: int,
        argv: Sequence[str],
        listener: socket.socket,
        env: Mapping[str, str],
        stack: contextlib.ExitStack,
    ):
        self.rank = rank
        self.lines: deque[str] = deque(maxlen=LAST_LINES)
        lifeline, ours = os.pipe()  # one per rank: the kernel signals one process group per pipe
        stack.callback(os.close, ours)
        fds = (lifeline, listener.fileno()) if rank == 0 else (lifeline,)
        variables = {
            **_defaults(size),
            **os.environ,
            **env,
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(size),
            "LOCAL_WORLD_SIZE": str(size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(listener.getsockname()[1]),
            LIFELINE_FD: str(lifeline),
        }
        if rank == 0:
            variables[LISTEN_FD] = str(listener.fileno())
        try:
            self.process = subprocess.Popen(
                [sys.executable, *argv],
                env=variables,
                pass_fds=fds,
                start_new_session=True,
                stdin=subprocess.DEVNULL,
                stdout=None if rank == 0 else subprocess.PIPE,
                stderr=subprocess.PIPE if rank == 0 else subprocess.STDOUT,
            )
        finally:
            os.close(lifeline)
        stack.callback(self.end)
        printed = self.process.stderr if rank == 0 else self.process.stdout
        assert printed is not None
        self._reader = threading.Thread(target=self._read, args=(printed,), name=f"rank-{rank}", daemon=True)
        self._reader.start()

    def signal(self, number: int) -> None:
        """Signal the rank and all processes that it has started."""
        if self.process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, number)

    def end(self) -> None:
        """Kill what is left of the rank and wait for its end."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self._reader.join()

    def _read(self, printed: BinaryIO) -> None:
        with printed:
            for raw in printed:
                text = raw.decode(errors="replace").rstrip("\n")
                self.lines.append(text)
                line = text if self.rank == 0 else f"[rank {self.rank}] {text}"
                with contextlib.suppress(ValueError, OSError):  # our own standard error may be closed
                    sys.stderr.write(f"{line}\n")  # at once: `print` lets the line of another rank in before its end
                    sys.stderr.flush()


class _Watch:
    """Waits for the ranks, and ends them all when one fails or a signal arrives."""

    def __init__(self, children: Sequence[_Child], grace_s: float, stop_s: float):
        self._children = children
        self._grace_s, self._stop_s = grace_s, stop_s
        self._num_signals = 0  # SIGINT and SIGTERM that the launcher received
        self._last_signal, self._last_signal_at = 0, 0.0

    def wait(self) -> int:
        failed: _Child | None = None
        deadline: float | None = None
        with self._handling_signals():
            while any(child.process.poll() is None for child in self._children):
                if failed is None and not self._num_signals:
                    failed = self._first_failed()
                    if failed is not None:
                        self._signal_all(signal.SIGTERM)
                if deadline is None and (failed is not None or self._num_signals):
                    deadline = time.monotonic() + (self._grace_s if failed is not None else self._stop_s)
                if deadline is not None and self._num_signals > 1:
                    deadline = min(deadline, self._last_signal_at + QUIT_S)
                if deadline is not None and time.monotonic() > deadline:
                    self._signal_all(signal.SIGKILL)
                time.sleep(TICK_S)
        failed = failed or self._first_failed()
        if failed is None:
            return 0
        if self._num_signals and self._children[0].process.returncode in INTERRUPTED:
            return self._children[0].process.returncode  # it has said what was saved
        if self._num_signals:
            raise KeyboardInterrupt if self._last_signal == signal.SIGINT else Interrupted(self._last_signal)
        if len(self._children) == 1 or (failed.rank == 0 and failed.process.returncode > 0):
            return failed.process.returncode  # its output was shown
        failed.end()
        how, lines = describe_exit(failed.process.returncode), "\n  ".join(failed.lines) or "(it printed nothing)"
        raise RanksError(
            f"rank {failed.rank} of {len(self._children)} {how}, and the others were ended; its last lines:\n  {lines}"
        )

    def _first_failed(self) -> _Child | None:
        """Of the ranks that failed, one that was killed by a signal, or else the lowest."""
        failed = [child for child in self._children if child.process.poll() not in (None, 0)]
        return min(failed, key=lambda child: (child.process.returncode > 0, child.rank), default=None)

    def _signal_all(self, number: int) -> None:
        for child in self._children:
            child.signal(number)

    @contextlib.contextmanager
    def _handling_signals(self) -> Iterator[None]:
        if threading.current_thread() is not threading.main_thread():
            yield  # only the main thread can handle signals
            return
        before = {number: signal.signal(number, self._on_signal) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _on_signal(self, number: int, _: FrameType | None) -> None:
        self._num_signals += 1
        self._last_signal, self._last_signal_at = number, time.monotonic()
        self._signal_all(number)


def _defaults(size: int) -> dict[str, str]:
    """Defaults of a rank's environment variables: its share of the cores, and loopback for gloo."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    loopback = "lo" if sys.platform == "linux" else "lo0"
    return {
        "OMP_NUM_THREADS": str(max(1, cores // size)),
        "GLOO_SOCKET_IFNAME": loopback,
        "TORCH_CPP_LOG_LEVEL": "FATAL",  # hides C++ stacks; RanksError says the same in a sentence
    }
