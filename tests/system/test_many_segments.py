"""A store with more segments than the process may open files: open, follow, sample and serve."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tests.writing import write_episode

from understudy.core.examples import random_episode, random_steps, small_spec
from understudy.replay import EVERYTHING, Store
from understudy.service import connect

MAX_FIRST_BATCH_S = 2.0  # of CPU time, from opening the store
LEARNER = """
import json, os, sys, time
from understudy.replay import EVERYTHING, Reader, Sampler
path, seconds = sys.argv[1], float(sys.argv[2])
started = time.process_time()
with Reader(path) as reader, Sampler(reader, EVERYTHING, batch_size=256, seed=1) as sampler:
    steps = sampler.follow()
    sampler.sample()
    first_s = time.process_time() - started
    end = time.monotonic() + seconds
    batches = descriptors = 0
    while batches < 30 or time.monotonic() < end:
        sampler.sample()
        batches += 1
        if batches % 10 == 0:
            sampler.follow()
            descriptors = max(descriptors, len(os.listdir("/proc/self/fd")))
    for record in reader.episodes():
        reader.read(record.id)
    descriptors = max(descriptors, len(os.listdir("/proc/self/fd")))
    segments = reader.num_open_segments
report = {"steps": steps, "segments": segments, "open": descriptors, "first_s": first_s, "batches": batches}
print(json.dumps(report))
"""


def make(path: Path, num_segments: int) -> None:
    """One segment of 64 rows for each episode."""
    steps, last = random_steps(small_spec(), 63, 1)
    with Store.open(path, segment_bytes=4000) as store:
        writer = store.writer("w", small_spec(), commit_steps=64)
        for seed in range(num_segments):
            writer.begin(seed=seed)
            for step in steps:
                writer.append(step)
            writer.end(last)
    assert len(list((path / "segments").iterdir())) == num_segments


def limited(limit: int, *command: str) -> list[str]:
    """A command that may have so many files open."""
    return ["bash", "-c", f'ulimit -n {limit}; exec "$@"', "bash", *command]


@pytest.mark.parametrize(
    ("num_segments", "limit", "seconds"),
    [(150, 80, 0), pytest.param(2000, 256, 600, marks=pytest.mark.nightly)],
    ids=["some", "many"],
)
def test_more_segments_than_open_files(tmp_path: Path, num_segments: int, limit: int, seconds: float) -> None:
    path = tmp_path / "store"
    make(path, num_segments)
    command = limited(limit, sys.executable, "-c", LEARNER, str(path), str(seconds))
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True)
    report = json.loads(done.stdout)
    print(report)
    assert report["first_s"] < MAX_FIRST_BATCH_S
    assert (report["steps"], report["segments"]) == (num_segments * 63, num_segments)
    assert report["open"] < limit

    command = limited(limit, sys.executable, "-m", "understudy", "serve", str(path), "--port", "0")
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        address = server.stdout.readline().split(" at ")[1].strip()
        with connect(address) as remote, remote.writer("w2", small_spec(), spool=tmp_path / "spool") as writer:
            samplers = [remote.sampler(EVERYTHING, batch_size=256, seed=seed) for seed in range(3)]
            for _ in range(10):
                for sampler in samplers:
                    sampler.sample()
            write_episode(writer, random_episode(small_spec(), 5, 1))
            assert writer.wait_delivered(timeout_s=60)
            for sampler in samplers:
                sampler.close()
    finally:
        server.terminate()
        server.communicate(timeout=60)
    assert server.returncode == 0
