"""Connections that never say anything: they are closed, there are only so many, and honest clients are served."""

from __future__ import annotations

import socket
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from tests.waiting import wait_for
from tests.writing import write_episode

from understudy.core.examples import random_episode, small_spec
from understudy.service import Remote, Server

TOKEN = "0123456789abcdef"


def is_closed(connection: socket.socket) -> bool:
    """Whether the server has closed a connection; what it sent before that does not count."""
    connection.setblocking(False)
    try:
        while connection.recv(1000):
            pass
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True


def test_silent_connections_are_limited_and_closed(
    serve: Callable[..., Server], remote_to: Callable[..., Remote], tmp_path: Path, cleanup: ExitStack
) -> None:
    server = serve(token=TOKEN, max_connections=8, handshake_timeout_s=2.0)
    remote = remote_to(server, token=TOKEN)
    writer = cleanup.enter_context(remote.writer("honest", small_spec(), spool=tmp_path / "spool"))
    write_episode(writer, random_episode(small_spec(), 5, 0))
    assert writer.wait_delivered(timeout_s=60)
    host, port = server.address.split(":")
    silent = [cleanup.enter_context(socket.create_connection((host, int(port)))) for _ in range(40)]
    wait_for(lambda: sum(map(is_closed, silent)) >= 40 - 8)  # at once: there are only so many
    write_episode(writer, random_episode(small_spec(), 5, 1))
    assert writer.wait_delivered(timeout_s=60)
    wait_for(lambda: all(map(is_closed, silent)))  # they never said hello
    assert remote_to(server, token=TOKEN).status()  # a new client finds room
    assert server.failure is None
