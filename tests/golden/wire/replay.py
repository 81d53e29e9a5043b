"""Recording the wire between a client and a server, and replaying either side of it.

A transcript is a list of calls; a call is its method, its messages in their order, and how it ended. Messages are
compared by what they mean, so that additions pass and removals fail: an object of JSON must have all the fields that
the recorded one has, and a message of arrays all its arrays and metadata.
"""

from __future__ import annotations

import base64
import json
import queue
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

import grpc
import numpy as np

from understudy.service.wire.message import parse_header, unpack
from understudy.service.wire.protocol import SERVICE, STATUS

CLIENT, SERVER = "client", "server"
TIMEOUT_S = 30.0
MAY_DIFFER = {"max_message_bytes"}  # fields whose value is a setting: the new one must have the same type
OPEN = "OPEN"  # the end of a call that the client broke off, as it does with streams


@dataclass(kw_only=True)
class Call:
    method: str
    messages: list[tuple[str, bytes]] = field(default_factory=list)
    code: str = OPEN
    trailer: dict[str, str] = field(default_factory=dict)
    by_hand: bool = False  # made by the recording program and not by our client


def save(path: Path, calls: list[Call]) -> None:
    lines = []
    for call in calls:
        messages = [[side, base64.b64encode(content).decode()] for side, content in call.messages]
        lines.append(json.dumps({**vars(call), "messages": messages}))
    path.write_text("\n".join(lines) + "\n")


def load(path: Path) -> list[Call]:
    calls = []
    for line in path.read_text().splitlines():
        found = json.loads(line)
        messages = [(side, base64.b64decode(content)) for side, content in found.pop("messages")]
        calls.append(Call(messages=messages, **found))
    return calls


# ---- what a message means


def meanings(pieces: Iterator[bytes]) -> Iterator[Any]:
    """The messages of one side: JSON values, and pairs of metadata and arrays, which may come in pieces."""
    for piece in pieces:
        if piece[:1] in (b"{", b"["):
            yield json.loads(piece)
            continue
        header = parse_header(piece)
        content = piece
        while len(content) < header.num_bytes + header.body_bytes:
            content += next(pieces)
        yield unpack(content)


def check_has(found: Any, recorded: Any, where: str) -> None:
    """Fail unless `found` has all that `recorded` has."""
    if isinstance(recorded, dict):
        assert isinstance(found, dict), f"{where}: expected an object, got {found!r}"
        for name, value in recorded.items():
            assert name in found, f"{where}: {name!r} is gone"
            if name in MAY_DIFFER:
                assert type(found[name]) is type(value), f"{where}/{name}"
            else:
                check_has(found[name], value, f"{where}/{name}")
    elif isinstance(recorded, np.ndarray):
        assert (found.dtype, found.shape) == (recorded.dtype, recorded.shape), where
        assert np.array_equal(found, recorded), where
    elif isinstance(recorded, tuple):
        for index, value in enumerate(recorded):
            check_has(found[index], value, where)
    elif isinstance(recorded, list):
        assert isinstance(found, list), where
        assert len(found) >= len(recorded), f"{where}: {found} is shorter than {recorded}"
        for index, value in enumerate(recorded):
            check_has(found[index], value, f"{where}/{index}")
    elif isinstance(recorded, str) and recorded[:1] in ("[", "{"):  # JSON inside of metadata
        check_has(json.loads(found), json.loads(recorded), where)
    else:
        assert found == recorded, f"{where}: expected {recorded!r}, got {found!r}"


# ---- recording


@contextmanager
def recording(address: str) -> Iterator[tuple[str, list[Call]]]:
    """The address of a proxy of a server, and the calls that go through it."""
    calls: list[Call] = []
    with grpc.insecure_channel(address) as channel, _serving(_proxy(channel, calls)) as proxy:
        yield proxy, calls


def _proxy(channel: grpc.Channel, calls: list[Call]) -> Callable[[str, Iterator[bytes], Any], Iterator[bytes]]:
    def forward(method: str, requests: Iterator[bytes], context: Any) -> Iterator[bytes]:
        call = Call(method=method)
        calls.append(call)

        def taken() -> Iterator[bytes]:
            for message in requests:
                call.messages.append((CLIENT, message))
                yield message

        responses = channel.stream_stream(f"/{SERVICE}/{method}")(taken())
        context.add_callback(responses.cancel)
        try:
            for message in responses:
                call.messages.append((SERVER, message))
                yield message
            call.code = grpc.StatusCode.OK.name
        except grpc.RpcError as error:
            if error.code() is not grpc.StatusCode.CANCELLED:
                call.code = error.code().name
                call.trailer = {k: v for k, v in error.trailing_metadata() if k.startswith("understudy-")}
                context.set_trailing_metadata(tuple(call.trailer.items()))
                context.abort(error.code(), error.details())

    return forward


@contextmanager
def _serving(answer: Callable[[str, Iterator[bytes], Any], Iterator[bytes]]) -> Iterator[str]:
    """A server of raw bytes: `answer` gets the method, the requests and the context, and yields responses."""

    class Handler(grpc.GenericRpcHandler):
        def service(self, details: Any) -> Any:
            method = details.method.rpartition("/")[2]
            return grpc.stream_stream_rpc_method_handler(lambda requests, ctx: answer(method, requests, ctx))

    server = grpc.server(ThreadPoolExecutor(16))
    server.add_generic_rpc_handlers((Handler(),))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        server.stop(None).wait()


# ---- replaying


def replay_client(call: Call, address: str) -> None:
    """Send what a recorded client sent, in its order, to a server; its answers must have all that was recorded."""
    outgoing: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
    with grpc.insecure_channel(address) as channel:
        responses = channel.stream_stream(f"/{SERVICE}/{call.method}")(iter(outgoing.get, None), timeout=TIMEOUT_S)
        answers = meanings(responses)
        recorded = meanings(content for side, content in call.messages if side == SERVER)
        code, trailer = OPEN, {}
        try:
            rest = 0  # bytes of the recorded message that are in the next pieces
            for side, content in call.messages:
                if side == CLIENT:
                    outgoing.put(content)
                elif rest > 0:
                    rest -= len(content)
                else:
                    rest = _rest(content)
                    check_has(next(answers), next(recorded), call.method)
            if call.code != OPEN:
                outgoing.put(None)
                for _ in answers:
                    pass
                code = grpc.StatusCode.OK.name
        except grpc.RpcError as error:
            code, trailer = error.code().name, dict(error.trailing_metadata())
        finally:
            outgoing.put(None)
            responses.cancel()
    assert code == call.code, f"{call.method}: ended with {code}, and recorded is {call.code}"
    check_has(trailer, call.trailer, f"{call.method}: trailer")


def _rest(content: bytes) -> int:
    """How many bytes of a message are in the pieces that follow this one."""
    if content[:1] in (b"{", b"["):
        return 0
    header = parse_header(content)
    return header.num_bytes + header.body_bytes - len(content)


@contextmanager
def replayed_server(calls: list[Call]) -> Iterator[tuple[str, list[str]]]:
    """A server that answers as recorded, each method in its order; and the problems with what clients sent.

    A client may ask for the status of no view, which is not recorded: so it learns whether there is a server.
    """
    left = [call for call in calls if not call.by_hand]
    problems: list[str] = []
    lock = threading.Lock()

    def answer(method: str, requests: Iterator[bytes], context: Any) -> Iterator[bytes]:
        if method == STATUS:
            asked = next(requests)
            if not json.loads(asked)["views"]:
                yield b"{}"
                return
            requests = chain([asked], requests)
        with lock:
            call = next((call for call in left if call.method == method), None)
            if call is not None:
                left.remove(call)
        if call is None:
            problems.append(f"{method}: called more often than recorded")
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, "not recorded")
            return
        sent = meanings(iter(requests))
        recorded = meanings(content for side, content in call.messages if side == CLIENT)
        rest = 0
        for side, content in call.messages:
            if side == SERVER:
                yield content
            elif rest > 0:
                rest -= len(content)
            else:
                rest = _rest(content)
                try:
                    check_has(next(sent), next(recorded), method)
                except (AssertionError, StopIteration) as error:
                    problems.append(f"{method}: {error!r}")
        if call.code not in (OPEN, grpc.StatusCode.OK.name):
            context.set_trailing_metadata(tuple(call.trailer.items()))
            context.abort(getattr(grpc.StatusCode, call.code), "as recorded")
        elif call.code == grpc.StatusCode.OK.name:  # the client ends its side first
            problems.extend(f"{method}: more was sent than recorded: {more}" for more in sent)
        else:
            broken_off = threading.Event()
            context.add_callback(broken_off.set)
            broken_off.wait(TIMEOUT_S)

    with _serving(answer) as address:
        yield address, problems
    problems += [f"{call.method}: not called" for call in left]
