"""Prefetch: the same batches as without it, errors handed on, and a thread that ends with its owner."""

import gc
import json
import signal
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from tests.waiting import wait_for
from tests.writing import write_episode

from understudy.core import DamageError, StoreError
from understudy.core.examples import random_episode, robot_spec, small_spec
from understudy.replay import Reader, Store
from understudy.replay.format.paths import segment_files
from understudy.replay.format.segment import read_layout
from understudy.replay.read.view import EVERYTHING
from understudy.replay.sample.prefetch import Prefetch
from understudy.replay.sample.sampler import Sampler


def fill(path: Path, spec, num_episodes: int = 6) -> None:
    with Store.open(path) as store:
        writer = store.writer("w", spec)
        for seed in range(num_episodes):
            episode = random_episode(spec, 9, seed)
            write_episode(writer, episode)


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == "prefetch"]


def test_the_same_batches_as_without(tmp_path: Path) -> None:
    fill(tmp_path / "store", small_spec())
    with Reader(tmp_path / "store") as one, Reader(tmp_path / "store") as two:
        plain = Sampler(one, EVERYTHING, batch_size=16, seed=1)
        plain.follow()
        with Prefetch(Sampler(two, EVERYTHING, batch_size=16, seed=1), depth=3) as ahead:
            for _ in range(50):
                wanted, batch = plain.sample(), next(ahead)
                assert np.array_equal(batch.observation, wanted.observation)
                assert ahead.state() == plain.state()  # of what was handed out, not of what was made
        assert not threads()


def test_an_error_reaches_the_caller(tmp_path: Path) -> None:
    spec = robot_spec(20)
    fill(tmp_path / "store", spec)
    segment = segment_files(tmp_path / "store")[0]
    with segment.open("r+b") as file:
        file.seek(read_layout(segment).columns["observation/wrist_1"].at(0))
        file.write(bytes(50_000))
    with Reader(tmp_path / "store") as reader:
        ahead = Prefetch(Sampler(reader, EVERYTHING, batch_size=64))
        with pytest.raises(DamageError, match=r"observation/wrist_1 of row .* is not what was written"):
            next(ahead)
        with pytest.raises(StopIteration):
            next(ahead)
        ahead.close()
        empty = Prefetch(Sampler(reader, EVERYTHING, batch_size=64))
        with pytest.raises((DamageError, StoreError)):
            next(empty)
        empty.close()


def test_the_thread_ends_with_its_owner(tmp_path: Path) -> None:
    fill(tmp_path / "store", small_spec())
    with Reader(tmp_path / "store") as reader:
        ahead = Prefetch(Sampler(reader, EVERYTHING, batch_size=4))
        next(ahead)
        assert threads()
        del ahead
        gc.collect()
        wait_for(lambda: not threads())


def test_new_commits_are_taken_in_while_it_runs(tmp_path: Path) -> None:
    spec = small_spec()
    fill(tmp_path / "store", spec)
    with (
        Store.open(tmp_path / "store") as store,
        Reader(tmp_path / "store") as reader,
        Prefetch(Sampler(reader, EVERYTHING, batch_size=64, seed=2), follow_every=2) as ahead,
    ):
        next(ahead)
        writer = store.writer("late", spec)
        episode = random_episode(spec, 30, 99)
        write_episode(writer, episode)
        assert any((next(ahead).episode == 7).any() for _ in range(20))


LEARNER = """
import hashlib, json, sys
from pathlib import Path
from understudy.replay import Reader
from understudy.replay.sample.sampler import Sampler
from understudy.replay.read.view import EVERYTHING

path, state_file, count = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
with Reader(path) as reader:
    sampler = Sampler(reader, EVERYTHING, batch_size=8, seed=9)
    if state_file.exists():
        sampler.restore(json.loads(state_file.read_text()))
    else:
        sampler.follow()
    for number in range(count):
        batch = sampler.sample()
        print(hashlib.sha256(batch.observation.tobytes() + batch.index.tobytes()).hexdigest(), flush=True)
        if number == 49 and not state_file.exists():
            state_file.with_suffix(".new").write_text(json.dumps(sampler.state()))
            state_file.with_suffix(".new").rename(state_file)
    sampler.close()
"""


def test_save_kill_restore_gives_the_same_thousand_batches(tmp_path: Path) -> None:
    path, state = tmp_path / "store", tmp_path / "state.json"
    fill(path, small_spec())

    def start(count: int) -> subprocess.Popen[str]:
        args = [sys.executable, "-c", LEARNER, str(path), str(state), str(count)]
        return subprocess.Popen(args, stdout=subprocess.PIPE, text=True)

    with start(100_000) as first:
        assert first.stdout
        wanted = [first.stdout.readline() for _ in range(1050)][50:]
        first.send_signal(signal.SIGKILL)
        first.stdout.read()
    assert set(json.loads(state.read_text())) == {"seed", "num_batches", "commit", "view", "selector"}
    with Store.open(path) as store:  # the store grows and loses something meanwhile
        writer = store.writer("w2", small_spec())
        episode = random_episode(small_spec(), 40, 77)
        write_episode(writer, episode)
        store.delete([2])
    with start(1000) as second:
        assert second.stdout
        assert second.stdout.read().splitlines(keepends=True) == wanted
