"""RemoteSampler: a Sampler whose store is elsewhere. Batches are asked for ahead and arrive while the learner works.

| loop | takes from | blocks on | woken by |
|---|---|---|---|
| `sample`, `follow` | batches that have arrived | that queue, when it is empty | the receiving thread |
| receiving thread | the server's stream | that stream | the server, `close` |
| gRPC's own thread | requests | the queue of requests | `sample`, `close` |

When the stream breaks, the next call opens another and goes on after the last batch that was handed out, as of the same
commit; batches that were on their way are drawn again, the same.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

from understudy.core import StepSpec, StoreError, UnavailableError, UnderstudyError, WireError
from understudy.core.closeable import Closeable
from understudy.replay.read.batch_shapes import Transitions
from understudy.replay.read.view import View
from understudy.replay.sample.sampler import BatchRecord, BatchShape, part_of
from understudy.replay.sample.selectors import Selector, Uniform
from understudy.service.client.connection import Connection
from understudy.service.wire.batches import MAX_MESSAGE_BYTES, fill_batch, selector_to_json, shape_to_json, view_to_json
from understudy.service.wire.message import Assembly
from understudy.service.wire.protocol import SAMPLE, VERSION, from_json, to_json

T = TypeVar("T")

PAUSE_S = 0.1


class RemoteSampler(Closeable):
    """Batches of one view, one shape and one spec, from one server. Not for several threads at once.

    `depth` batches are asked for ahead; with 0, `sample` takes any `size`, as a Mixture wants it.
    """

    def __init__(
        self,
        connection: Connection,
        view: View,
        *,
        batch_size: int,
        seed: int = 0,
        shape: BatchShape | None = None,
        selector: Selector | None = None,
        spec: int | None = None,
        rank: int = 0,
        world_size: int = 1,
        depth: int = 2,
        timeout_s: float = 60.0,
    ):
        if depth < 0:
            raise StoreError(f"depth: expected a number from 0, got {depth}")
        self.view = view
        self.shape = shape or Transitions()
        self.batch_size = batch_size
        self.seed = seed
        self.rank = rank
        self.world_size = world_size
        self.last_record: BatchRecord | None = None
        self._connection = connection
        self._hello = {
            "version": VERSION,
            "view": view_to_json(view),
            "shape": shape_to_json(self.shape),
            "selector": selector_to_json(selector or Uniform()),
            "batch_size": batch_size,
            "seed": seed,
            "spec": spec,
            "rank": rank,
            "world_size": world_size,
        }
        self._depth = depth
        self._timeout_s = timeout_s
        self._state: dict[str, Any] | None = None
        self._spec: StepSpec | None = None
        self.store: str | None = None  # the identity of the one that is drawn from; another is refused
        self._available = 0
        self._stream: _Stream | None = None
        self._asked: list[tuple[int, list[int] | None]] = []  # batches on their way

    # ---- what there is

    @property
    def spec(self) -> StepSpec:
        if self._spec is None:
            self.follow()
        if self._spec is None:
            raise StoreError("there is nothing to draw: the store is empty; record something, then call follow()")
        return self._spec

    def __len__(self) -> int:
        """Steps that could be drawn, as far as the server has told."""
        return self._available

    def follow(self) -> int:
        """How many steps can be drawn. The server takes in new commits before each batch it draws."""
        if not self._asked:
            self.ask(0)
            self.hear()
        return self._available

    def make(self, size: int | None = None) -> Any:
        """A batch to be used again and again; of this rank's part."""
        part = part_of(self.batch_size if size is None else size, self.rank, self.world_size)
        return self.shape.make(self.spec, part.stop - part.start)

    # ---- drawing

    def sample(
        self, out: Any = None, *, at: slice | None = None, size: int | None = None, part: slice | None = None
    ) -> Any:
        """The next batch, or this rank's part of it; see Sampler."""
        size = self.batch_size if size is None else size
        mine = part_of(size, self.rank, self.world_size) if part is None else part
        batch = self.make(size) if out is None else out
        wanted = (size, None if part is None else [part.start, part.stop])
        if self._asked and self._asked[0] != wanted:
            raise StoreError(
                f"size: {self._asked[0][0]} steps are on their way and {size} were asked for; make the sampler with "
                f"depth=0 to change the size of batches"
            )
        while len(self._asked) <= self._depth:
            self.ask(*wanted)
        self.collect(batch, slice(0, mine.stop - mine.start) if at is None else at)
        return batch

    def ask(self, size: int, part: list[int] | None = None) -> None:
        """Ask for a batch; `collect` waits for it."""
        self._asked.append((size, part))
        if self._stream is not None:
            self._stream.ask(size, part)

    def hear(self) -> None:
        """Wait for the answer to what was asked for first, if that was no batch (`ask(0)`)."""
        self._answer()

    def give_up(self) -> None:
        """Forget what is on its way; what is asked for next is drawn in its place."""
        self._drop_stream()
        self._asked.clear()

    def collect(self, batch: Any, at: slice) -> None:
        """Wait for the batch that was asked for first, and write it to `batch[at]`."""
        assembly = self._answer()
        if assembly is not None:
            fill_batch(batch, at, assembly, self.spec)

    def _answer(self) -> Assembly | None:
        answer, assembly = self._patiently(lambda: self._opened().take(self._timeout_s))
        self._asked.pop(0)
        self._hear(answer)
        if answer["record"] is not None:
            self.last_record = BatchRecord(**answer["record"])
        return assembly

    def _patiently(self, call: Callable[[], T]) -> T:
        """Try again for a while with another stream when one breaks."""
        deadline = time.monotonic() + self._timeout_s
        while True:
            try:
                return call()
            except (UnavailableError, WireError):
                self._drop_stream()
                if time.monotonic() > deadline:
                    raise
                time.sleep(PAUSE_S)

    def _hear(self, said: dict[str, Any]) -> None:
        self._available, self._state, self.store = int(said["available"]), said["state"], said.get("store")
        if self._spec is None and said["spec"] is not None:
            self._spec = StepSpec.from_json(said["spec"])

    def _opened(self) -> _Stream:
        """The stream; a new one goes on where the last one broke and asks again for what was on its way."""
        if self._stream is None:
            known = {} if self.store is None else {"store": self.store}
            self._stream = _Stream(self._connection, {**self._hello, "state": self._state, **known})
            self._hear(self._stream.take(self._timeout_s)[0])
            for size, part in self._asked:
                self._stream.ask(size, part)
        return self._stream

    def _drop_stream(self) -> None:
        if self._stream is not None:
            self._stream.close()
            self._stream = None

    # ---- state

    def state(self) -> dict[str, Any]:
        """A few numbers, from which `restore` goes on with the same batches, here or beside the store."""
        if self._state is None:
            self.follow()
        return self._state or {}  # nothing yet, if the store is empty

    @property
    def known(self) -> dict[str, Any] | None:
        """The state as far as the server has told, without asking it."""
        return self._state

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on where `state` was taken; only on a new sampler."""
        self.go_on_from(state)
        self.follow()

    def go_on_from(self, state: Mapping[str, Any], store: str | None = None) -> None:
        """As `restore`, from the first call on that reaches the server, and with no other store than that one."""
        if self._stream is not None or self._state is not None:
            raise StoreError("a sampler is restored before it is used; make a new one")
        self._state, self.store = dict(state) or None, store

    def close(self) -> None:
        self._drop_stream()


class _Stream:
    """One stream of batches, and the thread that receives them."""

    def __init__(self, connection: Connection, hello: dict[str, Any]):
        self._requests: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._requests.put(to_json(hello))
        self._arrived: queue.SimpleQueue[tuple[dict[str, Any], Assembly | None] | UnderstudyError] = queue.SimpleQueue()
        self._exchange = connection.exchange(SAMPLE, self._messages())
        self._thread = threading.Thread(target=self._receive, name="batches", daemon=True)
        self._thread.start()

    def ask(self, size: int, part: list[int] | None) -> None:
        self._requests.put(to_json({"size": size, "part": part}))

    def take(self, timeout_s: float) -> tuple[dict[str, Any], Assembly | None]:
        """The next answer, and its batch if it has one."""
        try:
            found = self._arrived.get(timeout=max(timeout_s, 0.001))
        except queue.Empty:
            raise UnavailableError(f"the server has not answered in {timeout_s:.0f} s; is it overloaded?") from None
        if isinstance(found, UnderstudyError):
            self._arrived.put(found)
            raise found.with_traceback(None)
        return found

    def close(self) -> None:
        self._requests.put(None)
        self._exchange.cancel()
        self._thread.join()

    def _messages(self) -> Iterator[bytes]:
        while (message := self._requests.get()) is not None:
            yield message

    def _receive(self) -> None:
        try:
            for message in self._exchange:
                answer = from_json(message)
                assembly = None
                if answer.get("record") is not None:
                    assembly = Assembly(next(self._exchange), max_bytes=MAX_MESSAGE_BYTES)
                    while not assembly.complete:
                        assembly.add(next(self._exchange))
                self._arrived.put((answer, assembly))
            self._arrived.put(UnavailableError("the server ended the stream; is it stopping?"))
        except UnderstudyError as error:
            self._arrived.put(error)
        except StopIteration:
            self._arrived.put(UnavailableError("the server ended the stream in a batch; is it stopping?"))
