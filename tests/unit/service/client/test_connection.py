"""Connection: calls to a server that is there, that is not, that moves and that is lost."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from understudy.core import RefusedError, StoreClosedError, UnavailableError
from understudy.service import Server
from understudy.service.client.connection import Connection, Credentials
from understudy.service.wire.protocol import STATUS

NOBODY = "127.0.0.1:1"


def test_a_token_is_sent_and_not_shown(serve: Callable[..., Server]) -> None:
    token = "0123456789abcdef"
    server = serve(token=token)
    credentials = Credentials(token=token)
    assert token not in repr(credentials)
    connection = Connection(server.address, credentials)
    assert connection.call(STATUS, {"views": []})["version"] == 1
    connection.close()


def test_a_server_that_is_not_there_is_a_problem_and_not_an_error(serve: Callable[..., Server]) -> None:
    connection = Connection(NOBODY, Credentials(), name="shard-0")
    assert "is `understudy serve` running there?" in str(connection.problem(timeout_s=5.0))
    connection.update_address(serve().address)
    assert connection.problem(timeout_s=30.0) is None
    assert connection.name == "shard-0"
    connection.close()


def test_calls_fail_after_close_and_after_abandon() -> None:
    closed, lost = Connection(NOBODY, Credentials()), Connection(NOBODY, Credentials(), name="shard-1")
    closed.close()
    with pytest.raises(StoreClosedError, match="the connection is closed; close its writers before it"):
        closed.call(STATUS, {"views": []}, timeout_s=1.0)
    lost.abandon()
    with pytest.raises(UnavailableError, match="shard-1: was removed; use the other shards"):
        lost.call(STATUS, {"views": []}, timeout_s=1.0)
    closed.update_address("127.0.0.1:2")
    assert closed.address == NOBODY  # a closed connection stays as it is


def test_a_certificate_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(RefusedError, match=r"missing.pem: .*; pass the server's certificate"):
        Connection(NOBODY, Credentials(tls_cert=tmp_path / "missing.pem"))
