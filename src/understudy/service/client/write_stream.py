"""WriteStream: one stream of chunks to a server, with its acknowledgements; from the hello to the first error.

The server replies to the hello with the last chunk that it has. The stream continues from there, and a chunk leaves the
spool when it is acknowledged. The loops are in the table of outbox.py.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

from understudy.core import DamageError, RefusedError, UnderstudyError, WireError
from understudy.service.client.connection import Connection
from understudy.service.client.spool import SpoolLog
from understudy.service.wire.message import from_json, to_json
from understudy.service.wire.protocol import VERSION, WRITE, check_version

WINDOW_CHUNKS = 4  # sent and not yet acknowledged
ANSWER_TIMEOUT_S = 30.0  # plus the time that the unacknowledged bytes take on the slowest link
SLOWEST_LINK_BYTES_PER_S = 20_000


class WriteStreamOwner(Protocol):
    """What a stream needs of the outbox that it sends for."""

    @property
    def should_stop(self) -> bool:
        """Whether the outbox stops or has failed."""
        ...

    def on_hello(
        self, log: SpoolLog, connection: Connection, last_seq: int, checks: Sequence[int], stores: Sequence[str]
    ) -> bool:
        """The server replied: the last chunk of this log that it has and the checksums of the last ones, its store, and
        the stores that it replaces.

        False if the rest of the log was rerouted, so that another stream must begin. Raises UnavailableError if it is
        not the store that the log goes to, and CopiedError if the chunks are not those of this log.
        """
        ...

    def on_acknowledged(self, log: SpoolLog, seq: int, commit: int) -> None:
        """The server has a chunk, and all before it, on disk."""

    def is_finished(self, log: SpoolLog) -> bool:
        """Whether the log is empty and nothing will be added to it."""
        ...

    def wait_until(self, ready: Callable[[], bool], timeout_s: float | None) -> bool:
        """Wait until `ready()`; False if the outbox stops first, or after the timeout."""
        ...

    def notify(self) -> None:
        """Let everyone in `wait_until` check again."""

    def fail(self, error: UnderstudyError) -> None:
        """Stop for good."""


class WriteStream:
    """One stream to the server: from the hello to the first error, or to the end of a log."""

    def __init__(self, outbox: WriteStreamOwner, log: SpoolLog, connection: Connection):
        self._outbox = outbox
        self._log = log
        self._connection = connection
        self._next: int | None = None  # the chunk to send next; None until the server has replied to the hello
        self._window = _Window()
        self._expected = 0  # the chunk that the server acknowledges next
        self._over = False
        self._max_bytes = 0
        self._responses = connection.exchange(WRITE, self._messages())

    def run(self) -> None:
        """Read the server's answers until the log ends or the stream breaks."""
        try:
            for message in self._responses:
                self._take(from_json(message))
                if self._outbox.should_stop or self._over:
                    break
        finally:
            self._over = True
            self._outbox.notify()
            self._responses.cancel()

    @property
    def connected(self) -> bool:
        """Whether the server has replied to the hello and accepted this writer."""
        return self._next is not None

    def _take(self, answer: dict[str, Any]) -> None:
        log = self._log
        if self._next is None:
            check_version(answer, other="server")
            last_seq, self._max_bytes = _numbers(answer, "last_seq", "max_message_bytes")
            last_seq += log.route.base
            if not self._outbox.on_hello(log, self._connection, last_seq, _checks(answer), _stores(answer)):
                self._over = True
                return
            self._expected = self._next = max(last_seq + 1, log.first or 0)
            self._outbox.notify()
        else:
            seq, commit = _numbers(answer, "seq", "commit")
            seq += log.route.base
            if seq != self._expected or not len(self._window):  # it cannot have a chunk that was not sent
                raise WireError(f"expected the answer to chunk {self._expected}, got one to {seq}; connecting again")
            self._expected += 1
            self._window.acknowledged()
            self._outbox.on_acknowledged(log, seq, commit)

    def _messages(self) -> Iterator[bytes]:
        """The hello and the chunks. This runs in a thread of gRPC, which must not see an error."""
        log = self._log
        # Chunks are renumbered for each route, so each route is an incarnation of its own: a server to which a log
        # returns must not take new chunks for those that it has.
        incarnation = f"{log.incarnation}.{log.route.base}" if log.route.base else log.incarnation
        yield to_json(
            {
                "version": VERSION,
                "writer": log.route.writer,
                "incarnation": incarnation,
                "spec": log.spec.to_json(),
            }
        )
        try:
            while self._wait():
                assert self._next is not None
                try:
                    message = log.read(self._next)
                except DamageError as error:
                    log.set_aside(self._next, error)
                    self._outbox.notify()
                    continue
                if len(message) > self._max_bytes:
                    raise RefusedError(
                        f"chunk {self._next} has {len(message)} bytes, and the server takes {self._max_bytes}; lower "
                        f"commit_steps, or raise --max-message-mb of `understudy serve`"
                    )
                self._next += 1
                self._window.sent(len(message))
                yield message
        except UnderstudyError as error:
            self._outbox.fail(error)

    def _wait(self) -> bool:
        """Wait for a chunk and a free slot in the window; cancels the stream when the server no longer answers."""
        while True:
            num_pending = len(self._window)
            timeout_s = None
            waits_for_answer = num_pending or self._next is None
            if waits_for_answer:
                timeout_s = ANSWER_TIMEOUT_S + self._window.num_bytes / SLOWEST_LINK_BYTES_PER_S
            ready = self._outbox.wait_until(lambda: self._finished or self._may_send, timeout_s)
            if self._outbox.should_stop:
                if waits_for_answer:  # which must not remove what is another writer's once this one is closed
                    self._responses.cancel()
            elif not ready and len(self._window) == num_pending:
                self._responses.cancel()
            elif ready and not self._finished:
                return True
            if self._finished or self._outbox.should_stop or not ready:
                return False

    @property
    def _finished(self) -> bool:
        return self._over or self._outbox.is_finished(self._log) or self._at_gap

    @property
    def _at_gap(self) -> bool:
        """Whether the next chunk is missing and there are later ones; the next hello then reroutes them."""
        first = self._log.first
        return self._next is not None and not len(self._window) and first is not None and first > self._next

    @property
    def _may_send(self) -> bool:
        return self._next is not None and len(self._window) < WINDOW_CHUNKS and self._next in self._log


class _Window:
    """The sizes of the chunks that were sent and not yet acknowledged. One thread adds, another removes."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sizes: deque[int] = deque()
        self._num_bytes = 0

    def __len__(self) -> int:
        return len(self._sizes)

    @property
    def num_bytes(self) -> int:
        return self._num_bytes

    def sent(self, num_bytes: int) -> None:
        with self._lock:
            self._sizes.append(num_bytes)
            self._num_bytes += num_bytes

    def acknowledged(self) -> None:
        """The oldest chunk was acknowledged."""
        with self._lock:
            self._num_bytes -= self._sizes.popleft()


def _numbers(answer: dict[str, Any], *names: str) -> list[int]:
    """Fields of an answer; a WireError if one is missing or not a whole number."""
    found = [answer.get(name) for name in names]
    if not all(type(number) is int for number in found):
        raise WireError(f"expected an answer with {' and '.join(names)}, got {str(answer)[:100]}; connecting again")
    return [int(number) for number in found if number is not None]


def _checks(answer: dict[str, Any]) -> list[int]:
    """The checksums of the last chunks that a server has; none from a server of an older version."""
    found = answer.get("checks", [])
    if not isinstance(found, list) or not all(type(check) is int for check in found):
        raise WireError(f"expected an answer with checks, got {str(answer)[:100]}; connecting again")
    return found


def _stores(answer: dict[str, Any]) -> list[str]:
    """The id of a server's store, then those of the stores that it replaces."""
    found = answer.get("stores")
    if not isinstance(found, list) or not found or not all(isinstance(one, str) for one in found):
        raise WireError(f"expected an answer with stores, got {str(answer)[:100]}; connecting again")
    return found
