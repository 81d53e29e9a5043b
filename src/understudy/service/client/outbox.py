"""Outbox: delivers a writer's chunks to a server that may be slow or unreachable, without blocking the control loop.

| loop | takes from | blocks on | woken by |
|---|---|---|---|
| `commit`, in the control loop | - | a full queue, with overflow="block" | the recording thread |
| recording thread | the queue of chunks | the queue, the spool, held chunks, the disk | `commit`, the sending thread |
| sending thread | the spool | the server's answers; a pause after an error | the server; the recording thread |
| gRPC's own thread (write_stream.py) | the spool | the window of unacknowledged chunks | the sending thread |

A chunk is *recorded* when the spool has it and *delivered* when the server has it on disk. With `spool_after_s`, while
the server answers, a few chunks are sent from memory, and only those that it does not acknowledge within that time are
recorded: the others never cost this machine's disk anything. A recorded chunk is never dropped. If the queue is full,
`append` waits or drops chunks, as `OutboxConfig.overflow` says; drops are counted.

Timeouts are measured on the monotonic clock; the wall clock is never read.
"""

from __future__ import annotations

import logging
import math
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, TypeAlias

from understudy.core import (
    BacklogError,
    CopiedError,
    DamageError,
    FencedError,
    StoreClosedError,
    StoreFailedError,
    UnavailableError,
    UnderstudyError,
    WireError,
)
from understudy.processes import forks
from understudy.replay.format.chunk import Chunk
from understudy.replay.format.encoded_columns import encoded_chunk
from understudy.replay.write.not_finite import NotFiniteWarnings
from understudy.service.client.connection import MAX_BACKOFF_S, MIN_BACKOFF_S, Connection
from understudy.service.client.splice_episodes import Splicer
from understudy.service.client.spool import Spool, SpoolLog
from understudy.service.client.write_stream import WINDOW_CHUNKS, WriteStream
from understudy.service.wire.chunks import encode_chunk

logger = logging.getLogger(__name__)

MAX_HELD_CHUNKS = WINDOW_CHUNKS + 2  # below KEPT_CHECKS, by which a server recognizes what it has

Overflow: TypeAlias = Literal["block", "drop_newest", "drop_oldest"]


@dataclass(frozen=True, kw_only=True)
class OutboxConfig:
    """How much a writer buffers, and what it does when the server cannot be reached."""

    queue_steps: int = 1000  # capacity of the queue in memory, of steps not yet recorded
    queue_bytes: int = 512 * 2**20  # its capacity in bytes, before camera frames are encoded
    overflow: Overflow = "block"
    block_timeout_s: float = 1.0  # how long `append` waits for a full queue, with overflow="block"
    spool_bytes: int = 10 * 2**30  # recorded and not yet delivered; when the spool is this large, the queue fills
    spool_after_s: float = 0.0  # record what the server has not acknowledged for so long; 0: record everything first
    failover_after_s: float | None = None  # use another shard if this one is unreachable for so long; None: wait
    accept_any_store: bool = False  # continue with any store that is served at the address, not only the first

    def __post_init__(self) -> None:
        if min(self.queue_steps, self.queue_bytes, self.spool_bytes) < 1 or self.block_timeout_s < 0:
            raise BacklogError(
                f"outbox: expected queue_steps, queue_bytes and spool_bytes from 1 and block_timeout_s from 0, got "
                f"{self.queue_steps}, {self.queue_bytes}, {self.spool_bytes} and {self.block_timeout_s}"
            )
        if not 0 <= self.spool_after_s < math.inf:
            raise BacklogError(f"outbox: expected spool_after_s from 0, got {self.spool_after_s}")
        if self.overflow not in ("block", "drop_newest", "drop_oldest"):
            raise BacklogError(f"overflow: expected block, drop_newest or drop_oldest, got {self.overflow!r}")


@dataclass(frozen=True, kw_only=True)
class Delivery:
    """Where the rows of a writer are, counted from the start of this process."""

    queued: int  # in memory now, and neither recorded nor delivered
    recorded: int  # in the spool now, with those of earlier processes
    damaged_chunks: int  # that the disk damaged before they were delivered; kept in the spool's `damaged-*`
    spool_bytes: int  # size of the spool
    delivered: int  # acknowledged by the server
    dropped: int  # by the overflow policy
    refused: int  # times that `append` raised BacklogError
    connected: bool
    address: str
    last_commit: int  # the last commit of the store that the server acknowledged
    problem: str | None  # why it is not connected


class ChooseShard(Protocol):
    """Chooses the connection over which a log is sent."""

    def __call__(self, log: SpoolLog, *, skip_current: bool = False) -> Connection:
        """The shard that the log went to last, or with `skip_current` the next one in the writer's order."""
        ...


class Outbox:
    """Takes a writer's chunks, records them in the spool and delivers them."""

    keeps_columns = True

    def __init__(
        self,
        name: str,
        spool: Spool,
        log: SpoolLog,
        choose_shard: ChooseShard,
        config: OutboxConfig,
    ):
        self._name = name
        self._spool = spool
        self._log = log  # of this process
        self._choose_shard = choose_shard
        self._config = config
        self._changed = threading.Condition()  # guards all below
        self._queue: deque[Chunk] = deque()
        row_bytes = sum(leaf.row_bytes for leaf in log.spec.columns.values())
        self._capacity = min(config.queue_steps, config.queue_bytes // max(row_bytes, 1))  # in rows
        self._queued_rows = 0
        self._recording: Chunk | None = None  # taken from the queue and not yet in the spool
        self._num_flushing = 0  # callers of `wait_recorded`
        self._acknowledging = False  # the spool has removed acknowledged chunks that the counters do not show yet
        self._delivered = self._dropped = self._refused = self._last_commit = 0
        self._next_seq = 0
        self._connected, self._address = False, ""
        self._problem: str | None = None
        self._stores: dict[str, tuple[str, str]] = {}  # of each shard: its last address and store; sending thread only
        self._failure: UnderstudyError | None = None  # for good
        self._closing = False
        self._stopping = False
        self._splicer = Splicer()
        self._not_finite = NotFiniteWarnings()
        self._drops_logged = 0
        self._threads = [
            threading.Thread(target=self._guard, args=(loop,), name=f"{loop.__name__[1:]}:{name}", daemon=True)
            for loop in (self._record, self._send)
        ]
        for thread in self._threads:
            thread.start()
        forks.register(self)

    def after_fork_in_child(self) -> None:
        self._changed = threading.Condition()
        if not self._stopping:
            self._failure = forks.forked_error(
                f"writer {self._name!r}", "make a writer of another name in this process"
            )
            self._stopping = True  # `close` does nothing here

    # ---- the control loop's side

    def commit(self, chunk: Chunk) -> int:
        """Put a chunk into the queue; returns the last commit that the server acknowledged."""
        with self._changed:
            self._check_usable()
            if not self._fits(chunk):
                self._handle_overflow(chunk)
            if self._fits(chunk):
                self._queue.append(chunk)
                self._queued_rows += chunk.num_rows
                self._changed.notify_all()
            else:
                self._drop(chunk)
            return self._last_commit

    def _fits(self, chunk: Chunk) -> bool:
        """An empty queue takes a chunk of any size."""
        return not self._queue or self._queued_rows + chunk.num_rows <= self._capacity

    def _handle_overflow(self, chunk: Chunk) -> None:
        if self._config.overflow == "drop_oldest":
            while not self._fits(chunk):
                oldest = self._queue.popleft()
                self._queued_rows -= oldest.num_rows
                self._drop(oldest)
        elif self._config.overflow == "block":
            fits = self._changed.wait_for(lambda: self._fits(chunk) or self._failure, self._config.block_timeout_s)
            self._check_usable()
            if not fits:
                self._refused += 1
                raise BacklogError(
                    f"writer {self._name!r}: the queue is full with {self._queued_rows} steps after "
                    f"{self._config.block_timeout_s} s of waiting ({self._why_full()}); "
                    f"{self._spool.num_rows} are in the spool. Wait for it, or choose another overflow"
                )

    def _why_full(self) -> str:
        """What the queue waits for: the server, once the spool is full, else what fills the spool."""
        if self._spool.num_bytes >= self._config.spool_bytes:
            return self._problem or "the spool is full"
        if self._log.num_held >= MAX_HELD_CHUNKS:
            return "the server has not acknowledged what it was sent, and spool_after_s is not over"
        if self._log.spec.encoded:
            return "camera frames come faster than this machine encodes and writes them"
        return "the disk is slow"

    def _drop(self, chunk: Chunk) -> None:
        self._dropped += chunk.num_rows
        if self._dropped >= 2 * self._drops_logged:  # at 1, 2, 4, ... rows, so that the log stays readable
            self._drops_logged = self._dropped
            logger.warning(
                "writer %r: the queue is full; %d rows dropped so far (overflow=%s)",
                self._name,
                self._dropped,
                self._config.overflow,
            )

    def wait_recorded(self, timeout_s: float | None = None) -> bool:
        """Wait until the spool or the server has all committed chunks."""
        with self._changed:
            self._num_flushing += 1
            self._changed.notify_all()
            try:
                self._changed.wait_for(lambda: self._failure or self._all_recorded, timeout_s)
            finally:
                self._num_flushing -= 1
            self._check_usable()
            return self._all_recorded

    def wait_delivered(self, timeout_s: float | None = None) -> bool:
        """Wait until the server has all committed chunks on disk; a DamageError if that can no longer be."""
        with self._changed:
            self._changed.wait_for(lambda: self._failure or self._all_delivered, timeout_s)
            self._check_usable()
            if self._all_delivered and self._log.num_damaged:
                raise DamageError(
                    f"writer {self._name!r}: the disk damaged {self._log.num_damaged} recorded chunks before they were "
                    f"delivered; they are kept in {self._spool.directory}, and all others are delivered. Check the disk"
                )
            return self._all_delivered

    @property
    def _all_recorded(self) -> bool:
        return not (self._queue or self._recording or self._log.num_held)

    @property
    def _all_delivered(self) -> bool:
        return not (self._queue or self._recording or self._spool.num_chunks or self._acknowledging)

    @property
    def num_unrecorded(self) -> int:
        with self._changed:  # a chunk that moves from one to the other is counted once
            recording = self._recording.num_rows if self._recording else 0
            return self._queued_rows + recording + self._log.held_rows

    @property
    def durable(self) -> bool:
        """Whether what is recorded survives this process."""
        return self._spool.directory is not None

    def delivery(self) -> Delivery:
        with self._changed:
            held_rows = self._log.held_rows
            return Delivery(
                queued=self.num_unrecorded,
                recorded=self._spool.num_rows - held_rows,
                damaged_chunks=self._spool.num_damaged,
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
        """Record what is queued, try to deliver it until the timeout, and end the threads.

        Raises the error that stopped the outbox for good, even if `append` raised it before.
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
            raise StoreClosedError(f"writer {self._name!r} is closed; make a new one")

    def _guard(self, loop: Callable[[], None]) -> None:
        """Run the loop of a thread; the control loop gets the error that ends it."""
        try:
            loop()
        except UnderstudyError as error:
            self.fail(error)
        except BaseException as error:
            self.fail(StoreFailedError(f"writer {self._name!r}: {error!r}; this is a defect, please report it"))
            raise

    # ---- recording

    def _record(self) -> None:
        while (work := self._next_work()) is not None:
            if isinstance(work, int):
                self._log.record(work)
                self.notify()
                continue
            self._not_finite.look(work)
            parts = self._splicer.splice(work.parts)
            if parts:
                # On disk, a chunk never comes before an older one.
                put = self._log.hold if self._log.num_held or self._may_hold else self._log.put
                put(self._next_seq, encode_chunk(self._next_seq, encoded_chunk(work).columns, parts), work.num_rows)
                self._next_seq += 1
            if work.release is not None:
                work.release()
            with self._changed:
                self._recording = None
                self._changed.notify_all()

    def _next_work(self) -> Chunk | int | None:
        """The number of the held chunk to record now, or the next chunk of the queue; None at the end."""
        with self._changed:
            while True:
                held, wait_s = self._log.held, None
                if held is not None:
                    seq, since = held
                    wait_s = since + self._config.spool_after_s - time.monotonic()
                    if wait_s <= 0 or not self._may_hold:
                        return seq
                if self._can_take:
                    break
                if self._is_over:
                    return None
                self._changed.wait(wait_s)
            chunk = self._queue.popleft()
            self._queued_rows -= chunk.num_rows
            self._recording = chunk
            self._changed.notify_all()
            return chunk

    @property
    def _is_over(self) -> bool:
        """Whether nothing will leave the queue any more. A spool on disk gets what is in it even after a failure."""
        if self.should_stop:
            return not (self._queue and self.durable)
        return self._closing and not self._queue

    @property
    def _can_take(self) -> bool:
        """Whether the next chunk may leave the queue."""
        if not self._queue:
            return False
        if self.should_stop:
            return self.durable
        return self._log.num_held < MAX_HELD_CHUNKS and self._spool.num_bytes < self._config.spool_bytes

    @property
    def _may_hold(self) -> bool:
        """Whether a chunk may wait in memory for the server's acknowledgement."""
        in_a_hurry = self._num_flushing or self._closing or self._stopping or self._failure
        return self.durable and self._connected and not in_a_hurry and self._config.spool_after_s > 0

    # ---- sending

    def _send(self) -> None:
        pause_s, last_connected = MIN_BACKOFF_S, time.monotonic()
        while (log := self._next_log()) is not None:
            before = self._delivered
            connection = self._choose_shard(log)
            if log.route.shard != connection.name:
                log.assign(connection.name)
            stream = WriteStream(self, log, connection)
            try:
                stream.run()
                pause_s, last_connected = MIN_BACKOFF_S, time.monotonic()
                continue
            except (UnavailableError, WireError, DamageError) as error:
                if self.should_stop:
                    continue
                if not isinstance(error, UnavailableError) and log.set_damaged_aside(WINDOW_CHUNKS):
                    self.notify()
                    continue  # the server refused what the disk has damaged
                self._on_disconnect(error)
            except FencedError as error:
                if stream.connected and log is not self._log:
                    continue  # only the next hello tells how much of it the server has
                self._reroute_fenced(log, error)
                continue
            if self._delivered > before:
                pause_s = MIN_BACKOFF_S
            if stream.connected:
                last_connected = time.monotonic()
            limit_s = self._config.failover_after_s
            if limit_s is not None and time.monotonic() - last_connected > limit_s:
                self._fail_over(log)
                last_connected = time.monotonic()
            with self._changed:
                self._changed.wait_for(lambda: self._stopping, pause_s)
            pause_s = min(pause_s * 2, MAX_BACKOFF_S)

    def _next_log(self) -> SpoolLog | None:
        """The oldest log, after removing empty logs of earlier processes; None at the end."""
        while True:
            with self._changed:
                if self._stopping or self._failure:
                    return None
                log = self._spool.logs[0]
                if log is not self._log and not len(log):
                    self._spool.logs.pop(0)
                else:
                    return log
            log.remove()

    def _on_disconnect(self, error: UnderstudyError) -> None:
        if self._connected or self._problem is None:
            logger.warning("writer %r: %s; %d rows wait in the spool", self._name, error, self._spool.num_rows)
        with self._changed:
            self._connected, self._problem = False, str(error)

    def _reroute_fenced(self, log: SpoolLog, error: FencedError) -> None:
        """Another process took the writer's name: stop, or send the log of an earlier process under another name."""
        if log is self._log:
            raise type(error)(
                f"{error} ({log.num_rows} rows that were recorded and not delivered stay in "
                f"{log.directory or 'memory'}; the next writer with this spool delivers them)"
            )
        last_seq = log.route.base + error.last_seq
        common = log.last_common(last_seq, error.checks)
        log.acknowledge(common)
        # A copy has the same incarnation, and perhaps sends its log under another name as well.
        copied = isinstance(error, CopiedError) or common < last_seq
        tag = uuid.uuid4().hex if copied else log.incarnation
        log.reroute(writer=f"{self._name}~{tag[:8]}", shard=log.route.shard)
        logger.warning("writer %r: %s (its rows are sent as %r)", self._name, error, log.route.writer)

    def _fail_over(self, log: SpoolLog) -> None:
        """Send the rest of a log to the next shard."""
        new = self._choose_shard(log, skip_current=True).name
        logger.warning(
            "writer %r: %s could not be reached for %.0f s; continuing with %s",
            self._name,
            log.route.shard,
            self._config.failover_after_s,
            new,
        )
        log.reroute(writer=log.route.writer, shard=new)

    # ---- callbacks of a WriteStream

    def on_hello(
        self, log: SpoolLog, connection: Connection, last_seq: int, checks: Sequence[int], stores: Sequence[str]
    ) -> bool:
        """Drop what the server already has; False if later chunks had to be rerouted because some are missing."""
        address = connection.address
        self._check_store(connection.name, address, stores)
        self._refuse_copy(log, address, last_seq, checks)
        self.on_acknowledged(log, last_seq, self._last_commit)
        first = log.first
        if first is not None and first > last_seq + 1:
            logger.error(
                "writer %r: the store at %s lacks chunks %d to %d, and they are not in the spool; is it "
                "another store, or was a file moved away? Continuing with the chunks that are left",
                self._name,
                address,
                last_seq + 1,
                first - 1,
            )
            log.reroute(writer=log.route.writer, shard=log.route.shard)
            return False
        with self._changed:
            if not self._connected:
                logger.info("writer %r: connected to %s", self._name, address)
            self._connected, self._address, self._problem = True, address, None
        return True

    def _refuse_copy(self, log: SpoolLog, address: str, last_seq: int, checks: Sequence[int]) -> None:
        """Raise if the server has chunks under this log's incarnation that are not of this log."""
        common = log.last_common(last_seq, checks)
        if common < last_seq or (log is self._log and last_seq > log.highest):
            raise CopiedError(
                f"writer {self._name!r}: a copy of this writer is alive: the store at {address} has chunks up to "
                f"{last_seq} of the same incarnation, and they are not those of this process. Was its disk or its "
                f"virtual machine copied? Stop one of the two; a new process gets an incarnation of its own",
                last_seq=common - log.route.base,
            )

    def _check_store(self, shard: str, address: str, stores: Sequence[str]) -> None:
        """Refuse another store at the same address: it may be somebody else's server that took a free port."""
        last_address, last_store = self._stores.get(shard, (address, stores[0]))
        if self._config.accept_any_store or address != last_address or last_store in stores:
            self._stores[shard] = address, stores[0]
            return
        text = (
            f"{address} serves the store {stores[0]} now, and this writer's rows go to {last_store}; serve that one "
            f"there again. If it is lost for good, serve this one with `--replaces {last_store}`, or start this "
            f"process again"
        )
        if text != self._problem:
            logger.error("writer %r: %s", self._name, text)
        with self._changed:
            self._connected, self._problem = False, text
        raise UnavailableError(text)

    def on_acknowledged(self, log: SpoolLog, seq: int, commit: int) -> None:
        with self._changed:
            self._acknowledging = True
        num_rows = log.acknowledge(seq)  # removes files, so the lock is not held
        with self._changed:
            self._acknowledging = False
            self._delivered += num_rows
            self._last_commit = max(self._last_commit, commit)
            self._changed.notify_all()

    def wait_until(self, ready: Callable[[], bool], timeout_s: float | None) -> bool:
        """Wait until `ready()`; False if the outbox stops first, or after the timeout."""
        with self._changed:
            self._changed.wait_for(lambda: self.should_stop or ready(), timeout_s)
            return not self.should_stop and ready()

    def notify(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def is_finished(self, log: SpoolLog) -> bool:
        """Whether the log is empty and nothing will be added to it."""
        return log is not self._log and not len(log)

    def fail(self, error: UnderstudyError) -> None:
        """Stop for good; the control loop gets the error."""
        logger.error("writer %r: %s", self._name, error)
        with self._changed:
            self._failure = self._failure or error
            self._problem = str(error)
            self._changed.notify_all()

    @property
    def should_stop(self) -> bool:
        return self._stopping or self._failure is not None
