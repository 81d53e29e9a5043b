"""Server: whom it lets in, what it refuses, and that a refusal to one is no trouble for another."""

from __future__ import annotations

import asyncio
import json
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest
from tests.waiting import wait_for
from tests.writing import write_episode

from understudy.core import ArraySpec, DeliveryError, RefusedError, Spec, StepSpec, UnavailableError, WireError
from understudy.core.examples import CANONICAL, random_episode, random_steps, small_spec
from understudy.replay import EVERYTHING, Reader, Store
from understudy.replay.format import layout
from understudy.selftest.faulty_proxy import Proxy
from understudy.service import Remote, Server, ServerConfig, connect
from understudy.service.server.sample_stream import SampleStream
from understudy.service.wire.message import to_json
from understudy.service.wire.protocol import (
    ERROR_KEY,
    STATUS,
    TOKEN_KEY,
    VERSION,
    WRITE,
    method,
)
from understudy.web.errors import AccessError, ListenError

SPEC = small_spec()
TOKEN = "0123456789abcdef"
Serve = Callable[..., Server]
To = Callable[..., Remote]


def hello(**changes: Any) -> bytes:
    said = {"version": VERSION, "writer": "w", "incarnation": "i", "spec": SPEC.to_json()}
    return json.dumps({**said, **changes}).encode()


def talk(
    server: Server, *messages: bytes, token: str | None = None
) -> tuple[list[dict[str, Any]], grpc.StatusCode, str, str]:
    """The answers to a stream of messages, and how it ended: status, text, and the error's name."""
    metadata = () if token is None else ((TOKEN_KEY, f"Bearer {token}"),)
    with grpc.insecure_channel(server.address, options=[("grpc.max_send_message_length", -1)]) as channel:
        call = channel.stream_stream(method(WRITE))(iter(messages), metadata=metadata, timeout=20)
        answers = []
        try:
            for answer in call:
                answers.append(json.loads(answer))
        except grpc.RpcError as error:
            trailer = dict(error.trailing_metadata() or ())
            return answers, error.code(), error.details() or "", str(trailer.get(ERROR_KEY))
        return answers, grpc.StatusCode.OK, "", ""


def test_endless_queries_are_refused_and_the_process_ends_when_told(tmp_path: Path) -> None:
    """A client's views would keep every reading thread busy for ever; then SIGTERM comes."""
    with Store.open(tmp_path / "store") as store:
        write_episode(store.writer("w", SPEC), random_episode(SPEC, 5, 1))
    command = [sys.executable, "-m", "understudy", "serve", str(tmp_path / "store"), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            address = process.stdout.readline().strip().rpartition(" at ")[2]
            endless = "(with recursive c(x) as (select 1 union all select x + 1 from c) select count(*) from c)"
            hidden = [{"where": text, "sources": [0]} for text in ("1 --", f"'\n and {endless} and --'", "1 or\n 1")]
            plain = [{"where": endless, "sources": [0]}]
            with grpc.insecure_channel(address) as channel:
                status = channel.unary_unary(method(STATUS))
                for clauses, wanted in ((hidden, grpc.StatusCode.OK), (plain, grpc.StatusCode.INVALID_ARGUMENT)):
                    calls = [
                        status.future(to_json({"views": [{"name": "x", "clauses": clauses}]}), timeout=120)
                        for _ in range(32)
                    ]
                    assert {call.code() for call in calls} == {wanted}
                waiting = [
                    status.future(to_json({"views": [{"name": "x", "clauses": hidden}] * 16})) for _ in range(1000)
                ]
                process.terminate()
                assert process.wait(60) == 0
                assert any(call.code() is not grpc.StatusCode.OK for call in waiting)
        finally:
            process.kill()


NEVER_STOPS = """
import sys, threading
from understudy.replay import Store
from understudy.service import Server, ServerConfig

server = Server(Store.open(sys.argv[1]), ServerConfig(port=0)).start()
print(server.address, flush=True)
sys.stdin.readline()
threading.Thread(target=sys.stdin.readline).start()  # Python waits for it, and has shut its thread pools down by then
"""


def test_a_program_that_ends_without_a_stop_says_so_to_its_clients_and_prints_no_traceback(tmp_path: Path) -> None:
    """Scripts of HIL-SERL return while the actor is connected."""
    command = [sys.executable, "-c", NEVER_STOPS, str(tmp_path / "store")]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, text=True, stdin=pipe, stdout=pipe, stderr=pipe) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        with connect(process.stdout.readline().strip()) as remote:
            writer = remote.writer("w", SPEC, spool=tmp_path / "spool")
            write_episode(writer, random_episode(SPEC, 12, 1))
            assert writer.wait_delivered(60)
            process.stdin.write("end\n")
            process.stdin.flush()
            wait_for(lambda: "process is ending" in str(remote.unreachable(timeout_s=60.0)))
            write_episode(writer, random_episode(SPEC, 12, 2))
            wait_for(lambda: "the server's process is ending; connect again" in (writer.delivery.problem or ""))
            _, errors = process.communicate(timeout=60)
            writer.close(timeout_s=0)
    assert errors == ""
    assert process.returncode == 0
    with Reader(tmp_path / "store") as reader:
        assert [record.num_steps for record in reader.episodes()] == [12]


def test_a_read_that_does_not_end_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Here it is the closing of a stream's reader, which nobody may cancel."""
    over = threading.Event()
    monkeypatch.setattr(SampleStream, "close", lambda self: over.wait())
    with Store.open(tmp_path / "store") as store:
        write_episode(store.writer("w", SPEC), random_episode(SPEC, 5, 1))
        server = Server(store, ServerConfig(port=0)).start()
        with connect(server.address) as remote, remote.sampler(EVERYTHING, batch_size=4) as sampler:
            sampler.sample()
            server.stop(grace_s=0.1)
        assert server.is_reading
        assert not asyncio.all_tasks(server._loop)  # asyncio complains when a pending task is destroyed
        over.set()


def deliver_episode(remote: Remote, name: str, seed: int = 1) -> None:
    episode = random_episode(SPEC, 12, seed)
    with remote.writer(name, SPEC, commit_steps=5) as writer:
        write_episode(writer, episode)
        assert writer.wait_delivered(10)


# ---- where it listens, and to whom


def test_by_default_only_this_machine_is_listened_to(serve: Serve) -> None:
    assert ServerConfig().host == "127.0.0.1"
    assert ServerConfig().port == 7447
    assert serve().address.startswith("127.0.0.1:")


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "[::]", "192.168.1.4", "robot.lan", ""])
def test_other_machines_need_a_token(host: str) -> None:
    with pytest.raises(AccessError) as caught:
        ServerConfig(host=host)
    assert str(caught.value) == (
        f"host {host!r} can be reached from other machines, so a token is required; pass one (--token-file), or listen "
        f"on 127.0.0.1"
    )
    assert ServerConfig(host=host, token=TOKEN).host == host


def test_a_short_token_is_refused() -> None:
    with pytest.raises(AccessError, match=r"token: expected at least 16 characters, got 15; make one with `python -c"):
        ServerConfig(token=TOKEN[:-1])
    assert TOKEN not in repr(ServerConfig(token=TOKEN))


def test_a_certificate_and_a_key_go_together(tmp_path: Path) -> None:
    for half in ({"tls_cert": tmp_path / "c"}, {"tls_key": tmp_path / "k"}):
        with pytest.raises(
            RefusedError, match="tls: expected both a certificate and a key, got one of them; pass both --tls-cert and"
        ):
            ServerConfig(**half)


@pytest.mark.parametrize(
    ("content", "kind"), [(None, RefusedError), (b"", ListenError), (b"not a certificate", ListenError)]
)
def test_certificates_that_cannot_be_used_are_refused(
    serve: Serve, tmp_path: Path, content: bytes | None, kind: type[Exception]
) -> None:
    if content is not None:
        (tmp_path / "cert").write_bytes(content)
        (tmp_path / "key").write_bytes(content)
    with pytest.raises(kind, match="pass a readable certificate and key"):
        serve(tls_cert=tmp_path / "cert", tls_key=tmp_path / "key")


def test_a_port_in_use_is_refused_in_plain_words(serve: Serve, tmp_path: Path) -> None:
    first = serve()
    port = int(first.address.rpartition(":")[2])
    with pytest.raises(ListenError, match=rf"cannot listen on 127.0.0.1:{port} \(.*\); is another server there\?"):
        serve("other", port=port)
    with socket.create_server(("127.0.0.1", 0)) as other, pytest.raises(ListenError, match="is another server there"):
        serve("third", port=other.getsockname()[1])
    assert talk(first, hello())[0][0]["last_seq"] == -1


def test_the_loopback_of_ipv6(serve: Serve, remote_to: To, tmp_path: Path) -> None:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("this machine has no IPv6")
    server = serve(host="::1")
    assert server.address.startswith("[::1]:")
    deliver_episode(remote_to(server), "w")


def test_starting_and_stopping_leaves_nothing_behind(tmp_path: Path) -> None:
    with Store.open(tmp_path / "store") as store:
        for _ in range(3):
            with Server(store, ServerConfig(port=0)) as server:
                assert talk(server, hello())[1] is grpc.StatusCode.OK
            server.stop()  # again: nothing
            assert server.failed.is_set()
        with pytest.raises(UnavailableError), connect(server.address) as remote:
            remote.status(timeout_s=0.3)


# ---- TLS


def test_tls_there_and_back(serve: Serve, remote_to: To, tmp_path: Path, certificate: tuple[Path, Path]) -> None:
    cert, key = certificate
    server = serve(tls_cert=cert, tls_key=key, token=TOKEN)
    remote = remote_to(server, tls_cert=cert, token=TOKEN)
    assert remote.status()[server.address]["version"] == VERSION
    deliver_episode(remote, "w")
    with Reader(tmp_path / "store") as reader:
        assert reader.read(1).equals(random_episode(SPEC, 12, 1))
    with pytest.raises(UnavailableError):  # without it, the client does not speak TLS
        remote_to(server, token=TOKEN).status(timeout_s=0.5)
    with pytest.raises(RefusedError, match="the token is missing or wrong"):
        remote_to(server, tls_cert=cert, token=TOKEN[::-1]).status()
    with pytest.raises(RefusedError, match=r"nowhere.pem: No such file or directory; pass the server's certificate"):
        connect(server.address, tls_cert=tmp_path / "nowhere.pem")


def test_a_server_with_another_certificate_is_not_believed(
    serve: Serve, remote_to: To, tmp_path: Path, certificate: tuple[Path, Path]
) -> None:
    cert, key = certificate
    server = serve(tls_cert=cert, tls_key=key)
    other = tmp_path / "other.pem"
    openssl = shutil.which("openssl")
    assert openssl is not None
    subprocess.run(
        [
            openssl,
            "req",
            "-x509",
            "-newkey",
            "rsa:2048",
            "-nodes",
            "-days",
            "2",
            "-subj",
            "/CN=localhost",
            "-addext",
            "subjectAltName=IP:127.0.0.1",
            "-keyout",
            tmp_path / "k",
            "-out",
            other,
        ],
        check=True,
        capture_output=True,
    )
    with pytest.raises(UnavailableError):
        remote_to(server, tls_cert=other).status(timeout_s=1.0)


# ---- tokens


@pytest.mark.parametrize("shown", [None, "", "wrong" * 4, TOKEN[:-1], TOKEN + "x", TOKEN.upper()])
def test_without_the_token_nobody_gets_in(serve: Serve, shown: str | None) -> None:
    server = serve(token=TOKEN)
    answers, code, text, name = talk(server, hello(), token=shown)
    assert (answers, code, name) == ([], grpc.StatusCode.UNAUTHENTICATED, "RefusedError")
    assert text.startswith(
        "the token is missing or wrong; pass the one that `understudy serve` was started with, with --tok"
    )
    assert server.store.state.writers == {}
    assert talk(server, hello(), token=TOKEN)[1] is grpc.StatusCode.OK


def test_every_call_but_health_asks_for_the_token(serve: Serve) -> None:
    server = serve(token=TOKEN)
    with grpc.insecure_channel(server.address) as channel:
        with pytest.raises(grpc.RpcError) as caught:
            channel.unary_unary(method(STATUS))(b"{}", timeout=10)
        assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
        assert channel.unary_unary("/grpc.health.v1.Health/Check")(b"", timeout=10) == b"\x08\x01"


def test_health_and_status(serve: Serve) -> None:
    server = serve()
    with grpc.insecure_channel(server.address) as channel:
        assert channel.unary_unary("/grpc.health.v1.Health/Check")(b"", timeout=10) == b"\x08\x01"
        said = json.loads(channel.unary_unary(method(STATUS))(b"{}", timeout=10))
        assert said["version"] == VERSION
        with pytest.raises(grpc.RpcError) as caught:
            channel.unary_unary(method("Nothing"))(b"", timeout=10)
        assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


# ---- hellos

LONG = {"shape": [10**15], "dtype": "uint8"}


def spec_with(**leaf: Any) -> dict[str, Any]:
    return {**SPEC.to_json(), "observation": {"$array": leaf}}


WRONG_HELLOS: dict[str, tuple[bytes, str]] = {
    "not JSON": (b"\x80\x04pickle", "expected JSON, got b'\\x80\\x04pickle'; is it an understudy client?"),
    "empty": (b"", "expected JSON, got b''"),
    "a list": (b"[]", "expected a JSON object, got b'[]'"),
    "deep": (b"[" * 100_000, "expected JSON, got b'[[["),
    "too long": (b" " * (2**20 + 1), "expected at most 1048576 bytes of JSON, got 1048577"),
    "nothing in it": (b"{}", "writer: expected a name of up to 200 characters, got 'None'"),
    "no version": (hello(version="one"), "version: expected a whole number, got one; is it an understudy client?"),
    "no name": (hello(writer=""), "writer: expected a name of up to 200 characters, got ''"),
    "a long name": (hello(writer="x" * 201), "writer: expected a name of up to 200 characters, got 'xxx"),
    "a name of control characters": (hello(writer="a\0b"), "writer: expected a name"),
    "a name that is half a character": (hello(writer="\ud800"), "writer: expected a name"),
    "a number for a name": (hello(writer=3), "writer: expected a name of up to 200 characters, got '3'"),
    "no incarnation": (hello(incarnation=None), "expected a name of up to 200 characters, got 'None'"),
    "no spec": (hello(spec=None), "spec: not the spec of a step (TypeError"),
    "a spec that is a list": (hello(spec=[1]), "spec: not the spec of a step (TypeError"),
    "half a spec": (hello(spec={"observation": {}}), "spec: not the spec of a step (KeyError"),
    "an unknown dtype": (hello(spec=spec_with(shape=[], dtype="complex64")), "dtype: expected one of bool, uint8,"),
    "half a character in a dtype": (hello(spec=spec_with(shape=[], dtype="\ud800")), "spec: not the spec of a step"),
    "half a character in a name": (
        hello(spec={**SPEC.to_json(), "observation": {"\ud800": {"$array": {"shape": [], "dtype": "bool"}}}}),
        "spec",
    ),
    "a negative shape": (hello(spec=spec_with(shape=[-1], dtype="uint8")), "shape: dimensions are not negative"),
    "a float shape": (hello(spec=spec_with(shape=[1.5], dtype="uint8")), "spec: not the spec of a step (TypeError"),
    "rows of a petabyte": (
        hello(spec=spec_with(**LONG)),
        "spec: expected rows of at most 67108864 bytes, got 1000000000000",
    ),
    "rows whose size overflows": (
        hello(spec=spec_with(shape=[2**32, 2**32], dtype="uint8")),
        "spec: expected rows of at most 67108864 bytes, got ",
    ),
    "rows whose size overflows twice": (
        hello(spec=spec_with(shape=[2**62, 4], dtype="float64")),
        "spec: expected rows of at most 67108864 bytes, got ",
    ),
    "a size of 30 digits": (hello(spec=spec_with(shape=[10**30], dtype="uint8")), "spec: "),
    "more dimensions than arrays have": (hello(spec=spec_with(shape=[1] * 70, dtype="uint8")), "dimensions"),
    "a reward that is text": (hello(spec={**SPEC.to_json(), "reward": {"shape": [], "dtype": "str"}}), "reward: "),
    "too many bounds": (hello(spec=spec_with(shape=[2], dtype="float32", low=[0.0] * 200_000)), "low: expected"),
}


@pytest.mark.serial
@pytest.mark.parametrize("kind", WRONG_HELLOS)
def test_a_hello_that_cannot_be_is_refused_at_once(serve: Serve, kind: str) -> None:
    message, wanted = WRONG_HELLOS[kind]
    server = serve()
    started = time.monotonic()
    answers, code, text, name = talk(server, message)
    assert time.monotonic() - started < 2.0
    assert (answers, code) == ([], grpc.StatusCode.INVALID_ARGUMENT), text
    assert wanted in text
    assert name in ("WireError", "SpecError")
    assert server.store.state.writers == {}
    assert talk(server, hello())[1] is grpc.StatusCode.OK


def test_a_hello_of_huge_rows_takes_no_memory(serve: Serve) -> None:
    server = serve()
    before = peak_bytes()
    for size in (10**9, 10**12, 10**15):
        assert (
            "expected rows of at most 67108864 bytes, got"
            in talk(server, hello(spec=spec_with(shape=[size], dtype="uint8")))[2]
        )
    assert peak_bytes() - before < 100 * 2**20


def peak_bytes() -> int:
    status = Path("/proc/self/status").read_text()
    return int(next(line for line in status.splitlines() if line.startswith("VmHWM")).split()[1]) * 1024


def test_too_many_specs_are_refused(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("understudy.service.server.server.MAX_SPECS", 1)
    server = serve()
    with connect(server.address) as remote:
        deliver_episode(remote, "w")
        deliver_episode(remote, "w")  # of a spec that is known: as before
    other = CANONICAL["nested"]()[0]
    assert "spec: the store has 1 specs already; write to another store" in talk(server, hello(spec=other.to_json()))[2]


# ---- messages


@pytest.mark.parametrize(("version", "update"), [(99, "server"), (0, "client")])
def test_a_version_too_far_away_is_refused(serve: Serve, version: int, update: str) -> None:
    server = serve()
    answers, _, text, name = talk(server, hello(version=version))
    assert (answers, name) == ([], "RefusedError")
    assert f"update the {update} with `pip install" in text
    assert server.store.state.writers == {}


def test_a_newer_client_is_served_and_its_new_fields_are_ignored(serve: Serve) -> None:
    (answer,), code, _, _ = talk(serve(), hello(version=2, colour="red"))
    assert code is grpc.StatusCode.OK
    assert answer["version"] == 1


def test_a_message_above_the_limit_is_refused_and_others_are_undisturbed(
    serve: Serve, remote_to: To, tmp_path: Path
) -> None:
    server = serve(max_message_bytes=50_000)
    remote = remote_to(server)
    with remote.writer("good", SPEC, commit_steps=2) as writer:
        episode = random_episode(SPEC, 30, 5)
        writer.begin(episode.info)
        for index, step in enumerate(episode.steps()):
            writer.append(step)
            if index % 10 == 0:
                answers, code, _, _ = talk(server, hello(writer=f"bad-{index}"), bytes(60_000))
                (reply,) = answers
                assert reply == {
                    "version": 1,
                    "last_seq": -1,
                    "checks": [],
                    "max_message_bytes": 50_000,
                    "stores": [server.store.catalog.store_id],
                }
                assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
        writer.end(episode.last_observation)
        assert writer.wait_delivered(10)
        assert writer.delivery.connected
    with Reader(tmp_path / "store") as reader:
        (record,) = reader.episodes()
        assert reader.read(record.id).equals(episode)


def test_what_is_no_chunk_ends_its_stream_and_says_why(serve: Serve) -> None:
    server = serve()
    answers, code, text, name = talk(server, hello(), b"\x80\x04pickle")
    assert answers[0]["last_seq"] == -1
    assert (code, name) == (grpc.StatusCode.INVALID_ARGUMENT, "WireError")
    assert "expected a whole header of at most" in text
    assert server.store.last_commit == 0  # not even the writer's beginning


def test_a_stream_that_says_nothing_is_refused(serve: Serve) -> None:
    server = serve()
    assert talk(server)[1:] == (
        grpc.StatusCode.INVALID_ARGUMENT,
        "the stream ended before its first message",
        "WireError",
    )


def test_what_goes_wrong_is_counted(serve: Serve, remote_to: To) -> None:
    server = serve()
    talk(server, hello(writer=""))
    deliver_episode(remote_to(server), "w")
    text = server.metrics.text()
    assert 'understudy_errors_total{kind="WireError"} 1.0' in text
    assert "understudy_rows_committed_total 13.0" in text
    assert "understudy_chunks_committed_total 3.0" in text


def test_more_streams_than_allowed_are_refused_and_the_first_go_on(serve: Serve) -> None:
    server = serve(max_streams=2)
    with grpc.insecure_channel(server.address) as channel:
        streams = [Stream(channel, f"w{n}") for n in range(3)]
        codes = [stream.outcome() for stream in streams]
        assert codes.count("greeted") == 2
        assert codes.count("RESOURCE_EXHAUSTED") == 1
        for stream in streams:
            stream.close()


class Stream:
    """A stream that says hello and then waits."""

    def __init__(self, channel: grpc.Channel, name: str):
        self._ended = False
        self._call = channel.stream_stream(method(WRITE))(self._messages(name), timeout=10)

    def _messages(self, name: str) -> Iterator[bytes]:
        yield hello(writer=name)
        while not self._ended:
            time.sleep(0.01)

    def outcome(self) -> str:
        try:
            next(self._call)
        except grpc.RpcError as error:
            return str(error.code().name)
        return "greeted"

    def close(self) -> None:
        self._ended = True
        self._call.cancel()


def test_a_bad_first_chunk_takes_no_name_from_a_writer_at_work(serve: Callable[..., Server], remote_to: To) -> None:
    server = serve()
    remote = remote_to(server)
    with remote.writer("arm", small_spec()) as writer:
        writer.begin()
        writer.append(random_steps(small_spec(), 2, 1)[0][0])
        assert writer.wait_delivered(20)
        connection = next(iter(remote._connections.values()))
        hello = {"version": 1, "writer": "arm", "incarnation": "a stranger", "spec": small_spec().to_json()}
        with pytest.raises(WireError):
            list(connection.exchange("Write", iter([to_json(hello), b"not a chunk at all"])))
        writer.append(random_steps(small_spec(), 2, 1)[0][1])
        assert writer.wait_delivered(20)


def test_specs_of_strangers_are_not_remembered_without_end() -> None:
    for size in range(1, 3 * layout.MAX_CACHED_SPECS):
        action = Spec(ArraySpec(shape=(size,), dtype="float32"))
        layout.row_bytes_of(StepSpec(observation=action, action=action))
    assert len(layout._row_bytes_cache) <= layout.MAX_CACHED_SPECS


def test_a_store_that_was_closed_is_a_server_that_is_away(serve: Serve, remote_to: To) -> None:
    server = serve()
    server.store.close()
    writer = remote_to(server).writer("arm", small_spec())
    writer.begin()
    writer.append(random_steps(small_spec(), 2, 1)[0][0])
    wait_for(lambda: "closed" in str(writer.delivery.problem))
    assert not writer.wait_delivered(0.1)  # and no error: a server may come back
    with pytest.raises(DeliveryError):
        writer.close(0.1)


def test_a_question_that_is_cut_off_is_asked_again(server: Server, remote_to: To) -> None:
    with Proxy(int(server.address.rpartition(":")[2])) as proxy:
        remote = remote_to(f"127.0.0.1:{proxy.port}")
        remote.status()  # the link is there
        proxy.freeze(on=True)
        with ThreadPoolExecutor(1) as pool:
            asked = pool.submit(remote.status)
            time.sleep(0.3)  # it is on its way, and gets no answer
            proxy.cut()
            proxy.heal()
            assert next(iter(asked.result().values()))["commit"] == 0
