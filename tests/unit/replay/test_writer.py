"""Writer: the order of calls, and when rows are committed."""

from pathlib import Path

import numpy as np
import pytest

from understudy.core import EpisodeError, StoreFailedError
from understudy.core.examples import random_steps, small_spec
from understudy.replay import Reader, Store
from understudy.replay.chunk import Chunk
from understudy.replay.writer import Writer

SPEC = small_spec()
STEPS, LAST = random_steps(SPEC, 9, 1)


class Taker:
    """Takes chunks, or fails as a disk would."""

    def __init__(self) -> None:
        self.chunks: list[Chunk] = []
        self.broken = False

    def commit(self, chunk: Chunk) -> int:
        if self.broken:
            raise StoreFailedError("disk: write failed; mend it")
        self.chunks.append(chunk)
        return len(self.chunks)


def test_rows_are_committed_every_commit_steps_and_at_the_end() -> None:
    taker = Taker()
    writer = Writer(taker, "w", "one", SPEC, commit_steps=4)
    writer.begin()
    for step in STEPS:
        writer.append(step)
    assert [chunk.num_rows for chunk in taker.chunks] == [4, 4]
    assert writer.num_uncommitted == 1
    writer.end(LAST)
    assert [chunk.num_rows for chunk in taker.chunks] == [4, 4, 2]
    assert [chunk.seq for chunk in taker.chunks] == [0, 1, 2]
    assert [chunk.parts[0].first_index for chunk in taker.chunks] == [0, 4, 8]
    assert [chunk.parts[0].state for chunk in taker.chunks] == ["open", "open", "ended"]


def test_short_episodes_share_a_chunk_when_asked() -> None:
    taker = Taker()
    writer = Writer(taker, "w", "one", SPEC, commit_steps=25, flush_each_episode=False)
    for _ in range(3):
        writer.begin()
        for step in STEPS:
            writer.append(step)
        writer.end(LAST)
    assert [chunk.num_rows for chunk in taker.chunks] == [25]
    assert [(p.episode, p.num_rows, p.state) for p in taker.chunks[0].parts] == [
        (0, 10, "ended"), (1, 10, "ended"), (2, 5, "open"),
    ]  # fmt: skip
    writer.flush()
    assert [(p.episode, p.first_index, p.num_rows) for p in taker.chunks[1].parts] == [(2, 5, 5)]


def test_calls_in_the_wrong_order_are_refused() -> None:
    writer = Writer(Taker(), "w", "one", SPEC)
    for call in (lambda: writer.append(STEPS[0]), lambda: writer.end(LAST), lambda: writer.cut()):
        with pytest.raises(EpisodeError, match=r"outside an episode; call begin\(\) first"):
            call()
    writer.begin()
    with pytest.raises(EpisodeError, match=r"episode 0 is still open; call end\(\) or cut\(\) first"):
        writer.begin()
    writer.append(STEPS[0])
    with pytest.raises(EpisodeError, match="neither terminated nor truncated; mark it, or call cut"):
        writer.end(LAST)
    writer.append(STEPS[-1])
    with pytest.raises(EpisodeError, match=r"was terminated or truncated; call end\(\) with the last observation"):
        writer.append(STEPS[0])
    writer.end(LAST)
    with pytest.raises(EpisodeError, match="commit_steps: expected at least 1, got 0"):
        Writer(Taker(), "w", "one", SPEC, commit_steps=0)


def test_an_episode_without_steps_never_was() -> None:
    taker = Taker()
    writer = Writer(taker, "w", "one", SPEC)
    writer.begin()
    writer.cut()
    writer.flush()
    assert not taker.chunks


def test_the_callers_buffers_may_be_used_again(tmp_path: Path) -> None:
    buffer = np.zeros(4, np.float32)
    with Store.open(tmp_path / "store") as store:
        writer = store.writer("w", SPEC)
        writer.begin()
        for index, step in enumerate(STEPS):
            buffer[:] = index
            writer.append(type(step)(observation=buffer, action=step.action, reward=0.0, terminated=step.terminated))
        buffer[:] = 99
        writer.end(buffer)
    with Reader(tmp_path / "store") as reader:
        assert reader.read(1).observation[:, 0].tolist() == [*range(9), 99]


def test_after_a_failed_commit_nothing_is_forgotten_or_sent_anew() -> None:
    taker = Taker()
    writer = Writer(taker, "w", "one", SPEC, commit_steps=2)
    writer.begin()
    writer.append(STEPS[0])
    taker.broken = True
    for step in STEPS[1:3]:
        with pytest.raises(StoreFailedError):
            writer.append(step)
    assert writer.num_uncommitted == 2  # the second step is kept, the third was refused
    taker.broken = False
    writer.append(STEPS[2])
    writer.append(STEPS[3])
    assert [(chunk.seq, chunk.num_rows) for chunk in taker.chunks] == [(0, 2), (1, 2)]


def test_a_cut_may_have_a_last_observation(tmp_path: Path) -> None:
    with Store.open(tmp_path / "store") as store, Reader(tmp_path / "store") as reader:
        writer = store.writer("w", SPEC)
        for last in (None, LAST):
            writer.begin()
            writer.append(STEPS[0])
            writer.append(STEPS[1])
            writer.cut(last)
        assert [(r.state, r.num_rows, r.num_steps) for r in reader.episodes()] == [("cut", 2, 2), ("cut", 3, 2)]
        assert [len(reader.read(n)) for n in (1, 2)] == [1, 2]
