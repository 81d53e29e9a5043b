import http.client
from collections.abc import MutableMapping
from typing import Any

import pytest

pytest.importorskip("uvicorn")

from understudy.web.app_server import AppServer
from understudy.web.auth import ProgramAuth, Receive, Send
from understudy.web.listener import listen


async def hello(scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"5")]})
    await send({"type": "http.response.body", "body": b"hello"})


def test_it_serves_from_the_constructor_to_close() -> None:
    listening = listen("127.0.0.1", 0)
    port = listening.getsockname()[1]
    with AppServer(ProgramAuth(hello, host="127.0.0.1", token=None), listening, name="test"):
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
        connection.request("GET", "/")
        reply = connection.getresponse()
        assert (reply.status, reply.read(), reply.headers["server"]) == (200, b"hello", None)
        connection.close()
    with pytest.raises(ConnectionRefusedError):
        http.client.HTTPConnection("127.0.0.1", port, timeout=10).connect()
