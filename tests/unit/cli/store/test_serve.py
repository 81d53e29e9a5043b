"""`understudy serve` as a real process, from its first line to Ctrl-C."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from tests.waiting import wait_for
from tests.writing import write_episode

from understudy.cli import main
from understudy.core import RefusedError
from understudy.core.examples import random_episode, small_spec
from understudy.replay import EVERYTHING, Reader, Store
from understudy.selftest.faulty_proxy import free_port
from understudy.service import connect

CODE = "import sys; from understudy.cli import main; sys.exit(main())"


@contextmanager
def serving(*args: str, port: str = "0") -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """A server process, and its address."""
    process = subprocess.Popen(
        [sys.executable, "-c", CODE, "serve", "--port", port, *args],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    try:
        line = process.stdout.readline()
        found = re.search(r" at (\S+:\d+)$", line.strip())
        assert found is not None, line + process.communicate()[1]
        yield found[1], process
    finally:
        process.kill()
        process.communicate()


def test_it_serves_until_it_is_interrupted(tmp_path: Path) -> None:
    with serving(str(tmp_path / "store"), "--metrics-port", "0") as (address, process):
        assert process.stdout is not None
        metrics = process.stdout.readline().split()[-1]
        episode = random_episode(small_spec(), 10, 1)
        with connect(address) as remote, remote.writer("arm", small_spec()) as writer:
            write_episode(writer, episode)
            assert writer.wait_delivered(20)
        with urllib.request.urlopen(metrics) as page:
            assert "understudy_rows_committed_total 11.0" in page.read().decode()
        process.send_signal(signal.SIGINT)
        out, error = process.communicate(timeout=20)
        assert (process.returncode, out, error) == (0, "stopped at commit 2\n", "")
    with Reader(tmp_path / "store") as reader:
        assert reader.read(1).equals(episode)


def test_the_token_of_the_file_is_what_lets_in(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("0123456789abcdef\n")
    with serving(str(tmp_path / "store"), "--token-file", str(token)) as (address, _):
        with connect(address, token_file=token) as remote:
            assert remote.status()[address]["commit"] == 0
        for wrong in (None, "0123456789abcdeF"):
            with connect(address, token=wrong) as remote, pytest.raises(RefusedError, match="missing or wrong"):
                remote.status()


def test_max_message_mb_is_told_to_writers(tmp_path: Path) -> None:
    from understudy.core.examples import robot_spec

    with serving(str(tmp_path / "store"), "--max-message-mb", "1") as (address, _), connect(address) as remote:
        writer = remote.writer("arm", robot_spec())
        episode = random_episode(robot_spec(), 20, 1)
        writer.begin()
        for step in episode.steps():
            writer.append(step)
        with pytest.raises(RefusedError, match="the server takes 1048576; lower commit_steps, or raise --max-message"):
            writer.wait_delivered(20)


def test_frame_cache_mb_of_0_keeps_no_resized_frames(tmp_path: Path) -> None:
    from understudy.core.examples import robot_spec

    with Store.open(tmp_path / "store") as store:
        write_episode(store.writer("arm", robot_spec(20)), random_episode(robot_spec(20), 10, 1))
    with (
        serving(str(tmp_path / "store"), "--frame-cache-mb", "0") as (address, _),
        connect(address) as remote,
        remote.sampler(EVERYTHING, batch_size=4, resize=(8, 8)) as sampler,
    ):
        assert sampler.sample().observation["wrist_1"].shape == (4, 8, 8, 3)
    assert not (tmp_path / "store" / "derived").exists()


def test_writers_of_a_store_that_is_replaced_go_on_with_the_new_one(tmp_path: Path) -> None:
    episode = random_episode(small_spec(), 20, 1)
    with ExitStack() as undo:
        port = str(free_port())  # stays free while no server is there
        with serving(str(tmp_path / "old"), port=port) as (address, _):
            remote = undo.enter_context(connect(address))
            writer = undo.enter_context(remote.writer("arm", small_spec()))
            write_episode(writer, episode)
            assert writer.wait_delivered(20)
            gone = remote.status()[address]["store"]
        new = str(tmp_path / "new")
        write_episode(writer, episode)
        with serving(new, port=port):
            assert not writer.wait_delivered(3)
        with serving(new, "--replaces", "another", gone, port=port):
            assert writer.wait_delivered(20)


@pytest.mark.parametrize(
    ("args", "text"),
    [
        (["--host", "0.0.0.0"], "a token is required; pass one (--token-file), or listen on 127.0.0.1"),
        (["--host", "robot.lab"], "a token is required"),
        (["--token-file", "nowhere"], "pass a file that holds the token"),
        (["--tls-cert", "cert.pem"], "pass both --tls-cert and --tls-key"),
        (["--tls-cert", "cert.pem", "--tls-key", "key.pem"], "pass a readable certificate and key"),
    ],
)
def test_what_is_not_safe_is_refused(
    args: list[str], text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    assert main(["serve", "store", "--port", "0", *args]) == 1
    assert text in capsys.readouterr().err
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


def test_a_short_token_is_refused_with_a_way_to_make_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "token").write_text("secret")
    assert main(["serve", str(tmp_path / "store"), "--token-file", str(tmp_path / "token")]) == 1
    assert "expected at least 16 characters, got 6; make one with" in capsys.readouterr().err


def test_a_port_that_is_taken_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with serving(str(tmp_path / "one")) as (address, _):
        assert main(["serve", str(tmp_path / "two"), "--port", address.rpartition(":")[2]]) == 1
        said = capsys.readouterr().err
        assert f"{address}: cannot listen there (Address already in use" in said
        assert "stop the server that does, or choose another port (0: any)" in said
        assert not (tmp_path / "two").exists()


def test_without_grpc_it_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in [name for name in sys.modules if name.startswith(("understudy.service", "grpc"))]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "grpc", None)
    monkeypatch.delattr(sys.modules["understudy"], "service", raising=False)
    assert main(["serve", str(tmp_path / "store")]) == 1
    assert "pip install 'understudy-robotics[remote]'" in capsys.readouterr().err


@pytest.mark.parametrize("verbose", [False, True])
def test_verbose_logs_each_refusal(verbose: bool, tmp_path: Path) -> None:
    with serving(str(tmp_path / "store"), *["--verbose"] * verbose) as (address, process):
        with connect(address) as remote, pytest.raises(RefusedError):
            remote.request("anything")
        process.send_signal(signal.SIGINT)
        assert ("RefusedError" in process.communicate(timeout=20)[1]) == verbose


def fill(path: Path) -> None:
    with Store.open(path) as store:
        writer = store.writer("w", small_spec())
        for seed in range(6):
            write_episode(writer, random_episode(small_spec(), 20, seed), kind="demonstration")


def test_an_operator_compacts_what_is_served(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fill(tmp_path / "store")
    token = tmp_path / "token"
    token.write_text("0123456789abcdef")
    with serving(str(tmp_path / "store"), "--token-file", str(token)) as (address, _):
        command = ["compact", "--server", address, "--max-demonstration-steps", "60", "--min-dead", "0", "--yes"]
        assert main(command) == 1
        assert "the token is missing or wrong" in capsys.readouterr().err
        assert main([*command, "--token-file", str(token)]) == 0
        assert "3 episodes removed" in " ".join(capsys.readouterr().out.split())
    assert main(["compact", "--yes"]) == 1
    assert "expected the directory of a store, or --server" in capsys.readouterr().err


def test_compaction_on_a_schedule(tmp_path: Path) -> None:
    fill(tmp_path / "store")
    budgets = ("--max-practice-steps", "0", "--max-correction-steps", "0", "--max-demonstration-steps", "60")
    with (
        serving(str(tmp_path / "store"), "--compact-every-min", "0.002", *budgets),
        Reader(tmp_path / "store") as reader,
    ):
        wait_for(lambda: len(list(reader.episodes("not purged"))) == 3)
