"""WatchServer: serves the dashboard's page on a port.

| loop | takes from | blocks on | woken by |
|---|---|---|---|
| `watch`, one thread with an event loop | requests | nothing | sockets, timers |
| thread pool of the event loop | one request each | the disk, a store's reader | the event loop |
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from understudy.core.closeable import Closeable
from understudy.dashboard.api.app import LOGIN, make_app
from understudy.dashboard.api.change_events import ChangeEvents
from understudy.dashboard.api.targets import make_targets
from understudy.web.access import check_access
from understudy.web.app_server import AppServer
from understudy.web.auth import LoginCookie, PageAuth, page_headers
from understudy.web.listener import listen, page_url

CONTENT_SECURITY_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' blob: data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


class WatchServer(Closeable):
    """Shows runs and stores from the constructor to `close`; with `or_any_free`, at another port if `port` is taken."""

    def __init__(
        self,
        paths: Sequence[Path],
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        or_any_free: bool = False,
        token: str | None = None,
        hosts: Sequence[str] = (),
    ):
        check_access(host, token, in_url=True)
        self._targets = make_targets(list(paths))
        self._changes = ChangeEvents(self._targets)
        listening = listen(host, port, or_any_free=or_any_free)
        self.port: int = listening.getsockname()[1]
        self.url = page_url(host, listening, token)
        cookie = LoginCookie(token, port=self.port)
        app = PageAuth(
            make_app(self._targets, self._changes, cookie),
            host=host.strip("[]"),
            hosts=hosts,
            cookie=cookie,
            is_public=lambda path: not path.startswith("/api/") or path == LOGIN,
            headers=page_headers(CONTENT_SECURITY_POLICY),
        )
        self._server = AppServer(app, listening, name="watch")

    def close(self) -> None:
        self._changes.close()
        self._server.close()
        for target in self._targets:
            target.close()
