"""A spool written by format 1 is delivered for ever, and the same recording gives the same bytes."""

import tarfile
from pathlib import Path

import pytest
from tests.golden.make_spool_format_1 import ARCHIVE, make
from tests.golden.make_store_format_1 import ARCHIVE as STORE_ARCHIVE
from tests.writing import write_episode

from understudy.core import tree as trees
from understudy.core.examples import CANONICAL, random_episode, small_spec
from understudy.replay import Reader, Store, verify
from understudy.service import Server, ServerConfig, connect

NUM_ROWS = 13 + 8 + 10  # of the three processes; two rows of the second were acknowledged before


@pytest.fixture
def golden(tmp_path: Path) -> Path:
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(tmp_path, filter="data")
    return tmp_path / "spool_format_1"


def test_the_golden_spool_is_delivered_whole(golden: Path, tmp_path: Path) -> None:
    with (
        Store.open(tmp_path / "store") as store,
        Server(store, ServerConfig(port=0)) as server,
        connect(f"shard-0={server.address}") as remote,
        remote.writer("arm", small_spec(), spool=golden) as writer,
    ):
        assert writer.wait_delivered(30.0)
        delivery = writer.delivery
        assert (delivery.delivered, delivery.recorded, delivery.spool_bytes) == (NUM_ROWS, 0, 0)
        assert (delivery.queued, delivery.dropped, delivery.refused, delivery.problem) == (0, 0, 0, None)
    assert {path.name for path in golden.iterdir()} == {"lock"}  # all delivered, so nothing is kept
    with Reader(tmp_path / "store") as reader:
        whole, rest, last = reader.episodes("1")
        assert reader.read(whole.id).equals(CANONICAL["images"]()[1])
        assert (rest.state, rest.info.labels) == ("ended", {"colour": "red", "steps_missing_before": "2"})
        assert last.state == "open"  # nobody ended it
        for record, name, first, num_steps in ((rest, "nested", 2, 7), (last, "text", 0, 9)):
            steps = list(CANONICAL[name]()[1].steps())[first:]
            found = list(reader.read(record.id).steps())
            assert len(found) == num_steps
            for got, wanted in zip(found, steps[:num_steps], strict=True):
                assert trees.equal(got.observation, wanted.observation)
                assert trees.equal(got.action, wanted.action)
                assert got.reward == wanted.reward
    report = verify(tmp_path / "store")
    assert report.ok, report.problems
    assert report.num_rows == NUM_ROWS


def test_the_golden_spool_goes_on_into_the_golden_store(golden: Path, tmp_path: Path) -> None:
    """What an old client recorded, and more from the new one, to a new server over an old store."""
    with tarfile.open(STORE_ARCHIVE) as archive:
        archive.extractall(tmp_path, filter="data")
    path = tmp_path / "store_format_1"
    episode = random_episode(small_spec(), 6, 5)
    with (
        Store.open(path) as store,
        Server(store, ServerConfig(port=0)) as server,
        connect(f"shard-0={server.address}") as remote,
        remote.writer("arm", small_spec(), spool=golden) as writer,
    ):
        write_episode(writer, episode)
        assert writer.wait_delivered(30.0)
        assert writer.delivery.delivered == NUM_ROWS + len(episode) + 1
    with Reader(path) as reader:
        found = list(reader.episodes("1"))
        assert reader.read(found[-1].id).equals(episode)
        assert reader.read(found[-4].id).equals(CANONICAL["images"]()[1])
    report = verify(path)
    assert report.ok, report.problems


def test_the_same_recording_gives_the_same_spool(golden: Path, tmp_path: Path) -> None:
    make(tmp_path / "again")
    files = {path.relative_to(golden) for path in golden.rglob("*.*") if path.name != "route.json"}
    assert len(files) == 10
    for name in files:  # a route is saved only once the sending thread has looked at the log
        assert (tmp_path / "again" / name).read_bytes() == (golden / name).read_bytes(), name
