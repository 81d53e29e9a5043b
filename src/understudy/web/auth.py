"""Auth: checks in front of an ASGI app. Host, Origin, token and size are checked before a body is read.

`ProgramAuth` is for a server that programs use: no page in a browser may ask it anything.

`PageAuth` is for a page in a browser. Its files are given to anyone who may ask this server at all; they hold nothing
secret. The rest needs the token, if there is one: as `Authorization: Bearer`, or as the cookie that a page gets for it,
because a browser's images and event streams carry no headers. Requests that change something must come from a page of
this server. The operator's page speaks over a websocket and sends the token in its first message
(envs/teleop/browser_server.py).
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, MutableMapping, Sequence
from http.cookies import CookieError, SimpleCookie
from typing import Any, TypeAlias

from understudy.web.access import AllowedHosts, check_access, host_name, is_loopback, is_same_origin
from understudy.web.tokens import bearer_matches, token_matches

Message: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[Message]]
Send: TypeAlias = Callable[[Message], Awaitable[None]]
App: TypeAlias = Callable[[MutableMapping[str, Any], Receive, Send], Awaitable[None]]
Headers: TypeAlias = Mapping[bytes, bytes]  # by names in lower case
Refusal: TypeAlias = tuple[int, str]  # status and reason

MAX_BODY_BYTES = 64 * 2**10
TOO_LARGE: Refusal = (413, f"body: expected up to {MAX_BODY_BYTES} bytes, got more; send less at once")


def page_headers(content_security_policy: str) -> dict[str, str]:
    """The headers of every reply to a browser: no other site may frame, read or run anything of the page."""
    return {
        "Content-Security-Policy": content_security_policy,
        "Cross-Origin-Opener-Policy": "same-origin",
        "Cross-Origin-Resource-Policy": "same-origin",
        "X-Content-Type-Options": "nosniff",
        "X-Frame-Options": "DENY",
        "Referrer-Policy": "no-referrer",
        "Cache-Control": "no-store",
    }


class _Auth(ABC):
    """An app behind checks; a request that is refused never reaches it."""

    def __init__(self, app: App):
        self._app = app

    @abstractmethod
    def refusal(self, method: str, path: str, headers: Headers) -> Refusal | None:
        """Why a request is refused, or None."""

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers: dict[bytes, bytes] = {name.lower(): value for name, value in scope["headers"]}
        refusal = self.refusal(scope["method"], scope["path"], headers) or _size_refusal(headers)
        if refusal is not None:
            await _reply(send, *refusal)
            return
        received = 0
        refused = False

        async def receive_limited() -> Message:
            nonlocal received, refused
            message = await receive()
            if message["type"] == "http.request":
                received += len(message.get("body", b""))
                if received > MAX_BODY_BYTES:
                    refused = True
                    await _reply(send, *TOO_LARGE)
                    return {"type": "http.disconnect"}
            return message

        async def send_unless_refused(message: Message) -> None:
            if not refused:
                await send(message)

        await self._app(scope, receive_limited, send_unless_refused)


class ProgramAuth(_Auth):
    """For programs: requests of browsers are refused, and on loopback those with a foreign Host."""

    def __init__(self, app: App, *, host: str, token: str | None):
        check_access(host, token)
        super().__init__(app)
        self._on_loopback = is_loopback(host)
        self._token = token

    def refusal(self, method: str, path: str, headers: Headers) -> Refusal | None:
        if self._on_loopback and not is_loopback(host_name(headers.get(b"host", b"").decode("latin-1"))):
            return 403, "host: expected 127.0.0.1 or localhost, since the server listens there; use one of these names"
        if b"origin" in headers:
            return 403, "origin: a web page may not use this server; use a program"
        if self._token is not None and not bearer_matches(headers.get(b"authorization", b""), self._token):
            return 401, "the token is missing or wrong; send it as `Authorization: Bearer TOKEN`"
        return None


class LoginCookie:
    """The cookie that a page gets in exchange for the token; it does not contain the token."""

    def __init__(self, token: str | None, *, port: int):
        self.name = f"understudy_{port}"  # cookies know no ports
        self._token = token
        self._value = "" if token is None else hashlib.sha256(b"understudy page " + token.encode()).hexdigest()

    def exchange(self, token: str) -> str | None:
        """The cookie's value for one who has the token, else None."""
        return self._value if self._token is not None and token_matches(token, self._token) else None

    def admits(self, headers: Headers) -> bool:
        """Whether a request carries the token or this cookie, or needs neither."""
        if self._token is None or bearer_matches(headers.get(b"authorization", b""), self._token):
            return True
        with contextlib.suppress(CookieError):
            found = SimpleCookie(headers.get(b"cookie", b"").decode("latin-1")).get(self.name)
            return found is not None and token_matches(found.value.encode("latin-1", "replace"), self._value)
        return False


class PageAuth(_Auth):
    """For a page: only known names as Host, only its own pages as Origin; all but public paths need the token.

    `hosts` are further names by which this server is asked for. `headers` are added to every reply.
    """

    def __init__(
        self,
        app: App,
        *,
        host: str,
        hosts: Sequence[str],
        cookie: LoginCookie,
        is_public: Callable[[str], bool],
        headers: Mapping[str, str],
    ):
        super().__init__(app)
        self._hosts = AllowedHosts(host, hosts)
        self._cookie = cookie
        self._is_public = is_public
        self._headers = [(name.lower().encode(), value.encode()) for name, value in headers.items()]

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                given = {name.lower() for name, _ in message["headers"]}
                message["headers"] = [*message["headers"], *(pair for pair in self._headers if pair[0] not in given)]
            await send(message)

        await super().__call__(scope, receive, send_with_headers)

    def refusal(self, method: str, path: str, headers: Headers) -> Refusal | None:
        host = headers.get(b"host", b"").decode("latin-1")
        if host not in self._hosts:
            return 421, f"This server is not known as {host[:100]!r}; use the address that it printed, or --hosts."
        origin = headers.get(b"origin", b"").decode("latin-1")
        if (origin or method not in ("GET", "HEAD")) and not is_same_origin(origin, host):
            return 403, f"A page from {origin[:100]!r} may not use this server."
        if not self._is_public(path) and not self._cookie.admits(headers):
            return 401, "the token is missing or wrong; open the address that the program printed"
        return None


def _size_refusal(headers: Headers) -> Refusal | None:
    length = headers.get(b"content-length", b"0")
    return TOO_LARGE if not length.isdigit() or len(length) > 18 or int(length) > MAX_BODY_BYTES else None


async def _reply(send: Send, status: int, reason: str) -> None:
    body = json.dumps({"detail": reason}).encode()
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
        (b"connection", b"close"),
    ]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
