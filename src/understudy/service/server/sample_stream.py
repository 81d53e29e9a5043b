"""SampleStream: the server's side of a stream of batches to one client.

Each stream has its own sampler. The client requests batches ahead; while one is sent, the next is sampled.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from understudy.core import StoreError, UnavailableError, WireError
from understudy.replay import FrameCache
from understudy.replay.sample.sampler import Sampler
from understudy.service.server.batch_memory import BatchMemory
from understudy.service.wire.batches import (
    MAX_BATCH_BYTES,
    encode_batch,
    num_bytes_of,
    resize_from_json,
    selector_from_json,
    shape_from_json,
    view_from_json,
)
from understudy.service.wire.message import from_json, pieces, to_json
from understudy.service.wire.protocol import VERSION, ReplacedError, check_version

RAGGED_COPIES = 4  # of text and ragged values, at once: as values, as bytes, joined, and in pieces
STALLED_S = 60.0  # until a client that does not read loses its stream, plus the time of the batch on a slow link
SLOWEST_READER_BYTES_PER_S = 1_000_000


class SampleStream:
    """The sampler of one client. Its methods run in the server's reading threads.

    A client that disconnects cancels its stream but not the thread that samples for it, so `close` waits for that.
    """

    def __init__(self, store: Path, hello: dict[str, Any], memory: BatchMemory, frame_cache: FrameCache | None = None):
        check_version(hello, other="client")
        options: dict[str, Any] = {name: hello.get(name) for name in ("batch_size", "seed", "rank", "world_size")}
        for name, number in options.items():
            if type(number) is not int or not 0 <= number < (2**64 if name == "seed" else 2**63):
                raise WireError(f"{name}: expected a whole number from 0, got {str(number)[:40]}")
        spec = hello.get("spec")
        if spec is not None and type(spec) is not int:
            raise WireError(f"spec: expected the number of a spec, got {str(spec)[:40]}")
        options |= {
            "view": view_from_json(hello.get("view")),
            "shape": shape_from_json(hello.get("shape")),
            "selector": selector_from_json(hello.get("selector")),
            "spec": spec,
            "resize": resize_from_json(hello.get("resize")),
        }
        self._resize = hello.get("resize")
        self._sampling = threading.Lock()
        self._closed = False
        self._batch: Any = None
        self._memory = memory
        self._batch_bytes = 0  # taken for `_batch`
        self._taken: deque[list[int]] = deque()  # for each answer that is not sent yet
        self._sampler: Sampler[Any] = Sampler(store, **options, frame_cache=frame_cache, on_ragged=self._take_ragged)
        try:
            self._start(hello.get("store"), hello.get("state"))
        except BaseException:
            self._sampler.close()
            raise

    def _start(self, store_id: Any, state: Any) -> None:
        sampler = self._sampler
        if store_id not in (None, sampler.store_id):
            raise ReplacedError(
                "this server has another store than the one that the sampler began with; make a new sampler, or "
                "serve that store here again"
            )
        if sampler.known_spec is not None:
            _check_size(sampler, sampler.batch_size)
        if state is not None:
            _restore(sampler, state)
        sampler.follow()

    def close(self) -> None:
        with self._sampling:
            self._closed = True
            self._sampler.close()
            del self._sampler  # which refers to this stream: its memory would wait for the garbage collector
            while self._taken:
                self.sent()
            self._memory.give_back(self._batch_bytes)
            self._batch, self._batch_bytes = None, 0

    def sent(self) -> None:
        """The oldest answer with a batch is sent."""
        self._give_back(self._taken.popleft())

    def _give_back(self, taken: list[int]) -> None:
        for num_bytes in taken:
            self._memory.give_back(num_bytes)

    def _take(self, num_bytes: int) -> None:
        self._memory.take(num_bytes)
        self._taken[-1].append(num_bytes)

    def _take_ragged(self, num_bytes: int) -> None:
        """Refuse a batch with too much text before it is read."""
        if num_bytes * RAGGED_COPIES > MAX_BATCH_BYTES:
            raise StoreError(
                f"batch_size: {num_bytes} bytes of text and ragged values in one batch, and "
                f"{MAX_BATCH_BYTES // RAGGED_COPIES} is the most; request fewer"
            )
        self._take(num_bytes * RAGGED_COPIES)

    def hello_reply(self) -> bytes:
        return to_json({"version": VERSION, **self._status()})

    def _status(self) -> dict[str, Any]:
        """What a client gets with every answer."""
        sampler = self._sampler
        return {
            "spec": None if sampler.known_spec is None else sampler.known_spec.to_json(),
            "available": len(sampler),
            "state": sampler.state(),
            "store": sampler.store_id,
            "record": None,
            **({} if self._resize is None else {"resize": self._resize}),
        }

    def answer(self, message: bytes) -> list[bytes]:
        """The messages that answer a request: the status, and the pieces of a batch if one was requested."""
        with self._sampling:
            return [] if self._closed else self._answer(message)

    def _answer(self, message: bytes) -> list[bytes]:
        request = from_json(message)
        size = request.get("size")
        if type(size) is not int or size < 0:
            raise WireError(f"size: expected a whole number from 0, got {str(size)[:40]}")
        sampler = self._sampler
        sampler.follow()
        if size == 0:
            return [to_json(self._status())]
        _check_size(sampler, size)
        part = _part(request.get("part"), size)
        num_items = sampler.part(size).stop - sampler.part(size).start if part is None else part.stop - part.start
        self._taken.append([])
        try:
            if self._batch is None or len(self._batch) != num_items:
                self._make_batch(num_items)
            self._take(self._batch_bytes)  # what is sent is a copy
            batch = sampler.sample(self._batch, size=size, part=part)
            record = asdict(sampler.last_record) if sampler.last_record else None
            return [to_json({**self._status(), "record": record}), *pieces(encode_batch(batch, {}))]
        except BaseException:
            self._give_back(self._taken.pop())
            raise

    def _make_batch(self, num_items: int) -> None:
        """The batch that is filled for each answer."""
        shape, spec = self._sampler.shape, self._sampler.spec
        self._batch = None
        self._memory.give_back(self._batch_bytes)
        self._batch_bytes = 0
        num_bytes = num_items * num_bytes_of(shape.make(spec, 1))
        self._memory.take(num_bytes)
        self._batch_bytes = num_bytes
        self._batch = shape.make(spec, num_items)


def _restore(sampler: Sampler[Any], state: Any) -> None:
    try:
        sampler.restore(state)
    except (TypeError, KeyError, ValueError, AttributeError) as error:
        raise WireError(f"state: not the state of a sampler ({type(error).__name__})") from None


def _check_size(sampler: Sampler[Any], size: int) -> None:
    """Refuse a batch that is too large before it is allocated."""
    one = num_bytes_of(sampler.shape.make(sampler.spec, 1))
    if size * one > MAX_BATCH_BYTES:
        raise StoreError(f"batch_size: {size} of {one} bytes each is more than {MAX_BATCH_BYTES}; request fewer")


def _part(value: Any, size: int) -> slice | None:
    if value is None:
        return None
    if not (isinstance(value, list) and len(value) == 2 and all(type(x) is int for x in value)):
        raise WireError(f"part: expected two whole numbers, got {json.dumps(value)[:40]}")
    start, stop = value
    if not 0 <= start <= stop <= size:
        raise WireError(f"part: expected a part of {size}, got {start} to {stop}")
    return slice(start, stop)


async def serve_batches(
    stream: SampleStream,
    requests: AsyncIterator[bytes],
    write: Callable[[bytes], Awaitable[Any]],
    in_thread: Callable[..., Awaitable[Any]],
    on_batch_sent: Callable[[], None],
) -> None:
    """Answer requests in order until the client ends its side; one batch is sampled while another is sent."""
    ready: asyncio.Queue[list[bytes] | Exception | None] = asyncio.Queue(1)

    async def sample_ahead() -> None:
        try:
            async for message in requests:
                await ready.put(await in_thread(stream.answer, message))
            await ready.put(None)
        except Exception as error:  # noqa: BLE001 (the sending loop raises it)
            await ready.put(error)

    sampling = asyncio.ensure_future(sample_ahead())
    try:
        while (messages := await ready.get()) is not None:
            if isinstance(messages, Exception):
                raise messages
            num_bytes = sum(len(message) for message in messages)
            try:
                async with asyncio.timeout(STALLED_S + num_bytes / SLOWEST_READER_BYTES_PER_S):
                    for message in messages:
                        await write(message)
            except TimeoutError:
                raise UnavailableError("the client did not read its batch; the stream is over") from None
            if len(messages) > 1:
                stream.sent()
                on_batch_sent()
    finally:
        sampling.cancel()
        await asyncio.wait({sampling})
