"""WatchServer: the page on a port.

| loop | takes from | blocks on | woken by |
|---|---|---|---|
| `watch`, one thread with an event loop | requests | nothing | sockets, clocks |
| workers of the event loop | one request each | the disk, a store's reader | the event loop |
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path

import uvicorn

from understudy.core import UnderstudyError
from understudy.core.closing import Closes
from understudy.dashboard.api.app import make_app
from understudy.dashboard.api.door import Door
from understudy.dashboard.api.live import Live
from understudy.dashboard.api.targets import make_places
from understudy.envs.teleop.browser_listen import listen, shown_host

START_S = 10.0
KEEP_ALIVE_S = 60


class WatchServer(Closes):
    """Shows runs and stores from the constructor to `close`."""

    def __init__(
        self,
        paths: Sequence[Path],
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        token: str | None = None,
        hosts: Sequence[str] = (),
    ):
        self._places = make_places(list(paths))
        self._live = Live(self._places)
        app = make_app(self._places, self._live, lambda: self._door)
        self._socket = listen(host.strip("[]"), port)
        self.port: int = self._socket.getsockname()[1]
        try:
            self._door = Door(app, host=host.strip("[]"), port=self.port, token=token, hosts=hosts)
        except BaseException:
            self._socket.close()
            raise
        shown = f"http://{shown_host(host.strip('[]'))}:{self.port}/"
        self.url = shown + (f"#token={token}" if token is not None else "")
        config = uvicorn.Config(
            self._door,
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
        self._thread = threading.Thread(target=self._server.run, args=([self._socket],), name="watch", daemon=True)
        self._thread.start()
        for _ in range(int(START_S / 0.01)):
            if self._server.started:
                return
            self._thread.join(0.01)
        raise UnderstudyError(f"{self.url}: the page did not start within {START_S:g} s")

    def close(self) -> None:
        self._live.over = True
        self._server.should_exit = True
        self._thread.join()
        self._socket.close()
        for place in self._places:
            place.close()
