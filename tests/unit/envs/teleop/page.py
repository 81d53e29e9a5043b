"""The page of a BrowserDevice without a browser: a real socket, and what the page sends through it."""

from __future__ import annotations

import contextlib
import json
import struct
import time
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("websockets")
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import ClientConnection, connect

from understudy.envs.teleop.browser import BrowserDevice


def port_of(device: BrowserDevice) -> int:
    return int(device.url.split("/")[2].rpartition(":")[2])


class Page:
    """What a page says and hears, without a browser. Its clock is ours, and an hour ahead."""

    def __init__(
        self, device: BrowserDevice, name: str = "page-one", *, token: str | None = None, answers: bool = True
    ):
        port = port_of(device)
        self._undo = contextlib.ExitStack()
        self.socket: ClientConnection = self._undo.enter_context(open_socket(port, f"http://127.0.0.1:{port}"))
        self.state: dict[str, Any] = {}
        self.frames: list[tuple[dict[str, Any], bytes]] = []
        self._answers = answers
        self.say({"type": "hello", "page": name, "token": token})

    def say(self, message: Any) -> None:
        self.socket.send(message if isinstance(message, str | bytes) else json.dumps(message))

    def hear(self, seconds: float = 0.1) -> None:
        """Take what comes, and answer pings, for a while."""
        end_s = time.monotonic() + seconds
        while (left_s := end_s - time.monotonic()) > 0:
            with contextlib.suppress(TimeoutError):
                message = self.socket.recv(timeout=left_s)
                if isinstance(message, bytes):
                    (length,) = struct.unpack_from("<I", message)
                    self.frames.append((json.loads(message[4 : 4 + length]), message[4 + length :]))
                    continue
                said = json.loads(message)
                if said["type"] == "state":
                    self.state = said
                if said["type"] == "ping" and self._answers:
                    self.say({"type": "pong", "sent_s": said["sent_s"], "page_ms": self.now_ms()})

    def hear_until(self, condition: Callable[[], bool], timeout_s: float = 10.0) -> None:
        """Take what comes until a condition holds."""
        end_s = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < end_s, f"after {timeout_s} s: {self.state}, {len(self.frames)} frames"
            self.hear(0.01)

    @staticmethod
    def now_ms(ago_s: float = 0.0) -> float:
        return (time.monotonic() + 3600 - ago_s) * 1e3

    def press(self, *keys: str, ago_s: float = 0.0, **more: Any) -> None:
        self.say({"type": "input", "made_ms": self.now_ms(ago_s), "keys": list(keys), **more})

    def closed(self) -> tuple[int, str]:
        """How the server closed the socket."""
        with self._undo, pytest.raises(ConnectionClosed) as closed:
            self.hear(3.0)
        assert closed.value.rcvd is not None
        return closed.value.rcvd.code, closed.value.rcvd.reason

    def __enter__(self) -> Page:
        self.hear_until(lambda: bool(self.state))
        self.hear(0.02)
        return self

    def __exit__(self, *_: object) -> None:
        self._undo.close()


def open_socket(port: int, origin: str | None) -> Any:
    return connect(f"ws://127.0.0.1:{port}/socket", origin=origin, compression=None, max_queue=None)  # type: ignore[arg-type]
