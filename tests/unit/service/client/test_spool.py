"""Spool: what is recorded is there when it is opened again, and goes wherever it is sent."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.writing import write_episode

from understudy.core import StepSpec, StoreFormatError, StoreLockedError
from understudy.core.examples import CANONICAL, random_episode, small_spec, text_spec
from understudy.durable import files
from understudy.replay import Reader, Store, Writer
from understudy.replay.format.chunk import Chunk
from understudy.replay.format.encoded_columns import encoded_chunk
from understudy.service.client import spool as spool_module
from understudy.service.client.spool import Spool, SpoolLog
from understudy.service.wire.chunks import decode_chunk, encode_chunk

SPEC = small_spec()


class Into:
    """Puts a writer's chunks into a log."""

    keeps_columns = False

    def __init__(self, log: SpoolLog):
        self.log = log

    def commit(self, chunk: Chunk) -> int:
        columns = encoded_chunk(chunk).columns
        self.log.put(chunk.seq, encode_chunk(chunk.seq, columns, chunk.parts), chunk.num_rows)
        return 0


def fill(log: SpoolLog, num_steps: int = 9, *, commit_steps: int = 3, episodes: int = 1) -> None:
    writer = Writer(Into(log), "w", log.incarnation, log.spec, commit_steps=commit_steps)
    for seed in range(episodes):
        episode = random_episode(log.spec, num_steps, seed)
        write_episode(writer, episode)


def new_spool(place: Path, spec: StepSpec = SPEC, **options: int) -> SpoolLog:
    """A log that an ended process has left."""
    spool = Spool(place)
    log = spool.begin("w", "ab" * 16, spec)
    fill(log, **options)
    spool.close()
    return log


def contents(log: SpoolLog) -> dict[int, bytes]:
    first = log.first
    assert first is not None
    return {seq: log.read(seq) for seq in range(first, first + len(log))}


@pytest.mark.parametrize("spec", [SPEC, text_spec()], ids=["fixed", "ragged"])
def test_it_survives_being_opened_again(tmp_path: Path, spec: StepSpec) -> None:
    before = new_spool(tmp_path / "spool", spec, episodes=2)
    spool = Spool(tmp_path / "spool")
    (after,) = spool.logs
    assert contents(after) == contents(before)
    assert (after.incarnation, after.spec, after.route) == ("ab" * 16, spec, before.route)
    assert (after.num_bytes, after.num_rows) == (before.num_bytes, before.num_rows)
    assert (spool.num_bytes, spool.num_rows) == (before.num_bytes, 20)
    spool.begin("w", "cd" * 16, spec)
    assert [s.incarnation[:2] for s in spool.logs] == ["ab", "cd"]
    spool.close()


def test_stretches_keep_their_order_and_empty_ones_are_gone(tmp_path: Path) -> None:
    for number in range(12):
        spool = Spool(tmp_path / "spool")
        log = spool.begin("w", f"{99 - number:032d}", SPEC)
        if number % 3:
            fill(log)
        spool.close()
    spool = Spool(tmp_path / "spool")
    assert [99 - int(s.incarnation) for s in spool.logs] == [1, 2, 4, 5, 7, 8, 10, 11]
    spool.close()


def test_in_memory_it_is_the_same_without_files(tmp_path: Path) -> None:
    spool = Spool(None)
    log = spool.begin("w", "ab" * 16, SPEC)
    fill(log)
    assert contents(log) == contents(new_spool(tmp_path / "spool"))
    assert log.acknowledge(1) == 6
    log.remove()
    spool.close()


@pytest.mark.parametrize("left", [0, 1, 7, 8, 100, -1])
def test_a_torn_last_file_is_as_if_it_had_never_been(tmp_path: Path, left: int) -> None:
    before = new_spool(tmp_path / "spool")
    kept = contents(before)
    assert before.directory is not None
    torn = before.directory / "00000003.safetensors"
    torn.write_bytes(torn.read_bytes()[:left])
    del kept[3]
    spool = Spool(tmp_path / "spool")
    assert contents(spool.logs[0]) == kept
    assert not torn.exists()
    assert spool.num_damaged == 1
    spool.close()
    set_aside = tmp_path / "spool" / f"damaged-{before.directory.name}"
    assert {path.name for path in set_aside.iterdir()} == {"hello.json", "hello.json.check", torn.name}
    spool = Spool(tmp_path / "spool")
    assert spool.num_damaged == 1  # until somebody removes it
    spool.close()


def test_a_first_file_that_is_torn_leaves_nothing(tmp_path: Path) -> None:
    before = new_spool(tmp_path / "spool", commit_steps=100)
    assert before.directory is not None
    (before.directory / "00000000.safetensors").write_bytes(b"")
    spool = Spool(tmp_path / "spool")
    assert spool.logs == []
    assert not before.directory.exists()
    spool.close()


def test_one_process_at_a_time(tmp_path: Path) -> None:
    spool = Spool(tmp_path / "spool")
    with pytest.raises(StoreLockedError, match=r"spool: this process is writing to this store already; use the one"):
        Spool(tmp_path / "spool")
    lines = (
        "import sys, pathlib",
        "from understudy.service.client.spool import Spool",
        "Spool(pathlib.Path(sys.argv[1]))",
    )
    command = [sys.executable, "-c", "; ".join(lines), str(tmp_path / "spool")]
    other = subprocess.run(command, capture_output=True, text=True, check=False)
    assert other.returncode == 1
    assert "StoreLockedError" in other.stderr
    spool.close()
    assert subprocess.run(command, check=False).returncode == 0


def test_acknowledged_chunks_are_gone(tmp_path: Path) -> None:
    log = new_spool(tmp_path / "spool")
    assert log.directory is not None
    assert log.acknowledge(-1) == 0
    assert log.acknowledge(1) == 6
    assert (log.first, len(log), log.num_rows, 1 in log, 2 in log) == (2, 2, 4, False, True)
    assert sorted(p.name for p in log.directory.glob("*.safetensors")) == [
        "00000002.safetensors",
        "00000003.safetensors",
    ]
    assert log.acknowledge(1) == 0
    spool = Spool(tmp_path / "spool")
    (again,) = spool.logs
    assert (again.first, len(again), again.num_rows) == (2, 2, 4)
    assert again.acknowledge(3) == 4
    assert (again.first, len(again), again.num_bytes, again.num_rows) == (None, 0, 0, 0)
    again.remove()
    assert not log.directory.exists()
    spool.close()


@pytest.mark.parametrize("delivered", range(7))
@pytest.mark.parametrize("spec", [SPEC, text_spec()], ids=["fixed", "ragged"])
def test_what_is_rerouted_begins_anew_elsewhere(tmp_path: Path, spec: StepSpec, delivered: int) -> None:
    """Chunks up to `delivered` went to one store; a fresh one takes the rest from chunk 0 on."""
    new_spool(tmp_path / "spool", spec, episodes=2, num_steps=9, commit_steps=3)
    spool = Spool(tmp_path / "spool")
    (log,) = spool.logs
    num_rows = 20 - log.acknowledge(delivered)
    log.reroute(writer="w~abababab", shard="there:1")
    spool.close()
    spool = Spool(tmp_path / "spool")  # the route is durable
    (log,) = spool.logs
    assert (log.route.writer, log.route.shard, log.route.base) == ("w~abababab", "there:1", delivered + 1)
    with Store.open(tmp_path / "store") as store:
        store.begin_writer("w~abababab", "i")
        for seq in range(delivered + 1, 8):
            chunk = decode_chunk(log.read(seq), writer="w~abababab", incarnation="i", spec=spec)
            assert chunk.seq == seq - delivered - 1
            store.commit(chunk)
    spool.close()
    whole = [random_episode(spec, 9, seed) for seed in range(2)]
    with Reader(tmp_path / "store") as reader:
        records = list(reader.episodes())
        assert sum(record.num_rows for record in records) == num_rows
        assert records[-1].info.seed == 1
        for record in records:
            assert record.state == "ended"
            assert record.info.seed is not None
            _, columns = reader.rows(record.id)
            missing = 10 - record.num_rows
            steps = list(whole[record.info.seed].steps())[missing:]
            assert columns["reward"][:-1].tolist() == [step.reward for step in steps]


def test_what_is_rerouted_says_that_its_first_steps_are_elsewhere(tmp_path: Path) -> None:
    log = new_spool(tmp_path / "spool")
    log.acknowledge(1)
    log.reroute(writer="v", shard="there:1")
    for seq in (2, 3):
        (part,) = decode_chunk(log.read(seq), writer="v", incarnation="i", spec=SPEC).parts
        assert part.info.labels == {"colour": "red", "steps_missing_before": "6"}


def test_a_cut_of_what_is_elsewhere_makes_no_episode_here(tmp_path: Path) -> None:
    """The first chunk to go elsewhere may begin with the end, without rows, of an episode that is all delivered."""
    spool = Spool(tmp_path / "spool")
    log = spool.begin("w", "ab" * 16, SPEC)
    writer = Writer(Into(log), "w", log.incarnation, SPEC, commit_steps=3, flush_each_episode=False)
    episode = random_episode(SPEC, 9, 0)
    for length in (3, 3):  # each is committed with its third step, and its end comes with the next chunk
        writer.begin(episode.info)
        for step in list(episode.steps())[:length]:
            writer.append(step)
        writer.cut()
    writer.flush()
    log.acknowledge(0)
    log.reroute(writer="w", shard="there:1")
    with Store.open(tmp_path / "store") as store:
        store.begin_writer("w", "i")
        for seq in range(1, 1 + len(log)):
            store.commit(decode_chunk(log.read(seq), writer="w", incarnation="i", spec=SPEC))
    spool.close()
    with Reader(tmp_path / "store") as reader:
        assert [record.num_rows for record in reader.episodes()] == [3]


def test_rerouting_nothing_changes_the_name_alone(tmp_path: Path) -> None:
    spool = Spool(tmp_path / "spool")
    log = spool.begin("w", "ab" * 16, SPEC)
    log.reroute(writer="v", shard="there:1")
    assert (log.route.writer, log.route.shard, log.route.base) == ("v", "there:1", 0)
    spool.close()


@pytest.mark.parametrize("name", ["photos", "2024-holiday", "00000007", "00000001-abc"])
def test_a_directory_of_something_else_is_refused_and_left_alone(tmp_path: Path, name: str) -> None:
    (tmp_path / name).mkdir()
    (tmp_path / name / "sunset.jpg").write_bytes(b"dear")
    with pytest.raises(
        StoreFormatError,
        match=rf"{name}: is not part of a spool; choose a directory for the spool that holds nothing else",
    ):
        Spool(tmp_path).close()
    assert (tmp_path / name / "sunset.jpg").read_bytes() == b"dear"
    with pytest.raises(StoreFormatError):  # the first refusal has not kept the lock
        Spool(tmp_path).close()


def test_a_damaged_chunk_is_set_aside(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    log = new_spool(tmp_path / "spool")
    kept = contents(log)
    assert log.directory is not None
    assert log.set_damaged_aside(4) == 0
    path = log.directory / "00000001.safetensors"
    data = bytearray(path.read_bytes())
    data[-30] ^= 1
    path.write_bytes(data)
    spool = Spool(tmp_path / "spool")
    (again,) = spool.logs
    assert (again.set_damaged_aside(1), again.set_damaged_aside(2), again.set_damaged_aside(4)) == (0, 1, 0)
    del kept[1]
    assert {seq: again.read(seq) for seq in (0, 2, 3)} == kept
    assert (again.num_rows, 1 in again, again.highest) == (7, False, 3)
    moved = tmp_path / "spool" / f"damaged-{log.directory.name}" / path.name
    assert moved.read_bytes() == data
    assert "chunk 1 is not as it was recorded (the checksum of a message is wrong" in caplog.text
    assert f"it is kept in {moved.parent}, and all others are delivered" in caplog.text
    spool.close()


def test_a_chunk_that_the_disk_cannot_read_is_set_aside(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    log = new_spool(tmp_path / "spool")
    assert log.directory is not None
    path = log.directory / "00000001.safetensors"
    path.unlink()
    path.symlink_to("/proc/self/mem")  # EIO when it is read, as from a bad sector
    spool = Spool(tmp_path / "spool")
    (again,) = spool.logs
    assert (len(again), 1 in again, spool.num_damaged) == (3, False, 1)
    assert "the disk cannot read it (Input/output error)" in caplog.text
    spool.close()


@pytest.mark.parametrize("content", [b"", b"{}", b"[]", b"\xff", b'{"writer": "w", "incarnation": "i", "spec": {}}'])
@pytest.mark.parametrize("name", ["hello.json", "hello.json.check", "route.json", "route.json.check"])
def test_a_damaged_description_is_read_from_its_copy(tmp_path: Path, name: str, content: bytes) -> None:
    before = new_spool(tmp_path / "spool")
    before.reroute(writer="v", shard="there:1")
    assert before.directory is not None
    (before.directory / name).write_bytes(content)
    spool = Spool(tmp_path / "spool")
    (log,) = spool.logs
    assert (log.spec, log.route, contents(log)) == (before.spec, before.route, contents(before))
    spool.close()


@pytest.mark.parametrize("name", ["hello.json", "route.json"])
def test_a_log_without_a_description_is_set_aside_whole(tmp_path: Path, name: str) -> None:
    """As in a spool of an older version, whose descriptions have no copies."""
    log = new_spool(tmp_path / "spool")
    log.reroute(writer="v", shard="there:1")
    assert log.directory is not None
    for copy in log.directory.glob("*.check"):
        copy.unlink()
    (log.directory / name).write_bytes(b"{")
    spool = Spool(tmp_path / "spool")
    assert (spool.logs, spool.num_damaged) == ([], 4)
    spool.close()
    assert len(list((tmp_path / "spool" / f"damaged-{log.directory.name}").glob("*.safetensors"))) == 4


@pytest.mark.parametrize("name", CANONICAL)
def test_all_canonical_episodes_pass_through(tmp_path: Path, name: str) -> None:
    spec, episode = CANONICAL[name]()
    spool = Spool(tmp_path / "spool")
    log = spool.begin("w", "ab" * 16, spec)
    writer = Writer(Into(log), "w", "i", spec, commit_steps=400)
    write_episode(writer, episode)
    with Store.open(tmp_path / "store") as store:
        store.begin_writer("w", "i")
        for seq in range(len(log)):
            store.commit(decode_chunk(log.read(seq), writer="w", incarnation="i", spec=spec))
    spool.close()
    with Reader(tmp_path / "store") as reader:
        assert reader.read(1).equals(episode)


# ---- held chunks


def held_log(place: Path, num_chunks: int) -> tuple[Spool, SpoolLog]:
    spool = Spool(place)
    log = spool.begin("w", "ab" * 16, SPEC)
    for seq in range(num_chunks):
        log.hold(seq, [b"chunk %d" % seq], 5)
    return spool, log


def files_of(log: SpoolLog) -> list[str]:
    assert log.directory is not None
    return sorted(path.name for path in log.directory.glob("*.safetensors"))


def test_a_held_chunk_is_read_like_others_and_recorded_when_it_is_time(tmp_path: Path) -> None:
    spool, log = held_log(tmp_path / "spool", 3)
    assert (log.num_held, log.held_rows, log.num_rows, len(log), log.highest) == (3, 15, 15, 3, 2)
    assert (log.read(1), 1 in log, files_of(log)) == (b"chunk 1", True, [])
    log.record(0)
    assert (files_of(log), log.num_held, log.held_rows, log.num_rows) == (["00000000.safetensors"], 2, 10, 15)
    assert log.held is not None
    assert log.held[0] == 1
    assert log.read(0) == b"chunk 0"
    assert log.acknowledge(1) == 10
    assert (files_of(log), log.num_held, log.num_bytes) == ([], 1, len(b"chunk 2"))
    spool.close()


def test_a_chunk_that_is_acknowledged_while_it_is_recorded_leaves_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spool, log = held_log(tmp_path / "spool", 2)
    create = files.create_durably

    def acknowledged_meanwhile(*arguments: Any) -> None:
        log.acknowledge(0)
        create(*arguments)

    monkeypatch.setattr(spool_module, "create_durably", acknowledged_meanwhile)
    log.record(0)
    assert (files_of(log), log.first, log.num_held) == ([], 1, 1)
    log.acknowledge(1)
    log.record(1)  # it was, before its turn came
    assert (files_of(log), log.held, log.num_bytes, log.num_rows) == ([], None, 0, 0)
    spool.close()
