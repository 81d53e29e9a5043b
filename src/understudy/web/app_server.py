"""AppServer: an ASGI app on a socket, in a thread of its own.

| loop | takes from | blocks on | woken by |
|---|---|---|---|
| the thread `name`, with an event loop | requests | nothing | sockets, clocks |
| workers of the event loop | one request each | what the app does | the event loop |
"""

from __future__ import annotations

import socket
import threading

import uvicorn

from understudy.core.closeable import Closeable
from understudy.web.auth import App
from understudy.web.errors import ListenError

START_S = 10.0
KEEP_ALIVE_S = 60


class AppServer(Closeable):
    """Serves from the constructor to `close`, which also closes the socket."""

    def __init__(self, app: App, listening: socket.socket, *, name: str):
        self._socket = listening
        config = uvicorn.Config(
            app,
            log_config=None,
            access_log=False,
            lifespan="off",
            ws="none",
            http="h11",
            loop="asyncio",
            proxy_headers=False,
            server_header=False,
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=1,
        )
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run, args=([listening],), name=name, daemon=True)
        self._thread.start()
        for _ in range(int(START_S / 0.01)):
            if self._server.started:
                return
            self._thread.join(0.01)
        address, port = listening.getsockname()[:2]
        raise ListenError(f"{address}:{port}: the server did not start within {START_S:g} s; start it again")

    def close(self) -> None:
        self._server.should_exit = True
        self._thread.join()
        self._socket.close()
