"""Damage: every flipped bit and every cut-off byte is found by verify, none is served, and repair keeps the rest."""

import os
import random
import shutil
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from tests.writing import write_episode

from understudy.core import DamageError, Episode, StepSpec, StoreError
from understudy.core.examples import random_episode, robot_spec, small_spec, text_spec
from understudy.replay import Reader, Store, repair, verify
from understudy.replay.format.paths import CATALOG_FILE, SEAL_FILE, segment_files

NUM_REPAIRS, REPAIRS_EVERY_RUN = 60, 18


def write(store: Store, name: str, spec: StepSpec, episodes: list[Episode]) -> None:
    writer = store.writer(name, spec, commit_steps=4)
    for episode in episodes:
        write_episode(writer, episode)


def make_store(path: Path) -> dict[int, Episode]:
    """A store with three specs in small segments; returns what it holds, by episode id."""
    content = {
        "robot": (robot_spec(20), [random_episode(robot_spec(20), 5 + n, n) for n in range(6)]),
        "text": (text_spec(), [random_episode(text_spec(), 3 + n, 10 + n) for n in range(6)]),
        "small": (small_spec(), [random_episode(small_spec(), 7, 20 + n, terminated=n % 2 == 0) for n in range(6)]),
    }
    with Store.open(path, segment_bytes=60_000) as store:
        for name, (spec, episodes) in content.items():
            write(store, name, spec, episodes)
    truth = [episode for _, episodes in content.values() for episode in episodes]
    return {number + 1: episode for number, episode in enumerate(truth)}


@pytest.fixture(scope="module")
def intact(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[int, Episode]]:
    path = tmp_path_factory.mktemp("damage") / "store"
    truth = make_store(path)
    assert verify(path).ok
    return path, truth


def data_files(path: Path) -> list[Path]:
    """All files but the lock, whose content is only for people."""
    return [path / CATALOG_FILE, path / SEAL_FILE, *segment_files(path)]


def flip(file: Path, bit: int) -> None:
    with file.open("r+b") as stream:
        stream.seek(bit // 8)
        byte = stream.read(1)[0]
        stream.seek(bit // 8)
        stream.write(bytes([byte ^ (1 << bit % 8)]))


def random_flip(rng: random.Random, path: Path) -> tuple[Path, int]:
    file = rng.choice(data_files(path))
    return file, rng.randrange(file.stat().st_size * 8)


def served(path: Path, truth: dict[int, Episode]) -> int:
    """Read everything as a learner would: each episode is right or refused. Returns how many were refused."""
    refused = 0
    try:
        reader = Reader(path)
    except StoreError:
        return len(truth)
    with reader:
        for episode_id, wanted in truth.items():
            try:
                assert reader.read(episode_id).equals(wanted)
            except DamageError:
                refused += 1
    return refused


@pytest.mark.parametrize("num_flips", [200, pytest.param(1000, marks=pytest.mark.nightly)])
def test_every_flipped_bit_is_found_and_none_is_served(num_flips: int, intact: tuple[Path, dict[int, Episode]]) -> None:
    path, truth = intact
    rng = random.Random(1)
    refused = 0
    for _ in range(num_flips):
        file, bit = random_flip(rng, path)
        flip(file, bit)
        report = verify(path)
        assert not report.ok, f"bit {bit} of {file}"
        assert str(path) in report.problems[0]
        refused += served(path, truth) > 0
        flip(file, bit)
    assert refused > num_flips / 10  # many flips hit data that is read
    assert verify(path).ok


@pytest.mark.parametrize("stride", [9, pytest.param(1, marks=pytest.mark.nightly)])
def test_every_truncation_of_the_last_4_kb_is_found(stride: int, tmp_path: Path) -> None:
    path = tmp_path / "store"
    episode = random_episode(small_spec(), 5, 1)
    with Store.open(path, segment_bytes=10_000) as store:
        write(store, "small", small_spec(), [episode])
    truth = {1: episode}
    for file in (segment_files(path)[-1], path / CATALOG_FILE):
        whole = file.read_bytes()
        for cut in (*range(1, 17), *range(17, 4080, stride), *range(4080, 4097)):
            os.truncate(file, len(whole) - cut)
            report = verify(path)
            assert not report.ok, f"{file} without its last {cut} bytes"
            if cut % 256 == 1 or stride > 1:
                served(path, truth)
        file.write_bytes(whole)
    assert verify(path).ok


def rows_of(episode: Episode) -> list[bytes]:
    """Each row's content as bytes: the observation, and the action where there is one."""
    columns = episode.columns()
    rows = []
    for index in range(len(episode) + 1):
        parts = [
            f"{path}={np.asarray(column[index]).tobytes()!r}"
            for path, column in sorted(columns.items())
            if index < len(column)
        ]
        rows.append("".join(parts).encode())
    return rows


def kept_rows(path: Path) -> list[bytes]:
    """Every row in the store, cut episodes included, in the form of `rows_of`."""
    rows = []
    with Reader(path) as reader:
        for record in list(reader.episodes()):
            _, columns = reader.rows(record.id)
            for index in range(record.num_rows):
                last = not columns["is_step"][index]
                parts = [
                    f"{name}={np.asarray(column[index]).tobytes()!r}"
                    for name, column in sorted(columns.items())
                    if name != "is_step" and (not last or name.startswith("observation"))
                ]
                rows.append("".join(parts).encode())
    return rows


@pytest.mark.parametrize(
    "number",
    [
        *range(REPAIRS_EVERY_RUN),
        *(pytest.param(n, marks=pytest.mark.nightly) for n in range(REPAIRS_EVERY_RUN, NUM_REPAIRS)),
    ],
)
def test_repair_keeps_all_that_is_whole(number: int, intact: tuple[Path, dict[int, Episode]], tmp_path: Path) -> None:
    source, truth = intact
    path = tmp_path / "store"
    shutil.copytree(source, path)
    rng = random.Random(number)
    num_flips = 1 if number % 3 else 5
    for _ in range(num_flips):
        flip(*random_flip(rng, path))
    report = repair(path)
    assert report.before.problems
    assert report.after.ok, report.after.problems
    assert report.rows_dropped <= num_flips
    wanted = Counter(row for episode in truth.values() for row in rows_of(episode))
    kept = Counter(kept_rows(path))
    assert not kept - wanted  # nothing twice, nothing that was not written
    assert (wanted - kept).total() <= 2 * num_flips  # the row, and a last observation left alone behind it
    assert repair(path).before.ok  # once is enough
    with Store.open(path) as store:  # and it can be written to
        write(store, "after", small_spec(), [random_episode(small_spec(), 3, 99)])
    assert verify(path).ok


def test_repair_makes_a_lost_catalog_again(intact: tuple[Path, dict[int, Episode]], tmp_path: Path) -> None:
    source, truth = intact
    path = tmp_path / "store"
    shutil.copytree(source, path)
    (path / CATALOG_FILE).unlink()
    with pytest.raises(StoreError, match="understudy repair"):
        Store.open(path)
    report = repair(path)
    assert report.after.ok, report.after.problems
    assert report.rows_dropped == 0
    with Reader(path) as reader:
        for episode_id, wanted in truth.items():
            assert reader.read(episode_id).equals(wanted)


def test_a_lost_segment_costs_its_rows_and_no_others(intact: tuple[Path, dict[int, Episode]], tmp_path: Path) -> None:
    source, truth = intact
    path = tmp_path / "store"
    shutil.copytree(source, path)
    lost = segment_files(path)[1]
    lost.unlink()
    assert str(lost) in verify(path).problems[0]
    report = repair(path)
    assert report.after.ok, report.after.problems
    assert any("the file is gone" in action for action in report.actions)
    wanted = Counter(row for episode in truth.values() for row in rows_of(episode))
    kept = Counter(kept_rows(path))
    assert not kept - wanted
    assert (wanted - kept).total() >= report.rows_dropped > 0


def test_a_sound_store_is_left_alone(intact: tuple[Path, dict[int, Episode]]) -> None:
    path, _ = intact
    before = {file: file.read_bytes() for file in data_files(path)}
    report = repair(path)
    assert report.before.ok
    assert not report.actions
    assert {file: file.read_bytes() for file in data_files(path)} == before
