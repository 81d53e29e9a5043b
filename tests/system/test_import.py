"""An import that is killed goes on, and ends as if nothing had happened; a killed export leaves no data set."""

from __future__ import annotations

import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

from understudy.core import Episode
from understudy.core.examples import random_episode, robot_spec
from understudy.formats import find_format
from understudy.replay import Reader, verify

NUM = 40


def run(*words: str | Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "understudy", *map(str, words)],
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def finished(*words: str | Path) -> str:
    process = run(*words)
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    return out


def kill(process: subprocess.Popen[str]) -> None:
    process.send_signal(signal.SIGKILL)
    process.communicate()


def stored(path: Path) -> list[Episode]:
    with Reader(path) as reader:
        return [reader.read(record.id) for record in reader.episodes()]


def num_stored(path: Path) -> int:
    if not (path / "catalog.sqlite").exists():
        return 0
    with Reader(path) as reader:
        return len(list(reader.episodes()))


def test_killed_again_and_again_it_ends_as_if_undisturbed(tmp_path: Path) -> None:
    spec = robot_spec(64)
    target = find_format("rlds").write(tmp_path / "data", spec, {"images": "bytes", "shard_mb": "5"})
    for number in range(NUM):
        target.add(str(number), random_episode(spec, 10 + number % 5, number))
    target.close()

    finished("import", f"rlds:{tmp_path}/data", tmp_path / "undisturbed")

    rng = random.Random(0)
    store = tmp_path / "killed"
    caught = 0
    for _ in range(8):
        if caught >= 2:
            break
        process = run("import", f"rlds:{tmp_path}/data", store, "--workers", "2")
        before = num_stored(store)
        deadline = time.monotonic() + 120
        while process.poll() is None and num_stored(store) < before + rng.randrange(1, 6):
            assert time.monotonic() < deadline, "it imports nothing"
            time.sleep(0.002)
        kill(process)
        caught += before < num_stored(store) < NUM
        if not caught and num_stored(store) == NUM:  # it was faster than this loop
            shutil.rmtree(store)
    assert caught, "it was never killed in the middle"
    out = finished("import", f"rlds:{tmp_path}/data", store)
    assert "were in the store already" in out
    assert verify(store).problems == []
    mine, wanted = stored(store), stored(tmp_path / "undisturbed")
    assert len(mine) == NUM
    assert all(a.equals(b) for a, b in zip(mine, wanted, strict=True))

    process = run("export", store, f"rlds:{tmp_path}/out")
    while process.poll() is None and not list(tmp_path.glob(".out.*")):
        time.sleep(0.002)
    kill(process)
    whole = (tmp_path / "out").exists()
    assert not whole or find_format("rlds").read(tmp_path / "out", {}).num_episodes == NUM
    if not whole:
        finished("export", store, f"rlds:{tmp_path}/out")
    back = [episode for _, episode in find_format("rlds").read(tmp_path / "out", {}).episodes()]
    assert all(a.equals(b) for a, b in zip(back, mine, strict=True))
