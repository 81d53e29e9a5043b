"""RemoteSampler: a Sampler whose store is on a server. Batches are requested ahead and arrive while the learner works.

| loop | takes from | blocks on | woken by |
|---|---|---|---|
| `sample`, `follow` | batches that have arrived | that queue, when it is empty | the receiving thread |
| receiving thread | the server's stream | that stream | the server, `close` |
| gRPC's own thread | requests | the queue of requests | `sample`, `close` |

When the stream breaks, the next call opens another and continues after the last batch that the caller got, as of the
same commit; batches that were on their way are drawn again, the same.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields
from typing import Any, Generic, TypeVar, cast

from understudy.core import RefusedError, StepSpec, StoreError, UnavailableError, UnderstudyError, WireError
from understudy.core.closeable import Closeable
from understudy.core.resize import ResizeOption, resized_spec, sizes_by_field
from understudy.processes import forks
from understudy.replay.read.batch_shapes import Transitions
from understudy.replay.read.view import View, check_view
from understudy.replay.sample.batch_source import Batch, BatchShape, EmptyError, part_of
from understudy.replay.sample.sampler import EMPTY_STORE, BatchRecord, other_spec
from understudy.replay.sample.selectors import Selector, Uniform
from understudy.service.client.connection import Connection
from understudy.service.wire.batches import (
    MAX_MESSAGE_BYTES,
    fill_batch,
    resize_to_json,
    selector_to_json,
    shape_to_json,
    view_to_json,
)
from understudy.service.wire.message import Assembly, from_json, to_json
from understudy.service.wire.protocol import SAMPLE, VERSION, check_version

T = TypeVar("T")

PAUSE_S = 0.1
FAR_BATCHES = 1000  # to skip so many, another stream is quicker than asking for each


class RemoteSampler(Closeable, Generic[Batch]):
    """Batches of one view, one shape and one spec, from one server. Not for several threads at once.

    `depth` batches are requested ahead; with 0, `sample` takes any `size`, as a Mixture needs it. If `spec` is a
    StepSpec, a server whose store holds another one is refused. With `resize`, the server resizes and keeps the frames.
    """

    def __init__(
        self,
        connection: Connection,
        view: View,
        *,
        batch_size: int,
        seed: int = 0,
        shape: BatchShape[Batch] | None = None,
        selector: Selector | None = None,
        spec: int | StepSpec | None = None,
        resize: ResizeOption | None = None,
        rank: int = 0,
        world_size: int = 1,
        depth: int = 2,
        timeout_s: float = 60.0,
    ):
        check_view(view)
        if depth < 0:
            raise StoreError(f"depth: expected a number from 0, got {depth}")
        self.view = view
        self.shape: BatchShape[Batch] = shape or cast("BatchShape[Batch]", Transitions())
        self.batch_size = batch_size
        self.seed = seed
        self.rank = rank
        self.world_size = world_size
        self.last_record: BatchRecord | None = None
        self.last_state: dict[str, Any] | None = None  # as the server told it last
        self.store_id: str | None = None  # of the store that is drawn from; another one is refused
        self.known_spec: StepSpec | None = None  # of the batches
        if isinstance(spec, StepSpec):
            self.known_spec = resized_spec(spec, sizes_by_field(spec, resize))
        self.num_lost = 0  # see ShardedSampler, which can do without a server
        self.unreachable: Mapping[str, str] = {}
        self._connection = connection
        self._hello = {
            "version": VERSION,
            "view": view_to_json(view),
            "shape": shape_to_json(self.shape),
            "selector": selector_to_json(selector or Uniform()),
            "batch_size": batch_size,
            "seed": seed,
            "spec": None if isinstance(spec, StepSpec) else spec,
            "rank": rank,
            "world_size": world_size,
        }
        self._resize = resize
        if resize is not None:
            self._hello["resize"] = resize_to_json(resize)
        self._wanted_spec = spec
        self._depth = depth
        self._timeout_s = timeout_s
        self._spec_checked = False
        self._available = 0
        self._stream: _Stream | None = None
        self._requested: list[tuple[int, list[int] | None]] = []  # batches on their way
        forks.register(self)

    def after_fork_in_child(self) -> None:
        if self._stream is not None:  # the next call asks the connection for another, which says that it cannot be used
            forks.leave_to_parent(self._stream)
            self._stream = None

    # ---- what there is

    @property
    def spec(self) -> StepSpec:
        if self.known_spec is None:
            self.follow()
        if self.known_spec is None:
            raise EmptyError(EMPTY_STORE)
        return self.known_spec

    @property
    def as_of(self) -> str:
        return f"commit {0 if self.last_state is None else self.last_state['commit']}"

    def __len__(self) -> int:
        """How many steps can be drawn, as of the server's last answer."""
        return self._available

    def follow(self) -> int:
        """How many steps can be drawn. The server takes in new commits before each batch it draws."""
        if not self._requested:
            self.request(0)
            self.poll()
        return self._available

    def make(self, size: int | None = None) -> Batch:
        """A batch to be filled again and again; of this rank's part."""
        part = part_of(self.batch_size if size is None else size, self.rank, self.world_size)
        return self.shape.make(self.spec, part.stop - part.start)

    # ---- drawing

    def sample(
        self, out: Batch | None = None, *, at: slice | None = None, size: int | None = None, part: slice | None = None
    ) -> Batch:
        """The next batch, or this rank's part of it; see Sampler."""
        size = self.batch_size if size is None else size
        mine = part_of(size, self.rank, self.world_size) if part is None else part
        batch = self.shape.make(self.spec, mine.stop - mine.start) if out is None else out
        wanted = (size, None if part is None else [part.start, part.stop])
        if self._requested and self._requested[0] != wanted:
            raise StoreError(
                f"size: {self._requested[0][0]} steps are on their way and {size} were asked for; make the sampler "
                f"with depth=0 to change the size of batches"
            )
        while len(self._requested) <= self._depth:
            self.request(*wanted)
        self.collect(batch, slice(0, mine.stop - mine.start) if at is None else at)
        return batch

    def skip(self, num_batches: int = 1, *, size: int | None = None) -> None:
        """Pass over the next batches, of `size` steps each: the server draws them and sends none of their items."""
        state = self.state()
        if num_batches >= FAR_BATCHES and state and not state["selector"]:
            self.cancel()  # the next stream begins at that number
            self.last_state = {**state, "num_batches": int(state["num_batches"]) + num_batches}
            return
        for _ in range(num_batches - len(self._requested)):
            self.request(self.batch_size if size is None else size, [0, 0])
        for _ in range(num_batches):
            self._answer()

    def peek(self, size: int, out: Batch | None = None, *, at: slice | None = None) -> Batch:
        """Some steps, drawn uniformly: the same ones for the same contents. The batches that follow do not change."""
        with RemoteSampler(
            self._connection,
            self.view,
            batch_size=size,
            shape=self.shape,
            spec=self._wanted_spec,
            resize=self._resize,
            depth=0,
            timeout_s=self._timeout_s,
        ) as other:
            return other.sample(out, at=at)

    # `request` and `collect` are two calls, so that all servers of a ShardedSampler draw at the same time.

    def request(self, size: int, part: list[int] | None = None) -> None:
        """Request a batch, which `collect` waits for; with 0, only the server's status, which `poll` waits for."""
        self._requested.append((size, part))
        if self._stream is not None:
            self._stream.request(size, part)

    def poll(self) -> None:
        """Wait for the answer to the oldest request, if that was `request(0)`."""
        self._answer()

    def collect(self, batch: Batch, at: slice) -> None:
        """Wait for the batch that was requested first, and write it to `batch[at]`."""
        assembly = self._answer()
        if assembly is not None:
            fill_batch(batch, at, assembly, self.spec)

    def cancel(self) -> None:
        """Forget all requests; the next request draws what the first of them would have drawn."""
        self._drop_stream()
        self._requested.clear()

    def _answer(self) -> Assembly | None:
        try:
            answer, assembly = self._retry(lambda: self._open_stream().take(self._timeout_s))
        except UnderstudyError:
            self.cancel()  # the server ends a stream with its first error
            raise
        self._connection.note_answer()
        self._requested.pop(0)
        self._update(answer)
        if answer["record"] is not None:
            known = {item.name for item in fields(BatchRecord)}  # a newer server may send more
            self.last_record = BatchRecord(**{name: answer["record"][name] for name in known & answer["record"].keys()})
        return assembly

    def _retry(self, call: Callable[[], T]) -> T:
        """Try again with another stream when one breaks, until the time-out."""
        deadline = time.monotonic() + self._timeout_s
        while True:
            try:
                return call()
            except (UnavailableError, WireError):
                self._drop_stream()
                if time.monotonic() > deadline:
                    raise
                self._connection.say_if_absent()
                time.sleep(PAUSE_S)

    def _update(self, status: dict[str, Any]) -> None:
        """Take in what the server tells with each answer."""
        if not self._spec_checked and status["spec"] is not None:
            spec = StepSpec.from_json(status["spec"])
            if self.known_spec not in (None, spec):
                raise other_spec(self._connection.name, spec, self.spec)
            self.known_spec, self._spec_checked = spec, True
        self._available, self.last_state, self.store_id = int(status["available"]), status["state"], status.get("store")

    def _open_stream(self) -> _Stream:
        """The stream; a new one continues where the last one broke and repeats the requests without an answer."""
        if self._stream is None:
            known = {} if self.store_id is None else {"store": self.store_id}
            self._stream = _Stream(self._connection, {**self._hello, "state": self.last_state, **known})
            hello_reply, _ = self._stream.take(self._timeout_s)
            check_version(hello_reply, other="server")
            if hello_reply.get("resize") != self._hello.get("resize"):
                raise RefusedError(
                    "resize: the server does not resize frames; update it with `pip install --upgrade "
                    "understudy-robotics`"
                )
            self._update(hello_reply)
            for size, part in self._requested:
                self._stream.request(size, part)
        return self._stream

    def _drop_stream(self) -> None:
        if self._stream is not None:
            self._stream.close()
            self._stream = None

    # ---- state

    def state(self) -> dict[str, Any]:
        """A few numbers, from which `restore` continues with the same batches, here or beside the store."""
        if self.last_state is None:
            self.follow()
        return dict(self.last_state or {})

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue where `state` was taken; only on a new sampler."""
        self.resume_from(state)
        self.follow()

    def resume_from(self, state: Mapping[str, Any], store_id: str | None = None) -> None:
        """As `restore`, from the first call on that reaches the server; another store than `store_id` is refused."""
        if self._stream is not None or self.last_state is not None:
            raise StoreError("a sampler is restored before it is used; make a new one")
        self.last_state, self.store_id = dict(state) or None, store_id

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

    def request(self, size: int, part: list[int] | None) -> None:
        self._requests.put(to_json({"size": size, "part": part}))

    def take(self, timeout_s: float) -> tuple[dict[str, Any], Assembly | None]:
        """The next answer, and its batch if it has one."""
        try:
            found = self._arrived.get(timeout=max(timeout_s, 0.001))
        except queue.Empty:
            raise UnavailableError(f"the server has not answered in {timeout_s:.1f} s; is it overloaded?") from None
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
