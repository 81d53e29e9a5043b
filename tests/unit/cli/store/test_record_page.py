"""`understudy record` with a person, and with people who watch: the real command, a real Chromium."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.waiting import wait_for

from understudy.core import Source
from understudy.replay import Reader

pytest.importorskip("websockets")

pytestmark = pytest.mark.xdist_group("browser")

WAIT_S = 120.0


@contextmanager
def recording(place: Path, *words: str) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """The command, and the address that it prints."""
    process = subprocess.Popen(
        [sys.executable, "-m", "understudy", "record", "store", "--page", "127.0.0.1:0", *words],
        cwd=place,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    try:
        found = re.fullmatch(r"the page: (http://127\.0\.0\.1:\d+/)\n", process.stdout.readline())
        assert found is not None, process.communicate()
        yield found[1], process
    finally:
        process.kill()
        process.communicate()


def steps_shown(page: Any) -> int:
    return int(page.evaluate("info.step ?? 0"))


def press_until(page: Any, key: str, done: Callable[[], bool]) -> None:
    """As a person does: a key that is late on a busy machine is ignored, so it is pressed again."""

    def pressed() -> bool:
        page.keyboard.press(key)
        return done()

    wait_for(pressed, every_s=0.5)


def test_a_person_demonstrates_with_the_keys(page: Any, tmp_path: Path) -> None:
    words = [
        "--env",
        "toy:stack_red_on_blue",
        "--human",
        "browser",
        "--hz",
        "5",  # an episode is over after 100 steps, and a browser on a busy machine takes seconds for a key
        "--successes",
        "1",
        "--operator",
        "ada",
    ]
    with recording(tmp_path, *words) as (address, process):
        page.goto(address)
        page.locator("#link.on").wait_for()
        told = "stack the red block on the blue block"
        wait_for(lambda: page.locator("#instruction").text_content() == told)
        page.keyboard.down("s")
        wait_for(lambda: steps_shown(page) > 1)
        page.keyboard.up("s")  # what is held when an episode begins is its first action
        press_until(page, "0", lambda: steps_shown(page) == 0)  # went wrong: discard it and record it again
        page.locator("#who", has_text="Waiting for you").wait_for()
        began_s = time.monotonic()
        page.keyboard.down("w")
        wait_for(lambda: steps_shown(page) > 5)
        page.keyboard.up("w")
        press_until(page, "Enter", lambda: process.poll() is not None)  # a success, the person says
        out, error = process.communicate(timeout=WAIT_S)
        took_s = time.monotonic() - began_s
        page.locator("#who", has_text="The demonstration is recorded").wait_for()
        wait_for(lambda: page.evaluate("socket.readyState === WebSocket.CLOSED && controls === null"))
        assert page.locator("#who").text_content() == "The demonstration is recorded"
    assert (process.returncode, error) == (0, "")
    assert "1 successes in 1 episodes of stack_red_on_blue, 1 discarded" in out
    assert re.search(r"[\d.]+ of 5 Hz over \d+ ticks", out)
    with Reader(tmp_path / "store") as reader:
        discarded, record = reader.episodes("1")
        episode = reader.read(record.id)
    assert discarded.deleted is not None
    assert (discarded.state, discarded.info.success) == ("cut", False)
    assert discarded.info.labels["discarded"] == "yes"
    assert (discarded.info.init_state, discarded.info.seed) == (record.info.init_state, record.info.seed)
    assert (record.info.operator, record.info.kind, record.info.success) == ("ada", "demonstration", True)
    assert (episode.source == Source.HUMAN).all()
    assert 3 <= len(episode) <= 5 * took_s + 2  # not faster than was asked for
    forward = np.float32([0, 0.5, 0, -1])
    assert (episode.action == forward).all(axis=1).any()  # a page that is late on a busy machine is taken for released
    assert {tuple(action) for action in episode.action.tolist()} <= {tuple(forward.tolist()), (0.0, 0.0, 0.0, -1.0)}


def test_a_script_can_be_watched_and_not_be_driven(page: Any, tmp_path: Path) -> None:
    with recording(tmp_path, "--env", "toy:pick_red", "--hz", "5", "--successes", "3", "--noise", "0") as (
        address,
        process,
    ):
        page.goto(address)
        page.locator("#link.on").wait_for()
        page.locator("#cameras canvas, #cameras img").first.wait_for()
        wait_for(lambda: "pick up the red block" in page.locator("#instruction").text_content())
        assert not page.locator("#drive").is_visible()
        page.keyboard.press("w")
        page.keyboard.press("Enter")
        out, error = process.communicate(timeout=WAIT_S)
    assert (process.returncode, error) == (0, "")
    rate = re.search(r"([\d.]+) of 5 Hz over (\d+) ticks", out)
    assert rate is not None
    assert float(rate[1]) < 5.5
    with Reader(tmp_path / "store") as reader:
        assert {Source(int(s)) for r in reader.episodes() for s in reader.read(r.id).source} == {Source.SCRIPT}


@pytest.mark.parametrize("page_at", ["7448", "127.0.0.1:http"])
def test_an_address_that_is_none_is_refused(page_at: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from understudy.cli import main

    assert main(["record", str(tmp_path / "store"), "--human", "browser", "--page", page_at]) == 1
    assert f"page: expected host:port, such as 127.0.0.1:7448, got '{page_at}'" in capsys.readouterr().err
