"""ArmServer: an arm over HTTP.

| loop | takes from | blocks on | woken by |
|---|---|---|---|
| `http`, one thread | requests | nothing | sockets, the control loop |
| `control` | see control.py | | |
"""

from __future__ import annotations

from understudy.core.closeable import Closeable
from understudy.robots.app import make_app
from understudy.robots.arm import Arm
from understudy.robots.control import Control
from understudy.web.app_server import AppServer
from understudy.web.auth import App, ProgramAuth
from understudy.web.listener import listen, server_url


class ProgramServer(Closeable):
    """An app for programs at `url`, from the constructor to `close`."""

    def __init__(self, app: App, *, host: str, port: int, token: str | None):
        checked = ProgramAuth(app, host=host, token=token)
        listening = listen(host, port)
        self.url = server_url(host, listening)
        self._server = AppServer(checked, listening, name="http")

    def close(self) -> None:
        self._server.close()


class ArmServer(Closeable):
    """Drives an arm and serves clients, from the constructor to `close`. The arm itself stays open."""

    def __init__(
        self,
        arm: Arm,
        *,
        host: str = "127.0.0.1",
        port: int = 5000,
        token: str | None = None,
        rate_hz: float = 200.0,
        scene: str | None = None,
    ):
        self.control = Control(arm, rate_hz=rate_hz)
        self._server = ProgramServer(make_app(self.control, scene=scene), host=host, port=port, token=token)
        self.url = self._server.url
        self.control.start()

    def close(self) -> None:
        self._server.close()
        self.control.stop()
