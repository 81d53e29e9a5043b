"""Health: what a process tells about itself, and what one can tell of a process that no longer does."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from tests.waiting import wait_for

from understudy import __version__
from understudy.training.runs import health as healths
from understudy.training.runs.health import Health, read_health
from understudy.training.runs.stack_dump import dump_stacks


def read(health: Health) -> dict[str, Any]:
    assert health.path is not None
    return dict(json.loads(health.path.read_text()))


def test_the_file_says_who_does_what(tmp_path: Path) -> None:
    began = time.time()
    with Health(tmp_path / "health", role="actor", name="arm/1", heartbeat_s=0.02) as health:
        health.page = "http://127.0.0.1:1/"
        health.add(lambda: {"queue": 3})
        health.progress("acting", step=5, policy_version=2)
        health.progress("acting", update=7)
        wait_for(lambda: read(health)["update"] == 7)
        said = read(health)
        assert health.path == tmp_path / "health" / "actor-arm%2F1.json"
    assert said["stack"] is None
    assert said["memory_bytes"] > 2**20
    assert began <= said["started_s"] <= said["progress_s"] <= said["beat_s"] <= time.time()
    wanted = {
        "role": "actor",
        "name": "arm/1",
        "state": "running",
        "pid": os.getpid(),
        "host": platform.node(),
        "version": __version__,
        "doing": "acting",
        "step": 5,
        "update": 7,
        "policy_version": 2,
        "queue": 3,
        "page": "http://127.0.0.1:1/",
        "error": None,
    }
    assert {name: said[name] for name in wanted} == wanted


def test_rates_are_of_the_last_seconds(tmp_path: Path) -> None:
    with Health(tmp_path, role="local", name="rlpd", heartbeat_s=0.01) as health:
        health.progress("learning", step=0, update=0)
        wait_for(lambda: read(health)["step"] == 0)
        health.progress("learning", step=100, update=200)
        wait_for(lambda: bool(read(health)["steps_per_s"]))
        said = read(health)
    assert said["updates_per_s"] == pytest.approx(2 * said["steps_per_s"])


def test_a_hang_shows_the_stacks_of_all_threads_until_it_goes_on(tmp_path: Path) -> None:
    freed = threading.Event()

    def stand_still_elsewhere() -> None:
        freed.wait()

    other = threading.Thread(target=stand_still_elsewhere, name="the other one")
    other.start()
    try:
        with Health(tmp_path, role="learner", name="rlpd", heartbeat_s=0.02, progress_timeout_s=0.1) as health:
            health.progress("learning")
            stack = wait_for(lambda: read(health)["stack"])
            (seen,) = read_health(tmp_path)
            assert seen.state == "stuck"
            assert seen.idle_s > 0.1

            def goes_on() -> bool:
                health.progress("learning")
                return read(health)["stack"] is None

            wait_for(goes_on)
    finally:
        freed.set()
        other.join()
    assert stack.startswith("thread MainThread\n")
    assert "test_a_hang_shows_the_stacks" in stack
    assert "wait_for(lambda" in stack  # the very line
    assert "thread the other one\n" in stack
    assert "stand_still_elsewhere" in stack
    assert "thread health\n" not in stack


def test_how_it_ended(tmp_path: Path) -> None:
    with Health(tmp_path, role="a", name="good"):
        pass
    with pytest.raises(OSError, match="no room"), Health(tmp_path, role="b", name="bad"):
        raise OSError("no room")
    with pytest.raises(KeyboardInterrupt), Health(tmp_path, role="c", name="stopped"):
        raise KeyboardInterrupt
    good, bad, stopped = read_health(tmp_path)
    assert [seen.state for seen in (good, bad, stopped)] == ["ended", "failed", "ended"]
    assert good.content["error"] is None
    assert bad.content["error"] == "OSError: no room"


KILLED = """
import sys, time
from pathlib import Path
from understudy.training.runs.health import Health, read_health
from understudy.training.runs.stack_dump import dump_stacks
with Health(Path(sys.argv[1]), role="actor", name="a", heartbeat_s=0.02) as health:
    while True:
        health.progress("acting")
        print("beating", flush=True)
        time.sleep(0.02)
"""


def test_a_killed_process_is_gone_and_a_stopped_one_silent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    process = subprocess.Popen([sys.executable, "-c", KILLED, str(tmp_path)], stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        process.stdout.readline()
        assert [seen.state for seen in read_health(tmp_path)] == ["running"]
        monkeypatch.setattr(healths, "HEARTBEAT_TIMEOUT_S", 0.0)  # as if much time had passed
        time.sleep(0.001)
        assert [seen.state for seen in read_health(tmp_path)] == ["silent"]
    finally:
        process.kill()
        process.communicate()
    assert [seen.state for seen in read_health(tmp_path)] == ["gone"]
    (path,) = tmp_path.glob("*.json")
    said = json.loads(path.read_text())
    path.write_text(json.dumps({**said, "host": "another-machine"}))  # there one cannot look for its process
    assert [seen.state for seen in read_health(tmp_path)] == ["silent"]


def test_files_that_make_no_sense_are_left_out(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text("{")
    (tmp_path / "b.json").write_text("[]")
    (tmp_path / "c.json").write_text("{}")
    assert read_health(tmp_path) == []
    assert read_health(tmp_path / "nowhere") == []


def test_a_file_that_cannot_be_written_is_told_once_and_ends_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "health"
    (folder / "a-b.json.new").mkdir(parents=True)  # where it would write
    (folder / "a-b.json").write_text(before := "of an earlier process")
    with Health(folder, role="a", name="b", heartbeat_s=0.01) as health:
        assert health.path == folder / "a-b.json"
        wait_for(lambda: "the run continues without it" in caplog.text)
        time.sleep(0.05)
    assert caplog.text.count("the run continues without it") == 1
    assert health.path.read_text() == before


def test_without_a_directory_there_is_neither_file_nor_thread() -> None:
    num_threads = threading.active_count()
    with Health(None, role="a", name="b") as health:
        health.progress("acting")
        assert threading.active_count() <= num_threads  # one of an earlier test may end meanwhile


def test_stacks_leave_out_who_asks() -> None:
    assert "test_stacks_leave_out_who_asks" not in dump_stacks()


@pytest.mark.serial
def test_progress_costs_next_to_nothing() -> None:
    health = Health(None, role="a", name="b")
    best = min(_cost_s(health) for _ in range(20))
    assert best < 2e-6


def _cost_s(health: Health) -> float:
    began = time.perf_counter()
    for number in range(1000):
        health.progress("learning", step=number, update=number)
    return (time.perf_counter() - began) / 1000
