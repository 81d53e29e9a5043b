"""Session: one stream of chunks to a server, and its answers; from the hello to the first error.

The server says how far it got, the session goes on from there, and a chunk leaves the spool when it is answered. The
loops are in the table of outbox.py.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

from understudy.core import RefusedError, UnderstudyError, WireError
from understudy.service.client.connection import Connection
from understudy.service.client.spool import Stretch
from understudy.service.wire.protocol import VERSION, WRITE, from_json, to_json

WINDOW_CHUNKS = 4  # sent and not yet answered
ANSWER_TIMEOUT_S = 30.0  # and the time that the unanswered bytes take on the slowest link
SLOWEST_LINK_BYTES_PER_S = 20_000


class Sends(Protocol):
    """What a session needs of the outbox that it sends for."""

    @property
    def ending(self) -> bool:
        """Whether it is time to stop."""
        ...

    def found(self, stretch: Stretch, connection: Connection, last_seq: int, stores: Sequence[str]) -> bool:
        """The server has said what it has: of this stretch, and which store, with those that it takes the place of.
        False if what is left goes another way from now on; UnavailableError if it is not the store to send to."""
        ...

    def answered(self, stretch: Stretch, seq: int, commit: int) -> None:
        """The server has a chunk on disk."""

    def is_finished(self, stretch: Stretch) -> bool:
        """Whether nothing of a stretch is left and nothing will come."""
        ...

    def wait_until(self, ready: Callable[[], bool], timeout_s: float | None) -> bool:
        """Wait until something has come about; False at the end, or after the time-out."""
        ...

    def wake(self) -> None:
        """Let whoever waits look again."""

    def fail(self, error: UnderstudyError) -> None:
        """Stop for good."""


class Session:
    """One stream to the server: from the hello to the first error, or to the end of a stretch."""

    def __init__(self, outbox: Sends, stretch: Stretch, connection: Connection):
        self._outbox = outbox
        self._stretch = stretch
        self._connection = connection
        self._next: int | None = None  # to be sent; None until the server has said where it stopped
        self._unanswered: deque[int] = deque()  # the bytes of each chunk
        self._answer = 0  # the chunk that the next answer is for
        self._over = False
        self._max_bytes = 0
        self._stream = connection.exchange(WRITE, self._messages())

    def run(self) -> None:
        try:
            for message in self._stream:
                self._take(from_json(message))
                if self._outbox.ending or self._over:
                    break
        finally:
            self._over = True
            self._outbox.wake()
            self._stream.cancel()

    @property
    def greeted(self) -> bool:
        """Whether the server took this writer."""
        return self._next is not None

    def _take(self, answer: dict[str, Any]) -> None:
        stretch = self._stretch
        if self._next is None:
            last_seq, self._max_bytes = _numbers(answer, "last_seq", "max_message_bytes")
            if not self._outbox.found(stretch, self._connection, stretch.route.base + last_seq, _stores(answer)):
                self._over = True
                return
            self._answer = self._next = max(stretch.route.base + last_seq + 1, stretch.first or 0)
            self._outbox.wake()
        else:
            seq, commit = _numbers(answer, "seq", "commit")
            seq += stretch.route.base
            if seq != self._answer or not self._unanswered:  # what it did not get, it cannot have on its disk
                raise WireError(f"expected the answer to chunk {self._answer}, got one to {seq}; greeting it again")
            self._answer += 1
            self._unanswered.popleft()
            self._outbox.answered(stretch, seq, commit)

    def _messages(self) -> Iterator[bytes]:
        """What the stream sends; runs in a thread of gRPC, to which errors must not get."""
        stretch = self._stretch
        # Chunks are numbered anew for each route, so each is an incarnation of its own: a server to which a stretch
        # comes back must not take new chunks for those it has.
        incarnation = f"{stretch.incarnation}.{stretch.route.base}" if stretch.route.base else stretch.incarnation
        yield to_json(
            {
                "version": VERSION,
                "writer": stretch.route.writer,
                "incarnation": incarnation,
                "spec": stretch.spec.to_json(),
            }
        )
        try:
            while self._wait():
                assert self._next is not None
                message = stretch.read(self._next)
                if len(message) > self._max_bytes:
                    raise RefusedError(
                        f"chunk {self._next} has {len(message)} bytes, and the server takes {self._max_bytes}; lower "
                        f"commit_steps, or raise --max-message-mb of `understudy serve`"
                    )
                self._next += 1
                self._unanswered.append(len(message))
                yield message
        except UnderstudyError as error:
            self._outbox.fail(error)

    def _wait(self) -> bool:
        """Wait for a chunk and for room in the window; gives the stream up when the server no longer answers."""
        while True:
            at = len(self._unanswered)
            timeout_s = None
            if at or self._next is None:
                timeout_s = ANSWER_TIMEOUT_S + sum(self._unanswered) / SLOWEST_LINK_BYTES_PER_S
            ready = self._outbox.wait_until(lambda: self._finished or self._may_send, timeout_s)
            if not ready and not self._outbox.ending and len(self._unanswered) == at:
                self._stream.cancel()
            elif ready and not self._finished:
                return True
            if self._finished or self._outbox.ending or not ready:
                return False

    @property
    def _finished(self) -> bool:
        return self._over or self._outbox.is_finished(self._stretch) or self._at_gap

    @property
    def _at_gap(self) -> bool:
        """Whether the next chunk is missing and there are later ones; a new hello then says how to go on."""
        first = self._stretch.first
        return self._next is not None and not self._unanswered and first is not None and first > self._next

    @property
    def _may_send(self) -> bool:
        return self._next is not None and len(self._unanswered) < WINDOW_CHUNKS and self._next in self._stretch


def _numbers(answer: dict[str, Any], *names: str) -> list[int]:
    """Fields of an answer; a WireError if one is not there, or is no number."""
    found = [answer.get(name) for name in names]
    if not all(type(number) is int for number in found):
        raise WireError(f"expected an answer with {' and '.join(names)}, got {str(answer)[:100]}; greeting it again")
    return [int(number) for number in found if number is not None]


def _stores(answer: dict[str, Any]) -> list[str]:
    """Which store a server has, and those that it takes the place of."""
    found = answer.get("stores")
    if not isinstance(found, list) or not found or not all(isinstance(one, str) for one in found):
        raise WireError(f"expected an answer with stores, got {str(answer)[:100]}; greeting it again")
    return found
