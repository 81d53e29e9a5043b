"""A store written by format 1 is read for ever, and the same writing gives the same bytes."""

import json
import tarfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tests.golden.make_store_format_1 import ARCHIVE, TRUTH, describe, make
from tests.writing import write_episode

from understudy.core import StoreError
from understudy.core import tree as trees
from understudy.core.examples import random_episode, small_spec
from understudy.replay import EVERYTHING, Reader, Store, compact, verify
from understudy.replay.format.paths import segment_files
from understudy.service import Server, ServerConfig, connect


@pytest.fixture
def golden(tmp_path: Path) -> Path:
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(tmp_path, filter="data")
    return tmp_path / "store_format_1"


def test_the_golden_store_is_read_byte_for_byte(golden: Path) -> None:
    assert describe(golden) == json.loads(TRUTH.read_text())
    report = verify(golden)
    assert report.ok, report.problems
    assert report.num_episodes == 10


def test_the_golden_store_can_be_written_to(golden: Path) -> None:
    episode = random_episode(small_spec(), 4, 77)
    with Store.open(golden) as store:
        writer = store.writer("new", small_spec())
        writer.begin(episode.info)
        for step in episode.steps():
            writer.append(step)
        writer.end(episode.last_observation)
    with Reader(golden) as reader:
        assert reader.read(11).equals(episode)
    assert verify(golden).ok


def test_the_golden_store_keeps_its_writers_and_gets_the_new_column(golden: Path) -> None:
    with Reader(golden) as reader:
        before = reader.catalog.writers()
        with pytest.raises(StoreError, match="there is no column 'tusk'; did you mean 'task'"):
            reader.episodes("tusk = 1")
    assert before[0].checks == ()
    with Store.open(golden) as store:
        assert store.catalog.writers() == before
        with store.catalog.transaction(write=True):
            store.catalog.put_last_seq(before[0].id, before[0].last_seq, (3,))
    with Reader(golden) as reader:
        assert reader.catalog.writers() == [replace(before[0], checks=(3,)), *before[1:]]


def test_the_golden_store_is_served_sampled_and_compacted(golden: Path, tmp_path: Path) -> None:
    """As a lab would go on with it: a server over it, a writer with an old name, a learner, retention, compaction."""
    episode = random_episode(small_spec(), 4, 77)
    with Reader(golden) as reader:
        before = {record.id: reader.rows(record.id)[1] for record in reader.episodes("id > 1 and deleted is null")}
    with Store.open(golden) as store, Server(store, ServerConfig(port=0)) as server:
        old_name = store.catalog.writers()[0].name
        with connect(server.address) as remote:
            with remote.writer(old_name, small_spec(), spool=tmp_path / "spool") as writer:
                write_episode(writer, episode)
                assert writer.wait_delivered(30.0)
            spec = store.catalog.put_spec(small_spec())
            with remote.sampler(EVERYTHING, batch_size=8, spec=spec, depth=0) as sampler:
                assert len(sampler.sample().reward) == 8
            assert remote.publish({"w": np.zeros(3, np.float32)}) == 1
        store.delete([11])
        store.restore([11])
        store.delete([1])
        compact(store, min_dead=0.0)
    with Reader(golden) as reader:
        assert reader.read(11).equals(episode)
        assert reader.record(1).purged
        for number, columns in before.items():
            _, found = reader.rows(number)
            assert all(trees.equal_leaf(list(found[path]), list(columns[path])) for path in columns), number
    assert verify(golden).ok


def test_the_same_writing_gives_the_same_segments(golden: Path, tmp_path: Path) -> None:
    make(tmp_path / "again")
    again = segment_files(tmp_path / "again")
    assert [file.name for file in again] == [file.name for file in segment_files(golden)]
    for new, old in zip(again, segment_files(golden), strict=True):
        assert new.read_bytes() == old.read_bytes(), new.name
