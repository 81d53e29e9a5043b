"""Door: the gate before the page. Who it is for: Host, Origin, token; what it may do in a browser: the headers.

The files of the page are given to anyone who may ask this server at all; they hold nothing of the run. All that does
stands below /api and needs the token, if there is one: as `Authorization: Bearer`, or as the cookie that a page gets
for it, because a browser's pictures and event streams carry no headers. What changes something is a POST from a page
of this server.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
from collections.abc import MutableMapping, Sequence
from http.cookies import CookieError, SimpleCookie
from typing import Any

from starlette.responses import JSONResponse

from understudy.envs.teleop.browser_listen import Names
from understudy.robots.gate import MAX_BODY_BYTES, App, Gate, Message, Receive, Send

ENTER = "/api/enter"
HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' blob: data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
}


class Door(Gate):
    """An app with the door before it. `hosts` are more names by which this server is asked for."""

    def __init__(self, app: App, *, host: str, port: int, token: str | None, hosts: Sequence[str] = ()):
        super().__init__(app, host=host, token=token)
        self._names = Names(host, hosts)
        self.cookie = f"understudy_{port}"  # cookies know no ports
        self.needs_token = token is not None
        self._pass = b"" if token is None else hashlib.sha256(b"understudy page " + token.encode()).hexdigest().encode()

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        async def guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                there = {name.lower() for name, _ in message["headers"]}
                more = {**HEADERS, "cache-control": "no-store"}
                message["headers"] = [
                    *message["headers"],
                    *((n.encode(), v.encode()) for n, v in more.items() if n.encode() not in there),
                ]
            await send(message)

        if scope["type"] == "http":
            headers: dict[bytes, bytes] = {name.lower(): value for name, value in scope["headers"]}
            refusal = self._stops(scope["method"], scope["path"], headers)
            if refusal is not None:
                status, why = refusal
                await JSONResponse({"detail": why}, status)(scope, receive, guarded)
                return
        await super().__call__(scope, receive, guarded)

    def enter(self, token: str) -> str | None:
        """The cookie's value for one who knows the token."""
        known = self._token is not None and hmac.compare_digest(token.encode(), self._token.encode())
        return self._pass.decode() if known else None

    def _stops(self, method: str, path: str, headers: dict[bytes, bytes]) -> tuple[int, str] | None:
        host = headers.get(b"host", b"").decode("latin-1")
        if host not in self._names:
            return 421, f"This server is not known as {host[:100]!r}; use the address that it printed, or --hosts."
        origin = headers.get(b"origin", b"").decode("latin-1")
        if (origin or method not in ("GET", "HEAD")) and origin not in (f"http://{host}", f"https://{host}"):
            return 403, f"A page from {origin[:100]!r} may not ask here."
        if path.startswith("/api/") and path != ENTER and not self._admits(headers):
            return 401, "the token is missing or wrong; open the address that `understudy watch` printed"
        return None

    def _refusal(self, headers: dict[bytes, bytes]) -> tuple[int, str] | None:
        """What the gate itself still looks at: the size. The rest is `_stops`."""
        length = headers.get(b"content-length", b"0")
        if not length.isdigit() or len(length) > 18 or int(length) > MAX_BODY_BYTES:
            return 413, f"body: expected up to {MAX_BODY_BYTES} bytes; ask for fewer episodes at once"
        return None

    def _admits(self, headers: dict[bytes, bytes]) -> bool:
        if self._token is None:
            return True
        if hmac.compare_digest(headers.get(b"authorization", b""), f"Bearer {self._token}".encode()):
            return True
        with contextlib.suppress(CookieError):
            found = SimpleCookie(headers.get(b"cookie", b"").decode("latin-1")).get(self.cookie)
            return found is not None and hmac.compare_digest(found.value.encode("latin-1", "replace"), self._pass)
        return False
