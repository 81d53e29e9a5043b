"""`understudy watch` as a process: it says where it is, shows what it is given, and ends when told to."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from tests.writing import write_episode

pytest.importorskip("fastapi")
pytest.importorskip("PIL")

from understudy.cli import main
from understudy.cli.tools.watch import PORT
from understudy.core.examples import random_episode, small_spec
from understudy.replay import Store

TOKEN = "0123456789abcdef0123"


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("watch") / "demos"
    spec = small_spec()
    episode = random_episode(spec, 4, seed=0)
    with Store.open(path) as opened:
        writer = opened.writer("w", spec)
        write_episode(writer, episode, task="wave")
    return path


@contextmanager
def watching(*arguments: str | Path, **environment: str) -> Iterator[tuple[str, list[str]]]:
    """The command at work: its address, and what it printed before."""
    process = subprocess.Popen(
        [sys.executable, "-m", "understudy", "watch", *map(str, arguments)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, **environment},
    )
    try:
        assert process.stdout is not None
        printed = []
        for line in process.stdout:
            if line.startswith("the page: "):
                yield line.removeprefix("the page: ").strip(), printed
                break
            printed.append(line)
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def get(url: str, path: str, headers: dict[str, str] | None = None) -> Any:
    base = url.partition("#")[0]
    with urllib.request.urlopen(urllib.request.Request(base + path, headers=headers or {}), timeout=20) as answer:
        return json.loads(answer.read())


def test_it_shows_a_store_and_a_target_that_does_not_exist_yet(store: Path, tmp_path: Path) -> None:
    with watching(store, tmp_path / "later", "--port", "0") as (url, printed):
        assert url.startswith("http://127.0.0.1:")
        assert [target["name"] for target in get(url, "api/targets")["targets"]] == ["demos", "later"]
        assert get(url, "api/0/episodes")["rows"][0]["task"] == "wave"
        assert get(url, "api/1/overview")["store"] is False
        assert "later: does not exist yet" in "".join(printed).replace("\n", "")


def test_options_of_the_address(store: Path, tmp_path: Path) -> None:
    (tmp_path / "token").write_text(f"{TOKEN}\n")
    options = ("--host", "0.0.0.0", "--port", "0", "--token-file", tmp_path / "token", "--hosts", "lab.test")
    with watching(store, *options) as (url, _):
        assert url.endswith(f"/#token={TOKEN}")
        port = url.split(":")[2].partition("/")[0]
        with pytest.raises(urllib.error.HTTPError, match="401"):
            get(f"http://127.0.0.1:{port}/", "api/targets")
        bearer = {"Authorization": f"Bearer {TOKEN}"}
        assert get(f"http://127.0.0.1:{port}/", "api/targets", bearer)["targets"]
        assert get(f"http://127.0.0.1:{port}/", "api/targets", {**bearer, "Host": "lab.test"})["targets"]


def test_it_opens_a_browser_if_asked_to(store: Path, tmp_path: Path) -> None:
    browser = tmp_path / "browser"
    browser.write_text(f'#!/bin/sh\necho "$1" > {tmp_path}/opened.new; mv {tmp_path}/opened.new {tmp_path}/opened\n')
    browser.chmod(0o755)
    with watching(store, "--port", "0", "--open-browser", BROWSER=f"{browser} %s") as (url, _):
        for _ in range(600):
            if (tmp_path / "opened").exists():
                break
            signal.sigtimedwait([], 0.05)
        assert (tmp_path / "opened").read_text().strip() == url


@pytest.mark.parametrize(
    ("token", "host", "words"),
    [
        (None, "0.0.0.0", "a token is required"),
        ("short", "127.0.0.1", "at least 16 letters and digits"),
        ("not a token for addresses", "127.0.0.1", "expected at least 16 letters and digits"),
    ],
)
def test_what_cannot_be_is_said(
    token: str | None, host: str, words: str, store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--host", host, "--port", "0"]
    if token is not None:
        (tmp_path / "token").write_text(token)
        options += ["--token-file", str(tmp_path / "token")]
    assert main(["watch", str(store), *options]) == 1
    assert words in capsys.readouterr().err


def test_the_usual_port_gives_way_if_it_is_taken(store: Path) -> None:
    with ExitStack() as stack:
        with suppress(OSError):  # somebody else has it: so much the better
            stack.enter_context(socket.create_server(("127.0.0.1", PORT)))
        url, printed = stack.enter_context(watching(store))
        port = url.split(":")[2].strip("/")
        assert f"port {PORT} is taken, so the page is at port {port}" in "".join(printed)
        assert get(url, "api/targets")["targets"]


def test_a_port_that_is_taken_is_said(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with watching(store, "--port", "0") as (url, _):
        assert main(["watch", str(store), "--port", url.split(":")[2].strip("/")]) == 1
        assert "choose another port" in capsys.readouterr().err
    assert main(["watch", str(store), "--token-file", "/no/such/file"]) == 1
    assert "/no/such/file: cannot be read" in capsys.readouterr().err
