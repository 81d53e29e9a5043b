"""Connection: calls to a server that is there, that is not, that moves and that is lost."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from tests.waiting import wait_for

from understudy.core import RefusedError, StoreClosedError, UnavailableError
from understudy.replay import EVERYTHING, Store
from understudy.selftest.faulty_proxy import free_port
from understudy.service import Server, ServerConfig, connect
from understudy.service.client.connection import PROBE_TIMEOUT_S, Connection, Credentials
from understudy.service.wire.protocol import PUBLISH, STATUS

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


def test_a_call_that_begins_while_the_server_ends_waits_for_the_next_one(serve: Callable[..., Server]) -> None:
    """GRPC cancels it, which is not the same code as that of a server that is not there."""
    port, over = free_port(), threading.Event()

    def ask(connection: Connection) -> int:
        asked = 0
        while not over.is_set():
            assert connection.call(STATUS, {"views": []}, timeout_s=30.0)["version"] == 1
            asked += 1
        return asked

    server = serve(port=port)
    connection = Connection(server.address, Credentials())
    with ThreadPoolExecutor(16) as pool:
        asking = [pool.submit(ask, connection) for _ in range(16)]
        for number in range(5):
            server.stop(0.0)
            server = serve(f"store-{number}", port=port)
            connection.call(STATUS, {"views": []}, timeout_s=30.0)
        over.set()
        assert sum(calls.result() for calls in asking) > 0
    connection.close()


def test_a_server_that_does_not_answer_in_time_is_said_once() -> None:
    connection = Connection(NOBODY, Credentials())
    with pytest.raises(UnavailableError) as caught:
        connection.upload(PUBLISH, [b"{}"], timeout_s=0.3)
    assert str(caught.value) == f"{NOBODY}: no answer in time; is `understudy serve` running there?"
    connection.close()


WAITING = (
    "waiting for the server at {}, which does not answer: start it (`understudy serve STORE`), or check the address; "
    "Ctrl-C stops waiting"
)


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What connections logged. gRPC logs in this process, too: a stream that a stopping server cuts off."""
    return [record.getMessage() for record in caplog.records if record.name == Connection.__module__]


@pytest.mark.parametrize(("how", "times"), [("status", 1), ("publish", 1), ("sample", 2)])
def test_a_call_says_that_it_waits_for_its_first_answer_and_a_sampler_each_time(
    serve: Callable[..., Server], caplog: pytest.LogCaptureFixture, how: str, times: int
) -> None:
    caplog.set_level(logging.WARNING)
    port = free_port()
    with connect(f"127.0.0.1:{port}") as remote:
        sampler = remote.sampler(EVERYTHING, batch_size=2)
        calls = {
            "status": lambda: remote.status(timeout_s=60),
            "publish": lambda: remote.publish({"weights": np.zeros(2, np.float32)}, timeout_s=60),
            "sample": sampler.follow,
        }
        for number in range(1, times + 1):
            with ThreadPoolExecutor(1) as pool:
                waits = pool.submit(calls[how])
                wait_for(lambda wanted=number: len(said(caplog)) >= wanted)  # type: ignore[misc]
                time.sleep(0.3)
                assert not waits.done()
                server = serve(port=port)
                waits.result(60)
            server.stop(0.0)
            server.store.close()
        sampler.close()
    assert said(caplog) == [WAITING.format(f"127.0.0.1:{port}")] * times


def test_a_server_that_takes_long_to_answer_is_not_waited_for(store: Store, caplog: pytest.LogCaptureFixture) -> None:
    with (
        Server(store, ServerConfig(port=0), on_request=lambda kind, payload: time.sleep(2 * PROBE_TIMEOUT_S)) as server,
        connect(server.address) as remote,
    ):
        remote.request("slow", timeout_s=30)
    assert said(caplog) == []


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
