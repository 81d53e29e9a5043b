"""Subscription: the newest published weights, kept up to date on an actor.

| loop | takes from | blocks on | woken by |
|---|---|---|---|
| the subscription's thread | the server's stream | that stream; a pause after an error | the server; `close` |
| `Subscription.wait` | - | a newer version | the thread above |
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence

from understudy.core import StoreClosedError, UnavailableError, UnderstudyError, WireError
from understudy.core.closeable import Closeable
from understudy.processes import forks
from understudy.service.client.connection import (
    MAX_BACKOFF_S,
    MIN_BACKOFF_S,
    Connection,
    ResponseStream,
)
from understudy.service.wire import grpc_forks
from understudy.service.wire.parameters import (
    NO_PARAMETERS,
    Parameters,
    UnusableVersionError,
    receive_parameters,
)
from understudy.service.wire.protocol import SUBSCRIBE

logger = logging.getLogger(__name__)


class Subscription(Closeable):
    """The newest parameters, kept up to date by a thread. Use as a context manager, or call `close`.

    It reads from one server, and from the next of `choose_servers()` when that one cannot be reached. It never goes
    back to an older version, even if the next server has only that. Whatever a server answers, the thread goes on: what
    it cannot use is logged, counted and named by `problem`, and the last good version stays.
    """

    def __init__(self, choose_servers: Callable[[], Sequence[Connection]], *, max_bytes: int):
        self._choose_servers = choose_servers
        self._max_bytes = max_bytes
        self._changed = threading.Condition()
        self._latest: Parameters | None = None
        self._received: dict[str, tuple[str, int]] = {}  # by server: its store, and the last version it sent
        self._turn = 0  # counts the streams, so that the servers take turns
        self._problem: UnderstudyError | None = None
        self.num_unusable = 0  # answers that were no version that can be used
        self._closed = False
        self._stream: ResponseStream | None = None
        self._thread = threading.Thread(target=self._run, name="parameters", daemon=True)
        self._thread.start()
        forks.register(self)

    def after_fork_in_child(self) -> None:
        self._changed = threading.Condition()
        forks.leave_to_parent(self._stream)
        self._stream = None
        if not self._closed:
            self._problem, self._fatal = forks.forked_error("the subscription", grpc_forks.ADVICE), True

    @property
    def latest(self) -> Parameters | None:
        """The newest version that has arrived whole; None before the first."""
        return self._latest

    @property
    def problem(self) -> str | None:
        """Why no newer version can be received now; None after one was."""
        return None if self._problem is None else str(self._problem)

    def wait(self, newer_than: Parameters | None = None, timeout_s: float | None = None) -> Parameters | None:
        """Wait for another version than `newer_than` and return the newest; None after the timeout.

        Raises if the servers refuse this client, because of its token for example.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._refused or self._closed or self._is_newer(newer_than), timeout_s)
            if self._refused and self._problem is not None:
                raise self._problem.with_traceback(None)
            return self._latest if self._is_newer(newer_than) else None

    @property
    def _refused(self) -> bool:
        return self._problem is not None and not isinstance(self._problem, UnavailableError | WireError)

    def _is_newer(self, than: Parameters | None) -> bool:
        return self._latest is not None and self._latest is not than

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            if self._stream is not None:
                self._stream.cancel()
        self._thread.join()

    def _run(self) -> None:
        pause_s = MIN_BACKOFF_S
        while not self._closed:
            before = self._latest
            try:
                self._read_stream()
            except StopIteration:  # the server ended the stream; it is stopping
                pass
            except StoreClosedError as error:  # this client was closed, and its subscription was not
                self._report(error)
                return
            except UnderstudyError as error:
                self._report(error)
            except Exception as error:  # the outermost loop of a thread that an actor relies on
                logger.exception("parameters: an answer could not be read")
                self._report(WireError(f"an answer could not be read ({type(error).__name__}: {str(error)[:200]})"))
            self._turn += 1
            pause_s = MIN_BACKOFF_S if self._latest is not before else min(pause_s * 2, MAX_BACKOFF_S)
            with self._changed:
                self._changed.wait_for(lambda: self._closed, pause_s)

    def _report(self, problem: UnderstudyError) -> None:
        with self._changed:
            if self._closed:  # `close` has cancelled the stream, which is no problem to report
                return
            if str(problem) != str(self._problem):
                logger.warning("parameters: %s", problem)
            self.num_unusable += isinstance(problem, WireError)
            self._problem = problem
            self._changed.notify_all()

    def _read_stream(self) -> None:
        """Read versions from one server until its stream breaks."""
        servers = self._choose_servers()
        server = servers[self._turn % len(servers)]
        store_id, have = self._received.get(server.name, ("", NO_PARAMETERS))
        stream = server.listen(SUBSCRIBE, {"have": have, "store": store_id})
        with self._changed:
            self._stream = stream
            if self._closed:
                stream.cancel()
        while True:
            try:
                parameters, store_id = receive_parameters(stream, max_bytes=self._max_bytes)
            except UnusableVersionError as error:
                self._report(error)
                self._received[server.name] = error.store_id, error.version  # so that it is not sent again
                continue
            with self._changed:
                store_before, _ = self._received.get(server.name, (store_id, NO_PARAMETERS))
                self._received[server.name] = store_id, parameters.version
                # An older version counts only if the server has another store than before, which numbers anew.
                if self._latest is None or parameters.version > self._latest.version or store_before != store_id:
                    self._latest = parameters
                self._problem = None
                self._changed.notify_all()
