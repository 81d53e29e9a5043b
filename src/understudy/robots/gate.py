"""Gate: who and what gets through to an app: Host, Origin, token and size are checked before anything is read."""

from __future__ import annotations

import hmac
import json
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, TypeAlias

from understudy.robots.arm import ArmError
from understudy.web.access import check_access, is_loopback

Message: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[Message]]
Send: TypeAlias = Callable[[Message], Awaitable[None]]
App: TypeAlias = Callable[[MutableMapping[str, Any], Receive, Send], Awaitable[None]]

MAX_BODY_BYTES = 64 * 2**10


class Gate:
    """An app with a gate before it."""

    def __init__(self, app: App, *, host: str, token: str | None):
        check_access(host, token, ArmError)
        self._app = app
        self._on_loopback = is_loopback(host)
        self._token = token

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers: dict[bytes, bytes] = {name.lower(): value for name, value in scope["headers"]}
        refusal = self._refusal(headers)
        if refusal is not None:
            await _answer(send, *refusal)
            return
        taken = 0
        refused = False

        async def limited() -> Message:
            nonlocal taken, refused
            message = await receive()
            if message["type"] == "http.request":
                taken += len(message.get("body", b""))
                if taken > MAX_BODY_BYTES:
                    refused = True
                    await _answer(send, *_too_large(taken))
                    return {"type": "http.disconnect"}
            return message

        async def unless_refused(message: Message) -> None:
            if not refused:
                await send(message)

        await self._app(scope, limited, unless_refused)

    def _refusal(self, headers: dict[bytes, bytes]) -> tuple[int, str] | None:
        if self._on_loopback and not is_loopback(_without_port(headers.get(b"host", b""))):
            return 403, "host: expected 127.0.0.1 or localhost, since the server listens there; use one of these names"
        if b"origin" in headers:
            return 403, "origin: a web page may not drive an arm; use a program"
        if self._token is not None:
            wanted = f"Bearer {self._token}".encode()
            if not hmac.compare_digest(headers.get(b"authorization", b""), wanted):
                return 401, "the token is missing or wrong; send it as `Authorization: Bearer TOKEN`"
        length = headers.get(b"content-length", b"0")
        if length.isdigit() and len(length) < 20 and int(length) > MAX_BODY_BYTES:
            return _too_large(int(length))
        return None


def _without_port(host: bytes) -> str:
    text = host.decode("latin-1").lower()
    return text.partition("]")[0] if text.startswith("[") else text.partition(":")[0]


def _too_large(size: int) -> tuple[int, str]:
    return 413, f"body: expected up to {MAX_BODY_BYTES} bytes, got {size} or more; a command is small"


async def _answer(send: Send, status: int, why: str) -> None:
    body = json.dumps({"detail": why}).encode()
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
        (b"connection", b"close"),
    ]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
