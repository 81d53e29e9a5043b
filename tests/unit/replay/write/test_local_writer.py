"""LocalWriter: `append` does not wait for the disk, and nothing is lost or hidden by that."""

import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from understudy.core import ArraySpec, BacklogError, EpisodeError, Png, Spec, Step, StepSpec, StoreFailedError
from understudy.core.examples import random_steps, small_spec
from understudy.replay import Reader, Store
from understudy.replay.format.chunk import Chunk
from understudy.replay.write import writer as writer_module
from understudy.replay.write.background import MAX_QUEUED_CHUNKS
from understudy.replay.write.local_writer import LocalWriter

SPEC = small_spec()


class SlowDisk:
    """Commits to a store when it is let."""

    def __init__(self, store: Store):
        self._store = store
        self.may_commit = threading.Event()
        self.num_commits = 0

    def commit(self, chunk: Chunk) -> int:
        assert self.may_commit.wait(20)
        self.num_commits += 1
        return self._store.commit(chunk)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store.open(tmp_path / "store") as opened:
        yield opened


def slow_writer(store: Store, **options: Any) -> tuple[LocalWriter, SlowDisk]:
    disk = SlowDisk(store)
    store.begin_writer("w", "only")
    return LocalWriter(disk.commit, "w", "only", SPEC, commit_steps=2, **options), disk


def step(number: int, *, last: bool = False) -> Step:
    return Step(observation=np.full(4, number, np.float32), action=np.zeros(2, np.float32), reward=0.0, terminated=last)


def stored(store: Store) -> list[list[float]]:
    """The first number of each row of each episode."""
    with Reader(store.path) as reader:
        return [reader.rows(record.id)[1]["observation"][:, 0].tolist() for record in reader.episodes()]


def test_append_returns_while_the_disk_works_and_flush_waits(store: Store) -> None:
    writer, disk = slow_writer(store)
    writer.begin()
    for number in range(2 * MAX_QUEUED_CHUNKS):
        writer.append(step(number))
    assert disk.num_commits == 0
    assert writer.num_uncommitted == 2 * MAX_QUEUED_CHUNKS
    threading.Timer(0.2, disk.may_commit.set).start()
    assert writer.flush() == store.last_commit == MAX_QUEUED_CHUNKS + 1  # the first one began the writer
    assert writer.num_uncommitted == 0
    assert stored(store) == [list(range(2 * MAX_QUEUED_CHUNKS))]


def test_end_means_durable(store: Store) -> None:
    writer, disk = slow_writer(store)
    writer.begin()
    writer.append(step(0, last=True))
    threading.Timer(0.2, disk.may_commit.set).start()
    writer.end(np.zeros(4, np.float32), success=True)
    assert disk.num_commits == 1
    assert stored(store) == [[0, 0]]


def test_a_full_queue_makes_append_wait(store: Store) -> None:
    writer, disk = slow_writer(store)
    writer.begin()
    began_s = time.monotonic()
    threading.Timer(0.3, disk.may_commit.set).start()
    for number in range(8 * MAX_QUEUED_CHUNKS):
        writer.append(step(number))
    assert time.monotonic() - began_s > 0.2
    writer.flush()
    assert stored(store) == [list(range(8 * MAX_QUEUED_CHUNKS))]


def test_a_full_queue_may_raise_and_the_gap_parts_the_episode(store: Store) -> None:
    writer, disk = slow_writer(store, overflow="raise")
    writer.begin()
    full = 2 * MAX_QUEUED_CHUNKS
    for number in range(full + 1):
        writer.append(step(number))
    with pytest.raises(
        BacklogError, match=rf"writer 'w': {full} steps wait to be encoded and written, .* overflow='block'"
    ):
        writer.append(step(full + 1))  # it is kept, and could not be handed over
    with pytest.raises(BacklogError):
        writer.append(step(full + 2))  # it is refused
    disk.may_commit.set()
    writer.commits.flush()
    writer.append(step(full + 3))
    writer.flush()
    assert stored(store) == [list(range(full + 2)), [full + 3]]


def test_a_full_queue_may_drop_the_rest_of_the_episode(store: Store, caplog: pytest.LogCaptureFixture) -> None:
    writer, disk = slow_writer(store, overflow="drop_episode")
    writer.begin(task="first")
    full = 2 * MAX_QUEUED_CHUNKS
    for number in range(full + 5):
        writer.append(step(number, last=number == full + 4))
    assert writer.num_dropped == 3
    assert "the rest of episode 0 is dropped" in caplog.text
    threading.Timer(0.2, disk.may_commit.set).start()
    writer.end(np.zeros(4, np.float32))
    writer.begin(task="second")
    writer.append(step(40, last=True))
    writer.end(np.full(4, 41, np.float32))
    assert stored(store) == [list(range(full + 2)), [40, 41]]
    with Reader(store.path) as reader:
        assert [record.state for record in reader.episodes()] == ["cut", "ended"]


def test_an_unknown_overflow_is_refused(store: Store) -> None:
    with pytest.raises(EpisodeError, match="overflow: expected block, raise, drop_episode, got 'wait'"):
        store.writer("w", SPEC, overflow="wait")  # type: ignore[arg-type]


def test_an_error_of_the_disk_is_raised_by_the_next_call(store: Store) -> None:
    def fail(chunk: Chunk) -> int:
        raise StoreFailedError("the disk is full")

    store.begin_writer("w", "only")
    writer = LocalWriter(fail, "w", "only", SPEC, commit_steps=2)
    writer.begin()
    for number in range(2):
        writer.append(step(number))
    writer.commits.drain()
    writer.append(step(2))
    with pytest.raises(StoreFailedError, match="the disk is full"):
        writer.append(step(3))
    with pytest.raises(StoreFailedError, match="the disk is full"):
        writer.flush()


def test_closing_the_store_commits_what_was_handed_over(tmp_path: Path) -> None:
    steps, _ = random_steps(SPEC, 40, 1)
    with Store.open(tmp_path / "store") as store:
        writer = store.writer("w", SPEC, commit_steps=4)
        writer.begin()
        for given in steps[:39]:
            writer.append(given)
    with Reader(tmp_path / "store") as reader:
        assert reader.record(1).num_rows == 36  # as many as fill chunks; the others were not flushed


def test_closing_the_store_raises_what_nobody_has_heard(tmp_path: Path) -> None:
    store = Store.open(tmp_path / "store")
    writer = store.writer("w", SPEC, commit_steps=2)
    writer.begin()
    store._failure = StoreFailedError("the disk is gone")  # as after a write that failed
    for number in range(2):
        writer.append(step(number))
    with pytest.raises(StoreFailedError, match="the disk is gone"):
        store.close()
    with Store.open(tmp_path / "store"):  # its lock is free
        pass


ENDS_WITHOUT_CLOSING = """
import sys
import numpy as np
import understudy as us
camera = us.ArraySpec(shape=(48, 64, 3), dtype="uint8", codec=us.H264(gop_size=2))
action = us.ArraySpec(shape=(2,), dtype="float32")
spec = us.StepSpec(observation=us.Spec({"a": camera, "b": camera}), action=us.Spec(action))
writer = us.Store.open(sys.argv[1]).writer("w", spec, commit_steps=4)
writer.begin()
for number in range(12):
    frame = np.full((48, 64, 3), number, np.uint8)
    writer.append(us.Step(observation={"a": frame, "b": frame}, action=np.zeros(2, np.float32), reward=0.0))
"""


def test_a_process_that_ends_commits_what_was_handed_over(tmp_path: Path) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", ENDS_WITHOUT_CLOSING, str(tmp_path / "store")],
        check=True,
        capture_output=True,
        text=True,
    )
    assert ended.stderr == ""
    with Reader(tmp_path / "store") as reader:
        assert reader.record(1).num_rows == 12


def test_without_background_the_call_that_fills_a_chunk_commits_it(store: Store) -> None:
    writer = store.writer("w", SPEC, commit_steps=2, background=False)
    writer.begin()
    for number in range(4):
        writer.append(step(number))
    assert stored(store) == [[0, 1, 2, 3]]


@pytest.mark.parametrize(("codec", "expected"), [(None, 0), (Png(), 3)])
def test_append_keeps_pythons_lock_only_beside_encoders(
    codec: Png | None, expected: int, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = []
    monkeypatch.setattr(writer_module, "_copy_at_once", lambda source, target: kept.append(source.shape))
    frame = ArraySpec(shape=(64, 64, 3), dtype="uint8", codec=codec)
    spec = StepSpec(observation=Spec({"front": frame}), action=Spec(ArraySpec(shape=(2,), dtype="float32")))
    writer = store.writer("w", spec)
    writer.begin()
    for step in random_steps(spec, 3, seed=0)[0]:
        writer.append(step)
    assert kept == [frame.shape] * expected


def test_the_same_steps_give_the_same_store_in_both_ways(tmp_path: Path) -> None:
    found = []
    for background in (True, False):
        path = tmp_path / str(background)
        with Store.open(path, clock=lambda: 0.0) as store:
            writer = store.writer("w", SPEC, commit_steps=3, background=background)
            for seed in range(3):
                steps, last = random_steps(SPEC, 10, seed)
                writer.begin(seed=seed)
                for given in steps:
                    writer.append(given)
                writer.end(last)
            found.append((store.last_commit, stored(store)))
    assert found[0] == found[1]
