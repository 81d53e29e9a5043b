"""Writer: the order of calls, and when rows are committed."""

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from understudy.core import (
    ArraySpec,
    EpisodeError,
    EpisodeInfo,
    Png,
    Spec,
    SpecError,
    Step,
    StepSpec,
    StoreError,
    StoreFailedError,
)
from understudy.core import tree as trees
from understudy.core.episode import stack
from understudy.core.examples import random_steps, small_spec
from understudy.replay import Reader, Store, verify
from understudy.replay.format.chunk import Chunk
from understudy.replay.write.writer import FinishedEpisode, Writer

SPEC = small_spec()
STEPS, LAST = random_steps(SPEC, 9, 1)


class Taker:
    """Takes chunks, or fails as a disk would."""

    keeps_columns = False

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
        (0, 10, "ended"),
        (1, 10, "ended"),
        (2, 5, "open"),
    ]
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


# ---- gaps: what follows steps that were refused is an episode of its own


def append_all(writer: Writer, indices: range, *, refused: bool = False) -> None:
    for index in indices:
        if refused:
            with pytest.raises(StoreFailedError):
                writer.append(STEPS[index])
        else:
            writer.append(STEPS[index])


def parts_of(taker: Taker) -> list[tuple[int, int, int, str, dict[str, str]]]:
    return [(p.episode, p.first_index, p.num_rows, p.state, dict(p.info.labels)) for c in taker.chunks for p in c.parts]


def test_steps_behind_refused_ones_are_an_episode_of_their_own() -> None:
    taker = Taker()
    writer = Writer(taker, "w", "one", SPEC, commit_steps=2)
    writer.begin(task="pick", labels={"colour": "red"})
    append_all(writer, range(2))
    append_all(writer, range(2, 3))
    taker.broken = True
    append_all(writer, range(3, 4), refused=True)  # it is kept: only the commit that it brought about failed
    append_all(writer, range(4, 7), refused=True)  # these are not taken
    assert writer.num_uncommitted == 2
    taker.broken = False
    append_all(writer, range(7, 9))
    writer.end(LAST, success=True)
    assert parts_of(taker) == [
        (0, 0, 2, "open", {"colour": "red"}),
        (0, 2, 2, "open", {"colour": "red"}),
        (0, 4, 0, "cut", {"colour": "red"}),
        (1, 0, 2, "open", {"colour": "red", "steps_missing_before": "3"}),
        (1, 2, 1, "ended", {"colour": "red", "steps_missing_before": "3"}),
    ]
    assert [chunk.seq for chunk in taker.chunks] == [0, 1, 2, 3]
    last = taker.chunks[-1].parts[-1].info
    assert (last.task, last.success) == ("pick", True)


def test_the_first_steps_of_an_episode_may_be_the_ones_that_are_missing() -> None:
    taker = Taker()
    writer = Writer(taker, "w", "one", SPEC, commit_steps=2)
    writer.begin(seed=0)
    taker.broken = True
    append_all(writer, range(1))
    append_all(writer, range(1, 2), refused=True)
    with pytest.raises(StoreFailedError):
        writer.cut()
    taker.broken = False
    writer.cut()
    taker.broken = True
    assert writer.begin(seed=1) == 1
    append_all(writer, range(1))
    append_all(writer, range(1, 2), refused=True)
    with pytest.raises(StoreFailedError):
        writer.flush()
    append_all(writer, range(2, 4), refused=True)
    taker.broken = False
    append_all(writer, range(4, 9))
    writer.end(LAST)
    assert parts_of(taker) == [
        (0, 0, 2, "open", {}),
        (0, 2, 0, "cut", {}),
        (1, 0, 2, "open", {}),
        (1, 2, 0, "cut", {}),
        (2, 0, 2, "open", {"steps_missing_before": "2"}),
        (2, 2, 2, "open", {"steps_missing_before": "2"}),
        (2, 4, 2, "ended", {"steps_missing_before": "2"}),
    ]


def test_two_gaps_in_one_episode_are_counted_apart() -> None:
    taker = Taker()
    writer = Writer(taker, "w", "one", SPEC, commit_steps=1)
    writer.begin()
    for good, gone in ((range(1), range(2, 3)), (range(3, 4), range(5, 7))):
        append_all(writer, good)
        taker.broken = True
        append_all(writer, range(good[-1] + 1, good[-1] + 2), refused=True)  # kept
        append_all(writer, gone, refused=True)
        taker.broken = False
    append_all(writer, range(7, 9))
    writer.end(LAST)
    ended = [p.info.labels.get("steps_missing_before") for c in taker.chunks for p in c.parts if p.state != "open"]
    assert ended == [None, "1", "2"]
    assert sum(chunk.num_rows for chunk in taker.chunks) == 10 - 3


def test_an_episode_whose_last_steps_were_refused_is_cut() -> None:
    taker = Taker()
    writer = Writer(taker, "w", "one", SPEC, commit_steps=2)
    writer.begin()
    append_all(writer, range(3))
    taker.broken = True
    append_all(writer, range(3, 9), refused=True)  # the fourth is kept; the last, which is terminated, is not
    with pytest.raises(StoreFailedError):
        writer.end(LAST, success=True)
    taker.broken = False
    writer.end(LAST, success=True)
    assert parts_of(taker) == [(0, 0, 2, "open", {}), (0, 2, 2, "open", {}), (0, 4, 0, "cut", {})]
    assert taker.chunks[-1].parts[-1].info.success is True
    writer.begin()
    append_all(writer, range(8, 9))
    writer.end(LAST)
    assert parts_of(taker)[-1] == (1, 0, 2, "ended", {})  # the next episode has no gap


def test_an_episode_of_which_every_step_was_refused_never_was() -> None:
    taker = Taker()
    writer = Writer(taker, "w", "one", SPEC, commit_steps=1)
    writer.begin()
    taker.broken = True
    append_all(writer, range(1), refused=True)  # kept
    with pytest.raises(StoreFailedError):
        writer.cut()
    taker.broken = False
    writer.cut()
    taker.broken = True
    writer.begin()
    append_all(writer, range(1), refused=True)  # kept, so this one is
    append_all(writer, range(1, 9), refused=True)
    taker.broken = False
    writer.end(LAST)
    assert [part[:4] for part in parts_of(taker)] == [
        (0, 0, 1, "open"),
        (0, 1, 0, "cut"),
        (1, 0, 1, "open"),
        (1, 1, 0, "cut"),
    ]


@pytest.mark.parametrize("last", [None, LAST], ids=["without", "with"])
def test_the_observation_of_a_cut_behind_a_gap_is_not_stored(last: Any) -> None:
    """It is not what the last step that was taken led to."""
    taker = Taker()
    writer = Writer(taker, "w", "one", SPEC, commit_steps=2)
    writer.begin()
    append_all(writer, range(1))
    taker.broken = True
    append_all(writer, range(1, 4), refused=True)
    taker.broken = False
    writer.cut(last)
    assert [part[:4] for part in parts_of(taker)] == [(0, 0, 2, "open"), (0, 2, 0, "cut")]


def test_a_store_takes_what_stands_around_gaps(tmp_path: Path) -> None:
    """Against a real store, with steps refused at every place in turn."""

    class Moody:
        keeps_columns = False

        def __init__(self, store: Store) -> None:
            self.store = store
            self.broken = False

        def commit(self, chunk: Chunk) -> int:
            if self.broken:
                raise StoreFailedError("not now")
            return self.store.commit(chunk)

    with Store.open(tmp_path / "store") as store:
        store.begin_writer("w", "one")
        moody = Moody(store)
        writer = Writer(moody, "w", "one", SPEC, commit_steps=2)
        for first in range(9):
            writer.begin(seed=first)
            for index, step in enumerate(STEPS):
                moody.broken = first <= index < first + 4
                with suppress(StoreFailedError):
                    writer.append(step)
            moody.broken = False
            writer.end(LAST)
    rewards = [step.reward for step in STEPS]
    with Reader(tmp_path / "store") as reader:
        for record in reader.episodes():
            _, columns = reader.rows(record.id)
            found = columns["reward"][columns["is_step"]].tolist()
            at = rewards.index(found[0])
            assert found == rewards[at : at + len(found)]
            assert ("steps_missing_before" in record.info.labels) == (at > 0)
    assert verify(tmp_path / "store").ok


@pytest.mark.serial
def test_append_keeps_pythons_lock_while_it_copies_frames_that_are_encoded(tmp_path: Path) -> None:
    """Otherwise a control loop waits, once a frame, for the encoders' threads to give it back."""
    camera = ArraySpec(shape=(480, 640, 3), dtype="uint8", codec=Png())
    spec = StepSpec(
        observation=Spec(dict.fromkeys(("front", "side", "wrist"), camera)),
        action=Spec(ArraySpec(shape=(7,), dtype="float32")),
    )
    frames = np.random.default_rng(0).integers(0, 256, (480, 640, 3), np.uint8)
    step = Step(observation=dict.fromkeys(("front", "side", "wrist"), frames), action=np.zeros(7, np.float32), reward=0)
    turns, over, before_s = 0, False, sys.getswitchinterval()

    def spin() -> None:
        nonlocal turns
        while not over:
            turns += 1

    with Store.open(tmp_path / "store") as store:
        writer = store.writer("w", spec, commit_steps=20)
        writer.begin()
        other = threading.Thread(target=spin)
        other.start()
        sys.setswitchinterval(0.1)
        try:
            undisturbed = []
            for _ in range(5):
                time.sleep(0)  # the lock is new: the other thread asks for it in 0.1 s
                before = turns
                writer.append(step)
                undisturbed.append(turns == before)
        finally:
            sys.setswitchinterval(before_s)
            over = True
            other.join()
        writer.cut()
    assert any(undisturbed)
    with Reader(tmp_path / "store") as reader:
        _, columns = reader.rows(1)
    assert all(np.array_equal(columns["observation/side"][row], frames) for row in range(5))


def test_frames_of_any_memory_order_are_copied_right(tmp_path: Path) -> None:
    frame = np.random.default_rng(0).integers(0, 256, (64, 48, 3), np.uint8)
    depth = np.random.default_rng(1).integers(0, 2**16, (64, 48), np.uint16)
    spec = StepSpec(
        observation=Spec(
            {"rgb": ArraySpec(shape=(64, 48, 3), dtype="uint8"), "depth": ArraySpec(shape=(64, 48), dtype="uint16")}
        ),
        action=Spec(ArraySpec(shape=(7,), dtype="float32")),
    )
    seen = {"rgb": frame[:, ::-1, ::-1], "depth": np.asfortranarray(depth)}
    with Store.open(tmp_path / "store") as store:
        writer = store.writer("w", spec)
        writer.begin()
        writer.append(Step(observation=seen, action=np.zeros(7, np.float32), reward=0.0, truncated=True))
        frozen = np.array(seen["rgb"])
        frozen.flags.writeable = False
        writer.end({"rgb": frozen, "depth": depth})
    with Reader(tmp_path / "store") as reader:
        _, columns = reader.rows(1)
    for row in range(2):
        np.testing.assert_array_equal(columns["observation/rgb"][row], seen["rgb"])
        np.testing.assert_array_equal(columns["observation/depth"][row], depth)


@pytest.fixture
def frequent_switches() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("frequent_switches")
def test_threads_that_share_a_writer_lose_nothing(tmp_path: Path) -> None:
    accepted: list[float] = []
    refused: set[str] = set()

    def append(thread: int) -> None:
        for number in range(25):
            reward = float(1000 * thread + number)
            step = Step(observation=STEPS[0].observation, action=STEPS[0].action, reward=reward)
            while True:
                try:
                    writer.append(step)
                except StoreError as error:
                    refused.add(str(error))
                    time.sleep(0)
                else:
                    accepted.append(reward)
                    break

    with Store.open(tmp_path / "store") as store:
        writer = store.writer("w", SPEC, commit_steps=50)
        writer.begin(task="t")
        threads = [threading.Thread(target=append, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        writer.cut(LAST)  # the writer goes on
        assert len(accepted) == 8 * 25
    assert refused <= {
        "writer 'w': another thread is inside a call of it, and this call was refused; give each thread a writer of "
        "its own"
    }
    with Reader(tmp_path / "store") as reader:
        assert sorted(step.reward for step in reader.read(1).steps()) == sorted(accepted)
    assert verify(tmp_path / "store").ok


def test_a_second_thread_is_refused_while_one_is_inside() -> None:
    inside, leave = threading.Event(), threading.Event()

    class Slow(Taker):
        def commit(self, chunk: Chunk) -> int:
            inside.set()
            leave.wait()
            return super().commit(chunk)

    taker = Slow()
    writer = Writer(taker, "w", "one", SPEC, commit_steps=1)
    writer.begin()
    thread = threading.Thread(target=writer.append, args=(STEPS[0],))
    thread.start()
    inside.wait()
    for call in (lambda: writer.append(STEPS[1]), writer.flush, writer.cut, writer.begin):
        with pytest.raises(StoreError, match="another thread is inside a call of it, and this call was refused"):
            call()
    leave.set()
    thread.join()
    writer.append(STEPS[1])
    assert [chunk.parts[0].first_index for chunk in taker.chunks] == [0, 1]


def whole_episode(num_rows: int = 10) -> tuple[dict[str, Any], FinishedEpisode]:
    rows = [SPEC.row(step) for step in STEPS] + [SPEC.last_row(LAST)]
    columns = {path: stack([row[path] for row in rows], leaf) for path, leaf in SPEC.columns.items()}
    return columns, FinishedEpisode(num_rows=num_rows, state="cut", info=EpisodeInfo(task="pick"))


def test_whole_episodes_are_stored_as_their_steps_one_by_one(tmp_path: Path) -> None:
    columns, episode = whole_episode()
    with Store.open(tmp_path / "store") as store:
        one_by_one, whole = store.writer("one", SPEC), store.writer("whole", SPEC)
        one_by_one.begin(EpisodeInfo(task="pick"))
        for step in STEPS:
            one_by_one.append(step)
        one_by_one.cut(LAST)
        assert whole.write_episodes(columns, [episode]) == store.last_commit
        whole.begin()
        whole.append(STEPS[0])
        with pytest.raises(EpisodeError, match="is still open; call end"):
            whole.write_episodes(columns, [episode])
        whole.cut()
        whole.write_episodes(columns, [episode])
    with Reader(tmp_path / "store") as reader:
        first, second, last = (reader.read(record.id) for record in reader.episodes("num_rows > 1"))
        for found in (second, last):
            assert trees.equal(first.observation, found.observation)
            assert trees.equal(first.action, found.action)
            assert (first.info, len(first)) == (found.info, len(found))
    assert verify(tmp_path / "store").ok


def test_whole_episodes_that_do_not_fit_are_refused_and_a_failed_write_ends_the_writer() -> None:
    columns, episode = whole_episode()
    taker = Taker()
    writer = Writer(taker, "w", "one", SPEC)
    with pytest.raises(SpecError, match="reward: expected finite numbers"):
        writer.write_episodes({**columns, "reward": columns["reward"] * np.float32(np.nan)}, [episode])
    with pytest.raises(SpecError, match=r"is_step: expected 10 rows of bool .*, got nothing; pass the column"):
        writer.write_episodes({path: c for path, c in columns.items() if path != "is_step"}, [episode])
    writer.write_episodes(columns, [episode])
    taker.broken = True
    with pytest.raises(StoreFailedError):
        writer.write_episodes(columns, [episode])
    taker.broken = False
    with pytest.raises(StoreError, match="its last write_episodes failed, and the store may have it; make a new"):
        writer.write_episodes(columns, [episode])
    assert len(taker.chunks) == 1
