"""Eight processes read a store while a ninth writes to it; not one row is torn, early, late, missing or there twice."""

import json
import subprocess
import sys
from pathlib import Path
from subprocess import PIPE

import numpy as np
import pytest

from understudy.replay import Reader, verify

PROCESS = Path(__file__).with_name("reader_process.py")
NUM_READERS = 8
MAX_LAG_S = 0.1


@pytest.fixture
def start():
    """Starts processes of reader_process.py and waits until all are ready; what a failed test leaves is killed."""
    running = []

    def start(*commands):
        started = [
            subprocess.Popen([sys.executable, PROCESS, *map(str, command)], stdin=PIPE, stdout=PIPE, text=True)
            for command in commands
        ]
        running.extend(started)
        assert [process.stdout.readline() for process in started] == ["ready\n"] * len(started)
        return started

    yield start
    for process in running:
        process.kill()
        process.communicate()


def test_two_processes_follow_one_that_writes(start, tmp_path):
    follow(start, tmp_path, num_readers=2, seconds=2)


@pytest.mark.nightly
@pytest.mark.serial
@pytest.mark.parametrize("seconds", [6, 60])
def test_eight_processes_follow_one_that_writes_without_delay(start, tmp_path, seconds):
    lags, num_commits = follow(start, tmp_path, num_readers=NUM_READERS, seconds=seconds)
    milliseconds = ", ".join(
        f"{name} {np.quantile(lags, q) * 1e3:.1f}" for name, q in (("median", 0.5), ("p99", 0.99), ("max", 1))
    )
    print(f"{num_commits} commits in {seconds} s, {NUM_READERS} readers; lag in ms: {milliseconds}")
    assert num_commits > 10 * seconds
    assert max(lags) < MAX_LAG_S
    with Reader(tmp_path / "store") as reader:
        assert len(reader.catalog.segments()) > seconds  # they were sealed and begun all the time


def follow(start, tmp_path, *, num_readers, seconds):
    """Checks what each reader saw; returns seconds between a commit and each look at it, and how many were made."""
    store, written = tmp_path / "store", tmp_path / "written.json"
    results = [tmp_path / f"reader-{number}.json" for number in range(num_readers)]
    [writer] = start(("write", store, written, seconds))
    readers = start(*(("read", store, result, written) for result in results))
    writer.communicate("go\n", timeout=seconds + 60)
    for reader in readers:
        assert reader.wait(timeout=60) == 0
    assert writer.returncode == 0

    commits = {tuple(commit[:4]): commit[4:] for commit in json.loads(written.read_text())}
    lags = []
    for result in results:
        found = json.loads(result.read_text())
        assert found["wrong"] == []
        assert sorted(tuple(span[:4]) for span in found["seen"]) == sorted(commits)
        for *span, seen in found["seen"]:
            begun, acknowledged = commits[tuple(span)]
            assert seen > begun
            lags.append(seen - acknowledged)
    assert len(commits) > 1
    assert verify(store).ok
    return lags, len(commits)
