"""ArmServer: an arm over HTTP, and Listener, which runs an app on a port.

| loop | takes from | blocks on | woken by |
|---|---|---|---|
| `http`, one thread for each port | requests | nothing | sockets, the control loop |
| `control` | see control.py | | |
"""

from __future__ import annotations

import socket
import threading

import uvicorn

from understudy.core.closing import Closes
from understudy.robots.app import make_app
from understudy.robots.arm import Arm, ArmError
from understudy.robots.control import Control
from understudy.robots.gate import App, Gate

KEEP_ALIVE_S = 60
START_S = 10.0


class Listener:
    """An app behind a gate on a port, from the constructor to `close`."""

    def __init__(self, app: App, *, host: str, port: int, token: str | None):
        gate = Gate(app, host=host, token=token)
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        # With the protocol named, asyncio switches Nagle's algorithm off, which would cost 40 ms a request.
        self._socket = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            self._socket.bind((host.strip("[]"), port))
        except OSError as error:
            self._socket.close()
            raise ArmError(f"cannot listen on {host}:{port} ({error}); is another server there?") from None
        shown = f"[{host.strip('[]')}]" if family == socket.AF_INET6 else host
        self.url = f"http://{shown}:{self._socket.getsockname()[1]}"
        config = uvicorn.Config(
            gate,
            log_config=None,
            access_log=False,
            lifespan="off",
            ws="none",
            http="h11",
            loop="asyncio",
            proxy_headers=False,
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=1,
        )
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run, args=([self._socket],), name="http", daemon=True)
        self._thread.start()
        for _ in range(int(START_S / 0.01)):
            if self._server.started:
                return
            self._thread.join(0.01)
        raise ArmError(f"{self.url}: the server did not start within {START_S:g} s")

    def close(self) -> None:
        self._server.should_exit = True
        self._thread.join()
        self._socket.close()


class ArmServer(Closes):
    """Drives an arm and listens for clients, from the constructor to `close`. The arm stays open."""

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
        self._listener = Listener(make_app(self.control, scene=scene), host=host, port=port, token=token)
        self.url = self._listener.url
        self.control.start()

    def close(self) -> None:
        self._listener.close()
        self.control.stop()
