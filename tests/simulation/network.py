"""Network: gRPC's channel and server as simulated streams between machines.

A call is two pipes of messages. A pipe keeps its order, as TCP does, and takes a random time for each message. What a
network does to streams is done to whole calls: `cut` ends one for the client and for the server at different times, and
messages that are on their way may still arrive, after the client has begun another call. So a server sees old and new
streams of one client at once, in any order. While a link is stalled, its calls are half open: nobody gets a message or
an error. TCP and HTTP/2 themselves stay outside.
"""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from types import SimpleNamespace
from typing import Any

import grpc
from tests.simulation import threads
from tests.simulation.threads import EventLoop, Process

KEEPALIVE_S = 25.0  # after which a side notices that the other one is gone
WINDOW_MESSAGES = 8  # of a pipe, on their way; then the sender waits


class RpcError(grpc.RpcError):
    """What a client gets when a call ends badly."""

    def __init__(self, code: grpc.StatusCode, text: str, trailer: tuple[tuple[str, str], ...] = ()):
        super().__init__(text)
        self._code, self._text, self._trailer = code, text, trailer

    def code(self) -> grpc.StatusCode:
        return self._code

    def details(self) -> str:
        return self._text

    def trailing_metadata(self) -> tuple[tuple[str, str], ...]:
        return self._trailer


class _Aborted(Exception):
    """Ends a handler, as grpc.aio's AbortError does."""


_END = object()


class Link:
    """The way of one machine to the servers."""

    def __init__(self, rng: random.Random):
        self._rng = rng
        self.max_delay_s = 0.01
        self.stalled = False
        self.down = False  # new calls are refused
        self.waiting: list[Pipe] = []  # that hold messages until the link is healed

    def heal(self) -> None:
        self.stalled, self.down, self.max_delay_s = False, False, 0.01
        waiting, self.waiting = self.waiting, []
        for pipe in waiting:
            pipe.resume()

    def delay_s(self) -> float:
        return self._rng.random() * self.max_delay_s


class Pipe:
    """Messages in one direction."""

    def __init__(self, link: Link, receive: Callable[[Any], None]):
        self._link = link
        self._receive = receive
        self._last_ns = 0
        self._held: deque[Any] = deque()  # until the link is no longer stalled
        self.num_on_way = 0
        self.broken = False

    def send(self, message: Any) -> None:
        self.num_on_way += 1
        if self._link.stalled or self._held:
            if not self._held:
                self._link.waiting.append(self)
            self._held.append(message)
        else:
            self._send(message)

    def _send(self, message: Any) -> None:
        now_ns = threads.scheduler.now_ns
        self._last_ns = max(self._last_ns, now_ns + int(self._link.delay_s() * 1e9))
        threads.scheduler.call_at(self._last_ns, lambda: self._arrive(message))

    def resume(self) -> None:
        while self._held:
            self._send(self._held.popleft())

    def _arrive(self, message: Any) -> None:
        self.num_on_way -= 1
        if not self.broken:
            self._receive(message)


class Call:
    """One call, seen by both sides. What each knows of its end may differ."""

    def __init__(self, network: Network, link: Link, address: str, method: str, *, streams: bool):
        self._network = network
        self.link = link
        self.client = _process()
        self._server = network.servers.get(address)
        self._streams = streams  # whether the client sends a stream
        self._method = method
        self.to_server = Pipe(link, self._server_receives)
        self.to_client = Pipe(link, self._client_receives)
        self._responses: deque[Any] = deque()  # messages, and the error or _END that ends them
        self.client_over = False  # nothing more is sent by the client
        self.server_over = False
        self._requests: asyncio.Queue[Any] = asyncio.Queue()
        self._handler: asyncio.Task[Any] | None = None
        network.calls.append(self)
        if self._server is None or link.down:
            threads.scheduler.call_in(link.delay_s(), lambda: self.break_client("connection refused"))
        else:
            threads.scheduler.call_in(link.delay_s(), self._begin)

    # ---- the server's side

    def _begin(self) -> None:
        server = self._server
        if server is None or not server.process.alive or self.server_over:
            self.break_client("connection reset")
            return
        server.loop.wake(self._begin_in_loop)

    def _begin_in_loop(self) -> None:
        assert self._server is not None
        self._handler = self._server.loop.create_task(self._handle(self._server))

    async def _handle(self, server: SimulatedServer) -> None:
        handler = server.handler(self._method)
        context: Any = _Context(self)
        requests = self._iterate()
        try:
            if handler.request_streaming and handler.response_streaming:
                await handler.stream_stream(requests, context)
            elif handler.request_streaming:
                self.to_client.send(await handler.stream_unary(requests, context))
            elif handler.response_streaming:
                await handler.unary_stream(await anext(requests), context)
            else:
                self.to_client.send(await handler.unary_unary(await anext(requests), context))
            self.to_client.send(_END)
        except (_Aborted, asyncio.CancelledError):
            pass
        except StopAsyncIteration:
            self.to_client.send(RpcError(grpc.StatusCode.CANCELLED, "no request"))
        except Exception as error:  # noqa: BLE001 (as gRPC does; a handler's defect is a finding)
            server.process.errors.append(f"handler of {self._method}: {error!r}")
            self.to_client.send(RpcError(grpc.StatusCode.UNKNOWN, repr(error)))
        finally:
            self.server_over = True

    async def _iterate(self) -> AsyncIterator[bytes]:
        while (message := await self._requests.get()) is not _END:
            yield message

    def _server_receives(self, message: Any) -> None:
        server = self._server
        if server is not None and server.process.alive and not self.server_over:
            server.loop.wake(self._requests.put_nowait, message)

    def break_server(self) -> None:
        """The server notices that the client is gone: its handler is cancelled."""
        server = self._server
        if self.server_over or server is None or not server.process.alive:
            return
        self.to_server.broken = True

        def cancel() -> None:
            if self._handler is not None:
                self._handler.cancel()
            else:
                self.server_over = True

        server.loop.wake(cancel)

    # ---- the client's side

    def _client_receives(self, message: Any) -> None:
        if not self.client_over or message is _END or isinstance(message, RpcError):
            self._responses.append(message)

    def break_client(self, text: str, code: grpc.StatusCode = grpc.StatusCode.UNAVAILABLE) -> None:
        if not self.client_over:
            self.client_over = True
            self.to_client.broken = True
            self._responses.append(RpcError(code, text))

    def cancel(self) -> None:
        """The client gives up; the server hears of it later."""
        if not self.client_over:
            self.break_client("cancelled", grpc.StatusCode.CANCELLED)
            delay_s = KEEPALIVE_S if self.link.stalled else self.link.delay_s()
            threads.scheduler.call_in(delay_s, self.break_server)

    def send_all(self, messages: Iterator[bytes]) -> None:
        """GRPC's own thread."""
        for message in messages:
            if self.client_over:
                return
            if self.to_server.num_on_way >= WINDOW_MESSAGES:
                threads.scheduler.wait(lambda: self.to_server.num_on_way < WINDOW_MESSAGES or self.client_over)
            self.to_server.send(message)
        self.to_server.send(_END)

    def __iter__(self) -> Call:
        return self

    def __next__(self) -> bytes:
        if not self._responses:
            threads.scheduler.wait(lambda: bool(self._responses))
        message = self._responses[0]
        if message is _END or isinstance(message, RpcError):
            self.client_over = True
            raise StopIteration if message is _END else message
        self._responses.popleft()
        return bytes(message)

    def result(self, timeout_s: float | None) -> bytes:
        if not self._responses and not threads.scheduler.wait(lambda: bool(self._responses), timeout_s):
            self.cancel()
            raise RpcError(grpc.StatusCode.DEADLINE_EXCEEDED, "deadline exceeded")
        return next(self)


class _Context:
    """What a handler gets as its context."""

    def __init__(self, call: Call):
        self._call = call

    async def write(self, message: bytes) -> None:
        while self._call.to_client.num_on_way >= WINDOW_MESSAGES:
            await asyncio.sleep(0.01)
        self._call.to_client.send(message)

    async def abort(self, code: grpc.StatusCode, text: str, trailer: tuple[tuple[str, str], ...] = ()) -> None:
        self._call.to_client.send(RpcError(code, text, trailer))
        raise _Aborted

    def peer(self) -> str:
        return f"sim:{self._call.client.name}"

    def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
        return ()


class SimulatedServer:
    """The handlers of a Server, reachable at an address, in its event loop."""

    def __init__(self, server: Any, loop: EventLoop, process: Process):
        self.loop = loop
        self.process = process
        self._handlers = server._handlers()

    def handler(self, method: str) -> Any:
        details: Any = SimpleNamespace(method=method, invocation_metadata=())
        return next(found for one in self._handlers if (found := one.service(details)) is not None)


class Network:
    """All links, calls and servers."""

    def __init__(self, rng: random.Random):
        self._rng = rng
        self.servers: dict[str, SimulatedServer] = {}
        self.links: dict[str, Link] = {}  # by the client's machine
        self.calls: list[Call] = []

    def link(self, machine: str) -> Link:
        return self.links.setdefault(machine, Link(self._rng))

    def channel(self, address: str) -> Channel:
        return Channel(self, address)

    def cut(self, machine: str) -> int:
        """Break the calls of a client's machine; each side notices at once, later, or after the keepalive."""
        calls = [call for call in self._open_calls() if call.client.name == machine]
        for call in calls:
            threads.scheduler.call_in(self._notice_s(), lambda call=call: call.break_client("connection reset"))
            threads.scheduler.call_in(self._notice_s(), call.break_server)
        return len(calls)

    def server_died(self, process: Process, *, silently: bool) -> None:
        """The clients of a dead server notice: at once, or, if its machine is gone as well, by the keepalive."""
        for call in self._open_calls():
            if call._server is not None and call._server.process is process:
                delay_s = KEEPALIVE_S if silently else self._rng.random() * 0.1
                threads.scheduler.call_in(delay_s, lambda call=call: call.break_client("connection reset"))

    def client_died(self, process: Process) -> None:
        for call in self._open_calls():
            if call.client is process:
                call.client_over = True
                threads.scheduler.call_in(self._notice_s(), call.break_server)

    def _open_calls(self) -> list[Call]:
        self.calls = [call for call in self.calls if not (call.client_over and call.server_over)]
        return list(self.calls)

    def _notice_s(self) -> float:
        return self._rng.choice((0.0, self._rng.random(), KEEPALIVE_S * self._rng.random()))


class Channel:
    """gRPC's channel: makes calls to one address."""

    def __init__(self, network: Network, address: str):
        self._network = network
        self._address = address
        self._closed = False

    def close(self) -> None:
        self._closed = True
        for call in self._network._open_calls():
            if call.client is _process():
                call.cancel()

    def _call(self, method: str, *, streams: bool) -> Call:
        if self._closed:
            raise ValueError("Cannot invoke RPC on closed channel!")
        return Call(self._network, self._network.link(_process().name), self._address, method, streams=streams)

    def _ready(self, timeout_s: float | None) -> None:
        """GRPC's wait_for_ready: wait for a server."""
        link, servers = self._network.link(_process().name), self._network.servers
        threads.scheduler.wait(lambda: self._address in servers and not link.down, timeout_s)

    def unary_unary(self, method: str) -> Callable[..., bytes]:
        def call(request: bytes, *, timeout: float | None = None, wait_for_ready: bool = False, **_: Any) -> bytes:
            if wait_for_ready:
                self._ready(timeout)
            made = self._call(method, streams=False)
            made.to_server.send(request)
            return made.result(timeout)

        return call

    def stream_unary(self, method: str) -> Callable[..., bytes]:
        def call(
            requests: Iterator[bytes], *, timeout: float | None = None, wait_for_ready: bool = False, **_: Any
        ) -> bytes:
            if wait_for_ready:
                self._ready(timeout)
            made = self._call(method, streams=True)
            threads.scheduler.spawn(f"grpc:{made.client.name}", made.client, lambda: made.send_all(requests))
            return made.result(timeout)

        return call

    def stream_stream(self, method: str) -> Callable[..., Call]:
        def call(requests: Iterator[bytes], **_: Any) -> Call:
            made = self._call(method, streams=True)
            threads.scheduler.spawn(f"grpc:{made.client.name}", made.client, lambda: made.send_all(requests))
            return made

        return call

    def unary_stream(self, method: str) -> Callable[..., Call]:
        def call(request: bytes, **_: Any) -> Call:
            made = self._call(method, streams=False)
            made.to_server.send(request)
            made.to_server.send(_END)
            return made

        return call


def _process() -> Process:
    assert threads.scheduler.current is not None
    return threads.scheduler.current.process
