"""Store and Reader: what is kept, what is refused, and in which words."""

import json
import os
import sqlite3
import subprocess
import sys
import threading
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file
from tests.writing import write_episode

from understudy.core import (
    EpisodeInfo,
    SequenceError,
    Source,
    SpecError,
    Step,
    StoreClosedError,
    StoreFormatError,
    StoreLockedError,
)
from understudy.core.examples import CANONICAL, random_episode, random_steps, robot_spec, small_spec
from understudy.replay import Reader, Store, verify
from understudy.replay.format.chunk import Chunk, Part
from understudy.replay.format.paths import segment_files


def write(store: Store, name: str, spec, *episodes) -> None:
    writer = store.writer(name, spec)
    for episode in episodes:
        write_episode(writer, episode)


@pytest.mark.parametrize("name", CANONICAL)
def test_every_canonical_episode_comes_back_bit_for_bit(name: str, tmp_path: Path) -> None:
    spec, episode = CANONICAL[name]()
    with Store.open(tmp_path / "store", segment_bytes=30_000) as store:
        write(store, "w", spec, episode, episode)
    with Reader(tmp_path / "store") as reader:
        assert reader.read(1).equals(episode)
        assert reader.read(2).equals(episode)
        assert reader.spec(1) == spec
    assert verify(tmp_path / "store").ok


def test_segments_are_plain_safetensors(tmp_path: Path) -> None:
    spec, episode = CANONICAL["images"]()
    with Store.open(tmp_path / "store", segment_bytes=100_000) as store:
        write(store, "w", spec, episode)
    tensors = load_file(segment_files(tmp_path / "store")[0])
    rows = len(episode) + 1
    assert np.array_equal(tensors["observation/wrist_1"][:rows], episode.observation["wrist_1"])
    assert np.array_equal(tensors["action"][: rows - 1], episode.action)
    assert tensors["row/index"][:rows].tolist() == list(range(rows))


def test_attributes_sources_and_totals_are_kept(tmp_path: Path) -> None:
    spec = small_spec()
    steps, last = random_steps(spec, 12, 1)
    info = EpisodeInfo(
        task="pick",
        instruction="pflücke",
        init_state=3,
        seed=9,
        group="g",
        actor="a",
        operator="ada",
        success=False,
        split="eval",
        labels={"x": "1"},
    )
    with Store.open(tmp_path / "store") as store:
        writer = store.writer("w", spec)
        writer.begin(info)
        for step in steps:
            writer.append(step)
        writer.end(last, success=True, labels={"x": "2"})
    with Reader(tmp_path / "store") as reader:
        record = reader.record(1)
        stored = reader.read(1)
    assert (record.info.task, record.info.instruction, record.info.init_state) == ("pick", "pflücke", 3)
    assert (record.info.seed, record.info.group, record.info.actor) == (9, "g", "a")
    assert (record.info.operator, record.info.success, record.info.split) == ("ada", True, "eval")
    assert record.info.labels == {"x": "2"}
    assert record.info.kind == "correction"  # a human took over
    assert record.num_human == sum(step.source is Source.HUMAN for step in steps) > 0
    assert record.num_policy == 12 - record.num_human
    assert record.total_reward == pytest.approx(sum(step.reward for step in steps))
    assert (record.num_steps, record.num_rows, record.state) == (12, 13, "ended")
    index = next(n for n, step in enumerate(steps) if step.source is Source.HUMAN)
    takeover = steps[index]
    assert np.array_equal(stored.proposal[index], takeover.proposal)
    assert stored.has_proposal[index]
    assert stored.policy_version[index] == takeover.policy_version


def test_an_episode_in_progress_is_readable_up_to_its_last_commit(tmp_path: Path) -> None:
    spec = small_spec()
    steps, _ = random_steps(spec, 10, 1)
    with Store.open(tmp_path / "store") as store, Reader(tmp_path / "store") as reader:
        writer = store.writer("w", spec, commit_steps=4, background=False)
        writer.begin()
        for step in steps[:6]:
            writer.append(step)
        assert reader.record(1).num_rows == 4
        assert len(reader.read(1)) == 3  # the outcome of the fourth step is not known yet
        writer.flush()
        assert len(reader.read(1)) == 5
        assert reader.record(1).state == "open"


def test_commits_count_up_and_followers_are_told_only_what_is_new(tmp_path: Path) -> None:
    spec = small_spec()
    with Store.open(tmp_path / "store") as store, Reader(tmp_path / "store") as reader:
        assert not reader.follow()
        write(store, "w", spec, random_episode(spec, 3, 1))
        first = reader.follow()
        write(store, "w", spec, random_episode(spec, 4, 2))
        second = reader.follow()
        assert first.episodes == (1,)
        assert second.episodes == (2,)
        assert second.spans["num_rows"].sum() == 5
        assert second.commit > first.commit
        assert not reader.follow(timeout_s=0.01)
        store.label([1], {"x": "y"})
        assert reader.follow().episodes == (1,)


def test_a_chunk_sent_twice_is_stored_once(tmp_path: Path) -> None:
    spec = small_spec()
    rows = [spec.row(step) for step in random_steps(spec, 3, 1)[0]]
    columns = {
        path: np.stack([np.asarray(row[path], leaf.dtype) for row in rows]) for path, leaf in spec.columns.items()
    }
    part = Part(episode=0, first_index=0, num_rows=3, state="cut", info=EpisodeInfo())
    with Store.open(tmp_path / "store") as store:
        assert store.begin_writer("w", "one").last_seq == -1
        chunk = Chunk(writer="w", incarnation="one", seq=0, spec=spec, columns=columns, parts=(part,))
        first = store.commit(chunk)
        assert store.commit(chunk) == first
        assert store.begin_writer("w", "one").last_seq == 0
        with pytest.raises(SequenceError, match="expected chunk 1, got 2; send the chunks between them"):
            store.commit(Chunk(writer="w", incarnation="one", seq=2, spec=spec, columns=columns, parts=(part,)))
        with pytest.raises(SequenceError, match="episode 0 has ended; give the next one a new number"):
            store.commit(Chunk(writer="w", incarnation="one", seq=1, spec=spec, columns=columns, parts=(part,)))
        wrong = {**columns, "reward": np.zeros(3, np.float64)}
        new = Part(episode=1, first_index=0, num_rows=3, state="cut", info=EpisodeInfo())
        with pytest.raises(SpecError, match="reward: expected 3 rows of float32"):
            store.commit(Chunk(writer="w", incarnation="one", seq=1, spec=spec, columns=wrong, parts=(new,)))
    with Reader(tmp_path / "store") as reader:
        assert [record.num_rows for record in reader.episodes()] == [3]


def test_a_new_writer_of_the_same_name_fences_the_old_one_off(tmp_path: Path) -> None:
    spec = small_spec()
    steps, _ = random_steps(spec, 5, 1)
    with Store.open(tmp_path / "store") as store:
        old = store.writer("arm", spec)
        old.begin()
        old.append(steps[0])
        old.flush()
        store.writer("arm", spec)
        old.append(steps[1])
        with pytest.raises(SequenceError, match="was replaced by a newer process of the same name"):
            old.flush()
        with pytest.raises(SequenceError, match="was replaced"):
            store.begin_writer("arm", old.incarnation)
    with Reader(tmp_path / "store") as reader:
        assert reader.record(1).state == "cut"
        assert reader.record(1).num_rows == 1


def test_commits_of_many_threads_are_grouped(tmp_path: Path) -> None:
    spec = small_spec()
    num_threads, num_episodes = 8, 20
    with Store.open(tmp_path / "store") as store:
        before = store.last_commit

        def work(number: int) -> None:
            writer = store.writer(f"w{number}", spec)
            for n in range(num_episodes):
                episode = random_episode(spec, 3, number * 100 + n)
                write_episode(writer, episode)

        threads = [threading.Thread(target=work, args=(number,)) for number in range(num_threads)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        commits = store.last_commit - before - num_threads  # less the writers' own beginnings
    with Reader(tmp_path / "store") as reader:
        records = list(reader.episodes())
        assert len(records) == num_threads * num_episodes
        for record in records:
            assert reader.read(record.id).equals(random_episode(spec, 3, record.info.seed))
    assert commits < num_threads * num_episodes


def test_judging_and_labelling_afterwards(tmp_path: Path) -> None:
    spec = small_spec()
    with Store.open(tmp_path / "store") as store, Reader(tmp_path / "store") as reader:
        write(store, "w", spec, random_episode(spec, 3, 1))
        store.set_success([1], False)
        store.label([1], {"colour": None, "blurry": "yes"})
        assert reader.record(1).info.success is False
        assert reader.record(1).info.labels == {"blurry": "yes"}


def test_a_label_on_an_open_episode_survives_its_end(tmp_path: Path) -> None:
    spec = small_spec()
    steps, last = random_steps(spec, 3, 1)
    with Store.open(tmp_path / "store") as store, Reader(tmp_path / "store") as reader:
        writer = store.writer("w", spec)
        writer.begin(labels={"a": "1"})
        writer.append(steps[0])
        writer.flush()
        store.label([1], {"b": "2"})
        store.set_success([1], True)
        for step in steps[1:]:
            writer.append(step)
        writer.end(last)
        assert reader.record(1).info.labels == {"a": "1", "b": "2"}
        assert reader.record(1).info.success is True


# ---- refusals


def test_a_second_writing_process_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "store"
    with Store.open(path):
        code = f"from understudy.replay import Store; Store.open({str(path)!r})"
        other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
        assert "StoreLockedError" in other.stderr
        assert f"another process is writing to this store (pid {os.getpid()} on " in other.stderr
        assert "stop it, or only read" in other.stderr
        here = rf"^{path}: this process is writing to this store already; use the one that it has open, or close that"
        with pytest.raises(StoreLockedError, match=here):
            Store.open(path)
    Store.open(path).close()


@pytest.mark.serial
def test_a_forked_child_does_not_hold_the_lock(tmp_path: Path) -> None:
    store = Store.open(tmp_path / "store")
    pid = os.fork()
    if pid == 0:
        try:
            store.delete([1])
        except StoreClosedError:
            os._exit(7)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
    store.close()


def test_a_closed_store_takes_nothing(tmp_path: Path) -> None:
    store = Store.open(tmp_path / "store")
    store.close()
    store.close()
    with pytest.raises(StoreClosedError, match="the store is closed in this process; open it here"):
        store.delete([1])


def test_a_store_of_a_newer_format_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "store"
    Store.open(path).close()
    with closing(sqlite3.connect(path / "catalog.sqlite")) as db, db:
        db.execute("update meta set value = '3' where key = 'format'")
    db.close()
    (path / "catalog.seal").unlink()
    for opening in (Store.open, Reader, verify):
        with pytest.raises(
            StoreFormatError, match=r"written in store format 3, and .* reads up to 2; run `pip install"
        ):
            opening(path)


def test_a_directory_with_other_things_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("all of it")
    with pytest.raises(
        StoreFormatError, match=r"holds other files \(thesis.tex\) and no catalog.sqlite; choose an empty"
    ):
        Store.open(tmp_path)
    with pytest.raises(StoreFormatError, match="not an Understudy store"):
        Reader(tmp_path)
    with pytest.raises(StoreFormatError, match="a store is a directory, and this is a file"):
        Store.open(tmp_path / "thesis.tex")
    with pytest.raises(StoreFormatError, match="not an Understudy store"):
        Store.open(tmp_path / "nowhere", create=False)


def test_times_come_from_the_clock_and_order_does_not(tmp_path: Path) -> None:
    spec = small_spec()
    times = iter([1000.0 - n for n in range(10_000)])  # a clock that runs backwards
    with Store.open(tmp_path / "store", clock=lambda: next(times)) as store, Reader(tmp_path / "store") as reader:
        write(store, "w", spec, random_episode(spec, 3, 1), random_episode(spec, 3, 2))
        first, second = reader.episodes()
        assert second.begun_at < first.begun_at
        assert second.begun > first.begun
    assert verify(tmp_path / "store").ok


def test_segment_bytes_sets_the_size_of_segments(tmp_path: Path) -> None:
    spec = robot_spec(16)
    for name, size in (("many", 50_000), ("few", 5_000_000)):
        with Store.open(tmp_path / name, segment_bytes=size) as store:
            write(store, "w", spec, *[random_episode(spec, 60, n) for n in range(4)])
    assert len(segment_files(tmp_path / "many")) > 3
    assert len(segment_files(tmp_path / "few")) == 1


def test_the_lock_says_who_and_a_dead_owner_does_not_matter(tmp_path: Path) -> None:
    path = tmp_path / "store"
    with Store.open(path):
        assert json.loads((path / "writer.lock").read_text())["pid"] == os.getpid()
    Store.open(path).close()


def test_only_a_step_of_the_spec_is_taken(tmp_path: Path) -> None:
    spec = small_spec()
    with Store.open(tmp_path / "store") as store:
        writer = store.writer("w", spec)
        writer.begin()
        with pytest.raises(
            SpecError, match=r"observation: expected float32 \[4\], got float64 \[4\]; convert it first"
        ):
            writer.append(Step(observation=np.zeros(4), action=np.zeros(2, np.float32), reward=0.0))
        assert writer.num_uncommitted == 0


def test_what_an_episode_said_before_an_edit_is_kept(tmp_path: Path) -> None:
    spec = small_spec()
    with Store.open(tmp_path / "store") as store:
        write(store, "w", spec, random_episode(spec, 3, 1))
        store.label([1], {"x": "y"})
        store.delete([1])
        edits = store.catalog._rows("select commit_id, episode, state, deleted, info from edits order by id")
    assert [(commit, episode, state, deleted) for commit, episode, state, deleted, _ in edits] == [
        (3, 1, "ended", None),
        (4, 1, "ended", None),
    ]
    assert json.loads(edits[0][4])["labels"] == {"colour": "red"}
    assert json.loads(edits[1][4])["labels"] == {"colour": "red", "x": "y"}
