"""Outbox: what stands between a control loop and a server that may be slow, dead or far away.

| loop | takes from | blocks on | woken by |
|---|---|---|---|
| `commit`, in the control loop | - | a full queue, if told to block | the recording thread |
| recording thread | the queue of chunks | the queue, a full spool, the disk | `commit`, the sending thread |
| sending thread | the spool | the server's answers; a pause after an error | the server; the recording thread |
| gRPC's own thread (session.py) | the spool | the window of unanswered chunks | the sending thread |

A chunk is *recorded* when the spool has it and *delivered* when the server has it on disk. What was recorded is never
dropped. If the queue is full, what is not yet recorded waits or is dropped, as `Overflow` says, and is counted.
No clock is read: time-outs are measured on the monotonic one.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from understudy.core import (
    BacklogError,
    FencedError,
    StoreClosedError,
    StoreFailedError,
    UnavailableError,
    UnderstudyError,
    WireError,
)
from understudy.replay.format.chunk import Chunk
from understudy.service.client.connection import FIRST_PAUSE_S, LONGEST_PAUSE_S, Connection
from understudy.service.client.splice import Splicer
from understudy.service.client.spool import Spool, Stretch
from understudy.service.client.write_stream import Session
from understudy.service.wire.chunks import encode_chunk

logger = logging.getLogger(__name__)

Overflow: TypeAlias = Literal["block", "drop_newest", "drop_oldest"]


@dataclass(frozen=True, kw_only=True)
class OutboxConfig:
    """What happens to steps on their way."""

    queue_steps: int = 1000  # in memory, not yet recorded
    overflow: Overflow = "block"
    block_s: float = 1.0  # how long `append` waits for room, with overflow="block"
    spool_bytes: int = 10 * 2**30  # recorded and not yet delivered; beyond this the queue fills
    move_after_s: float | None = None  # to another shard, when this one has been away for so long; None: never
    any_store: bool = False  # go on with whatever store answers at its address, not only with that of the beginning

    def __post_init__(self) -> None:
        if self.queue_steps < 1 or self.block_s < 0 or self.spool_bytes < 1:
            raise BacklogError(
                f"outbox: expected queue_steps and spool_bytes from 1 and block_s from 0, got {self.queue_steps}, "
                f"{self.spool_bytes} and {self.block_s}"
            )
        if self.overflow not in ("block", "drop_newest", "drop_oldest"):
            raise BacklogError(f"overflow: expected block, drop_newest or drop_oldest, got {self.overflow!r}")


@dataclass(frozen=True, kw_only=True)
class Delivery:
    """Where the rows of a writer are. They are counted from the beginning of this process."""

    queued: int  # in memory
    recorded: int  # in the spool now, those of earlier processes included
    spool_bytes: int  # that these take
    delivered: int  # acknowledged by the server
    dropped: int  # by the overflow policy
    refused: int  # times that `append` waited in vain
    connected: bool
    address: str
    last_commit: int  # of the server's store, as far as it has answered
    problem: str | None  # why it is not connected


class Outbox:
    """Takes a writer's chunks. `choose` gives the connection to a shard; see remote.py."""

    keeps_columns = True

    def __init__(
        self,
        name: str,
        spool: Spool,
        stretch: Stretch,
        choose: Callable[[Stretch, bool], Connection],
        config: OutboxConfig,
    ):
        self._name = name
        self._spool = spool
        self._stretch = stretch  # of this process
        self._choose = choose
        self._config = config
        self._changed = threading.Condition()  # guards all below
        self._queue: deque[Chunk] = deque()
        self._queued_rows = 0
        self._recording: Chunk | None = None  # taken from the queue and not yet in the spool
        self._answering = False  # an answer is taken in: the spool knows it, and the counters do not yet
        self._delivered = self._dropped = self._refused = self._last_commit = 0
        self._next_seq = 0
        self._connected, self._address = False, ""
        self._problem: str | None = None
        self._stores: dict[str, tuple[str, str]] = {}  # where each shard was found, and which store; sending thread
        self._failure: UnderstudyError | None = None  # for good
        self._closing = False
        self._stopping = False
        self._splicer = Splicer()
        self._told_of_drops = 0
        self._threads = [
            threading.Thread(target=self._guard, args=(loop,), name=f"{loop.__name__[1:]}:{name}", daemon=True)
            for loop in (self._record, self._send)
        ]
        for thread in self._threads:
            thread.start()

    # ---- the control loop's side

    def commit(self, chunk: Chunk) -> int:
        """Put a chunk into the queue; returns the last commit that the server has told of."""
        with self._changed:
            self._check_usable()
            if not self._fits(chunk):
                self._make_room(chunk)
            if self._fits(chunk):
                self._queue.append(chunk)
                self._queued_rows += chunk.num_rows
                self._changed.notify_all()
            else:
                self._drop(chunk)
            return self._last_commit

    def _fits(self, chunk: Chunk) -> bool:
        """An empty queue takes a chunk of any size."""
        return not self._queue or self._queued_rows + chunk.num_rows <= self._config.queue_steps

    def _make_room(self, chunk: Chunk) -> None:
        if self._config.overflow == "drop_oldest":
            while not self._fits(chunk):
                oldest = self._queue.popleft()
                self._queued_rows -= oldest.num_rows
                self._drop(oldest)
        elif self._config.overflow == "block":
            room = self._changed.wait_for(lambda: self._fits(chunk) or self._failure, self._config.block_s)
            self._check_usable()
            if not room:
                self._refused += 1
                raise BacklogError(
                    f"writer {self._name!r}: {self._queued_rows} steps wait to be recorded, and {self._config.block_s} "
                    f"s brought no room ({self._problem or 'the disk is slow'}); "
                    f"{self._spool.num_rows} are in the spool. Wait for the server, or choose another overflow"
                )

    def _drop(self, chunk: Chunk) -> None:
        self._dropped += chunk.num_rows
        if self._dropped >= 2 * self._told_of_drops:  # at 1, 2, 4, ... chunks, so that a log can be read
            self._told_of_drops = self._dropped
            logger.warning(
                "writer %r: the queue is full; %d rows dropped so far (overflow=%s)",
                self._name,
                self._dropped,
                self._config.overflow,
            )

    def wait_recorded(self, timeout_s: float | None = None) -> bool:
        """Wait until all that was committed is in the spool."""
        with self._changed:
            self._changed.wait_for(lambda: self._failure or not (self._queue or self._recording), timeout_s)
            self._check_usable()
            return not (self._queue or self._recording)

    def wait_delivered(self, timeout_s: float | None = None) -> bool:
        """Wait until all that was committed is on the server's disk."""
        with self._changed:
            self._changed.wait_for(lambda: self._failure or self._all_delivered, timeout_s)
            self._check_usable()
            return self._all_delivered

    @property
    def _all_delivered(self) -> bool:
        return not (self._queue or self._recording or self._spool.num_chunks or self._answering)

    @property
    def num_unrecorded(self) -> int:
        with self._changed:  # a chunk on its way from one to the other is in one of them
            return self._queued_rows + (self._recording.num_rows if self._recording else 0)

    @property
    def durable(self) -> bool:
        """Whether what is recorded survives this process."""
        return self._spool.directory is not None

    def delivery(self) -> Delivery:
        with self._changed:
            return Delivery(
                queued=self.num_unrecorded,
                recorded=self._spool.num_rows,
                spool_bytes=self._spool.num_bytes,
                delivered=self._delivered,
                dropped=self._dropped,
                refused=self._refused,
                connected=self._connected,
                address=self._address,
                last_commit=self._last_commit,
                problem=self._problem,
            )

    def close(self, timeout_s: float | None) -> None:
        """Record all that is queued, try to deliver it until the time-out, and end the threads.

        What has failed for good is told once more: somebody may have caught it, or not appended since.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        with self._changed:
            if self._stopping:  # closed before
                return
            self._closing = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._failure or self._all_delivered, timeout_s)
            self._stopping = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join(None if deadline is None else max(deadline - time.monotonic(), 0) + 5.0)
        self._spool.close()
        if self._failure is not None:
            raise self._failure.with_traceback(None) from None

    def _check_usable(self) -> None:
        if self._failure is not None:
            raise self._failure.with_traceback(None) from None
        if self._closing:
            raise StoreClosedError(f"writer {self._name!r} is closed; begin a new one")

    def _guard(self, loop: Callable[[], None]) -> None:
        """The outermost of both threads: what ends one reaches the control loop."""
        try:
            loop()
        except UnderstudyError as error:
            self.fail(error)
        except BaseException as error:
            self.fail(StoreFailedError(f"writer {self._name!r}: {error!r}; this is a defect, please report it"))
            raise

    # ---- recording

    def _record(self) -> None:
        while (chunk := self._next_chunk()) is not None:
            parts = self._splicer.splice(chunk.parts)
            if parts:
                self._stretch.put(self._next_seq, encode_chunk(self._next_seq, chunk.columns, parts), chunk.num_rows)
                self._next_seq += 1
            if chunk.done is not None:
                chunk.done()
            with self._changed:
                self._recording = None
                self._changed.notify_all()

    def _next_chunk(self) -> Chunk | None:
        """The next chunk, when there is room in the spool for it; None at the end."""
        with self._changed:
            self._changed.wait_for(
                lambda: (
                    self._stopping
                    or self._failure
                    or (self._queue and self._spool.num_bytes < self._config.spool_bytes)
                    or (self._closing and not self._queue)
                )
            )
            if not self._queue or ((self._stopping or self._failure) and not self.durable):
                return None  # what is queued when sending has failed is still recorded, if that is of use
            chunk = self._queue.popleft()
            self._queued_rows -= chunk.num_rows
            self._recording = chunk
            self._changed.notify_all()
            return chunk

    # ---- sending

    def _send(self) -> None:
        pause_s, since = FIRST_PAUSE_S, time.monotonic()
        while (stretch := self._next_stretch()) is not None:
            before = self._delivered
            connection = self._choose(stretch, False)
            if stretch.route.shard != connection.name:
                stretch.assign(connection.name)
            session = Session(self, stretch, connection)
            try:
                session.run()
                pause_s, since = FIRST_PAUSE_S, time.monotonic()
                continue
            except (UnavailableError, WireError) as error:
                if isinstance(error, WireError) and stretch.first is not None:
                    stretch.check(stretch.first)
                self._lost(error)
            except FencedError as error:
                if session.greeted and stretch is not self._stretch:
                    continue  # what the server has of it, only the next hello tells
                self._step_aside(stretch, error)
                continue
            if self._delivered > before:
                pause_s = FIRST_PAUSE_S
            if session.greeted:
                since = time.monotonic()
            limit_s = self._config.move_after_s
            if limit_s is not None and time.monotonic() - since > limit_s:
                self._move(stretch)
                since = time.monotonic()
            with self._changed:
                self._changed.wait_for(lambda: self._stopping, pause_s)
            pause_s = min(pause_s * 2, LONGEST_PAUSE_S)

    def _next_stretch(self) -> Stretch | None:
        """The oldest stretch; those of earlier processes go away when they are empty. None at the end."""
        while True:
            with self._changed:
                if self._stopping or self._failure:
                    return None
                stretch = self._spool.stretches[0]
                if stretch is not self._stretch and not len(stretch):
                    self._spool.stretches.pop(0)
                else:
                    return stretch
            stretch.remove()

    def _lost(self, error: UnderstudyError) -> None:
        if self._connected or self._problem is None:
            logger.warning("writer %r: %s; %d rows wait", self._name, error, self._spool.num_rows)
        with self._changed:
            self._connected, self._problem = False, str(error)

    def _step_aside(self, stretch: Stretch, error: FencedError) -> None:
        """What an earlier process left goes under a name of its own; a process that lives is told to stop."""
        if stretch is self._stretch:
            raise FencedError(
                f"{error} ({stretch.num_rows} rows that were recorded and not delivered stay in "
                f"{stretch.directory or 'memory'}; the next writer with this spool delivers them)"
            )
        stretch.acknowledge(stretch.route.base + error.last_seq)
        stretch.reroute(writer=f"{self._name}~{stretch.incarnation[:8]}", shard=stretch.route.shard)

    def _move(self, stretch: Stretch) -> None:
        new = self._choose(stretch, True).name
        logger.warning(
            "writer %r: %s has been away for %.0f s; moving to %s",
            self._name,
            stretch.route.shard,
            self._config.move_after_s,
            new,
        )
        stretch.reroute(writer=stretch.route.writer, shard=new)

    # ---- for a session

    def found(self, stretch: Stretch, connection: Connection, last_seq: int, stores: Sequence[str]) -> bool:
        """The server has said what it has: of this stretch, and which store, with those that it takes the place of.
        False if what is left goes another way from now on; UnavailableError if it is not the store to send to."""
        address = connection.address
        self._check_store(connection.name, address, stores)
        self.answered(stretch, last_seq, self._last_commit)
        first = stretch.first
        if first is not None and first > last_seq + 1:
            logger.error(
                "writer %r: the store at %s lacks chunks %d to %d, and they are not in the spool; is it "
                "another store, or was a file moved away? Going on with what is left",
                self._name,
                address,
                last_seq + 1,
                first - 1,
            )
            stretch.reroute(writer=stretch.route.writer, shard=stretch.route.shard)
            return False
        with self._changed:
            if not self._connected:
                logger.info("writer %r: connected to %s", self._name, address)
            self._connected, self._address, self._problem = True, address, None
        return True

    def _check_store(self, shard: str, address: str, stores: Sequence[str]) -> None:
        """Another store than before, at the same address, is somebody else's: its server took a port that was free."""
        known_address, known = self._stores.get(shard, (address, stores[0]))
        if self._config.any_store or address != known_address or known in stores:
            self._stores[shard] = address, stores[0]
            return
        text = (
            f"{address} serves the store {stores[0]} now, and this writer's rows go to {known}; serve that one there "
            f"again. If it is gone for good, serve this one with `--replaces {known}`, or start this process again"
        )
        if text != self._problem:
            logger.error("writer %r: %s", self._name, text)
        with self._changed:
            self._connected, self._problem = False, text
        raise UnavailableError(text)

    def answered(self, stretch: Stretch, seq: int, commit: int) -> None:
        with self._changed:
            self._answering = True
        num_rows = stretch.acknowledge(seq)  # removes files, so it is not done under the lock
        with self._changed:
            self._answering = False
            self._delivered += num_rows
            self._last_commit = max(self._last_commit, commit)
            self._changed.notify_all()

    def wait_until(self, ready: Callable[[], bool], timeout_s: float | None) -> bool:
        """Wait until something that a session waits for has come about; False at the end, or after the time-out."""
        with self._changed:
            self._changed.wait_for(lambda: self.ending or ready(), timeout_s)
            return not self.ending and ready()

    def wake(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def is_finished(self, stretch: Stretch) -> bool:
        """Whether nothing of a stretch is left and nothing will come."""
        return stretch is not self._stretch and not len(stretch)

    def fail(self, error: UnderstudyError) -> None:
        """Stop for good: the control loop gets the error."""
        logger.error("writer %r: %s", self._name, error)
        with self._changed:
            self._failure = self._failure or error
            self._problem = str(error)
            self._changed.notify_all()

    @property
    def ending(self) -> bool:
        return self._stopping or self._failure is not None
