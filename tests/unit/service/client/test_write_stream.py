"""WriteStream: what it sends, what it takes for an answer, and the bytes that are under way."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from understudy.core import RefusedError, UnderstudyError, WireError
from understudy.core.examples import small_spec
from understudy.service.client.spool import Route, SpoolLog
from understudy.service.client.write_stream import WriteStream, _Window
from understudy.service.wire.message import from_json, to_json

REPLY = {"last_seq": -1, "max_message_bytes": 100, "stores": ["s"]}


class Owner:
    """An outbox that never waits: what is not ready at once is the end."""

    should_stop = False

    def __init__(self) -> None:
        self.acknowledged: list[int] = []
        self.failure: UnderstudyError | None = None

    def on_hello(
        self, log: SpoolLog, connection: Any, last_seq: int, checks: Sequence[int], stores: Sequence[str]
    ) -> bool:
        return True

    def on_acknowledged(self, log: SpoolLog, seq: int, commit: int) -> None:
        self.acknowledged.append(seq)

    def is_finished(self, log: SpoolLog) -> bool:
        return False

    def wait_until(self, ready: Callable[[], bool], timeout_s: float | None) -> bool:
        return ready()

    def notify(self) -> None:
        pass

    def fail(self, error: UnderstudyError) -> None:
        self.failure = error


class Server:
    """A connection whose server answers as it was told; `sent` are the messages that it got."""

    def __init__(self, *answers: dict[str, Any]):
        self._answers = answers
        self.sent: list[bytes] = []

    def exchange(self, name: str, messages: Iterator[bytes]) -> Any:
        return Responses(self._respond(messages))

    def _respond(self, messages: Iterator[bytes]) -> Iterator[bytes]:
        for answer in self._answers:
            message = next(messages, None)
            if message is None:
                return
            self.sent.append(message)
            yield to_json(answer)


class Responses:
    def __init__(self, messages: Iterator[bytes]):
        self._messages = messages

    def __iter__(self) -> Iterator[bytes]:
        return self._messages

    def cancel(self) -> None:
        pass


def a_log(*chunks: bytes) -> SpoolLog:
    log = SpoolLog(incarnation="1f", spec=small_spec(), route=Route(writer="arm", shard="a"))
    for seq, chunk in enumerate(chunks):
        log.put(seq, [chunk], 1)
    return log


def run(owner: Owner, server: Server, log: SpoolLog) -> None:
    WriteStream(owner, log, server).run()  # type: ignore[arg-type]


def test_chunks_are_sent_after_the_hello_and_acknowledged_in_order() -> None:
    owner, server = Owner(), Server(REPLY, {"seq": 0, "commit": 5}, {"seq": 1, "commit": 6})
    run(owner, server, a_log(b"zero", b"one"))
    assert from_json(server.sent[0])["writer"] == "arm"
    assert server.sent[1:] == [b"zero", b"one"]
    assert owner.acknowledged == [0, 1]


def test_what_the_server_has_is_not_sent_again() -> None:
    owner, server = Owner(), Server({**REPLY, "last_seq": 0}, {"seq": 1, "commit": 6})
    run(owner, server, a_log(b"zero", b"one"))
    assert server.sent[1:] == [b"one"]


@pytest.mark.parametrize(
    ("answers", "text"),
    [
        ([{"last_seq": 0}], "expected an answer with last_seq and max_message_bytes"),
        ([{**REPLY, "stores": []}], "expected an answer with stores"),
        ([REPLY, {"seq": 1, "commit": 5}], "expected the answer to chunk 0, got one to 1; connecting again"),
        ([REPLY, {"seq": "0", "commit": 5}], "expected an answer with seq and commit"),
    ],
)
def test_an_answer_that_cannot_be_is_a_wire_error(answers: list[dict[str, Any]], text: str) -> None:
    with pytest.raises(WireError, match=text):
        run(Owner(), Server(*answers), a_log(b"zero", b"one"))


def test_a_chunk_that_the_server_cannot_take_stops_the_outbox() -> None:
    owner, server = Owner(), Server(REPLY, {"seq": 0, "commit": 5})
    run(owner, server, a_log(b"x" * 101))
    assert isinstance(owner.failure, RefusedError)
    assert "chunk 0 has 101 bytes, and the server takes 100; lower commit_steps" in str(owner.failure)
    assert len(server.sent) == 1  # the hello alone


def test_the_window_counts_right_while_two_threads_use_it() -> None:
    window, num_chunks = _Window(), 20_000

    def acknowledge() -> None:
        for _ in range(num_chunks):
            while not len(window):
                pass
            window.acknowledged()

    thread = threading.Thread(target=acknowledge)
    thread.start()
    for size in range(num_chunks):
        window.sent(size)
        assert window.num_bytes >= 0
    thread.join()
    assert (len(window), window.num_bytes) == (0, 0)
