"""Channel: JSON objects, a line each, between a worker and its caller; no pickle.

Both ends use it. The caller's end never blocks; the worker's end (`blocking`) waits in `receive`. Both avoid system
calls where they can, because these dominate the cost of sending a step.
"""

from __future__ import annotations

import base64
import json
import select
import socket
import time
from typing import Any

import numpy as np

from understudy.core.spec import ArraySpec
from understudy.processes.messages import plain

MAX_MESSAGE_BYTES = 64 * 2**20
_PIECE_BYTES = 256 * 2**10


class ChannelClosed(Exception):
    """The other end is gone."""


class ChannelGarbage(Exception):
    """Bytes that are not a message."""


class ChannelStuck(Exception):
    """The other end does not read."""


class Channel:
    """One end of a stream socket."""

    def __init__(self, sock: socket.socket, *, blocking: bool = False):
        sock.setblocking(blocking)
        self._socket = sock
        self._received = bytearray()
        self._searched = 0  # this many leading bytes of `_received` hold no end of line
        self._poll = select.poll()
        self._poll.register(sock, select.POLLIN)

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, message: dict[str, Any], *, timeout_s: float | None = None) -> None:
        """Send a message; blocks while the socket's buffer is full, because the other end does not read."""
        data = _encode(message).encode() + b"\n"
        if len(data) > MAX_MESSAGE_BYTES:
            raise ValueError(f"message: expected up to {MAX_MESSAGE_BYTES} bytes, got {len(data)}; send less at once")
        sent = 0
        deadline = None
        while sent < len(data):
            try:
                sent += self._socket.send(data[sent:] if sent else data)
            except BlockingIOError:
                if timeout_s is not None and deadline is None:
                    deadline = time.monotonic() + timeout_s
                self._wait_until_writable(deadline)
            except OSError:
                raise ChannelClosed from None

    def _wait_until_writable(self, deadline: float | None) -> None:
        left_s = None if deadline is None else deadline - time.monotonic()
        if left_s is not None and left_s <= 0:
            raise ChannelStuck
        waiting = select.poll()
        waiting.register(self._socket, select.POLLOUT)
        waiting.poll(None if left_s is None else left_s * 1000)

    def wait(self, timeout_s: float | None) -> None:
        """Block until there is something to read, or until the timeout."""
        self._poll.poll(None if timeout_s is None else max(0.0, timeout_s * 1000))

    def take(self) -> dict[str, Any] | None:
        """The next complete message, or None if it has not arrived; a blocking channel waits for it."""
        while True:
            line = self._line() if self._received else None
            if line is not None:
                return _message(line)
            try:
                piece = self._socket.recv(_PIECE_BYTES)
            except BlockingIOError:
                return None
            except OSError:
                raise ChannelClosed from None
            if not piece:
                raise ChannelClosed
            if not self._received and piece.find(b"\n") == len(piece) - 1:  # one complete message, the usual case
                return _message(piece)
            self._received += piece

    def receive(self) -> dict[str, Any]:
        """Block until the next message has arrived, and return it."""
        message = self.take()
        assert message is not None, "only a blocking channel waits"
        return message

    def _line(self) -> bytes | None:
        end = self._received.find(b"\n", self._searched)
        if end < 0:
            self._searched = len(self._received)
            if self._searched > MAX_MESSAGE_BYTES:
                raise ChannelGarbage(f"{self._searched} bytes without an end of line")
            return None
        line = bytes(self._received[:end])
        del self._received[: end + 1]
        self._searched = 0
        return line


def _message(line: bytes) -> dict[str, Any]:
    try:
        message = json.loads(line)
    except (ValueError, RecursionError):
        raise ChannelGarbage(f"{line[:60]!r}") from None
    if not isinstance(message, dict):
        raise ChannelGarbage(f"{line[:60]!r}")
    return message


_encode = json.JSONEncoder(separators=(",", ":"), default=plain).encode


def encode_leaf(value: Any) -> Any:
    """A value of a ragged leaf: text as it is, an array as its shape and bytes."""
    if isinstance(value, str):
        return value
    return [list(value.shape), base64.b64encode(np.ascontiguousarray(value).tobytes()).decode()]


def decode_leaf(leaf: ArraySpec, value: Any, path: str) -> Any:
    """The inverse of `encode_leaf`; raises SpecError, ValueError or TypeError if the value does not fit the leaf."""
    if leaf.dtype != "str":
        shape, coded = value
        value = np.frombuffer(base64.b64decode(coded, validate=True), leaf.numpy_dtype).reshape(shape).copy()
    return leaf.check(value, path)
