"""Damage: every flipped bit and every cut-off byte is found by verify, none is served, and repair keeps the rest."""

import os
import random
import shutil
import sqlite3
import subprocess
import sys
from collections import Counter
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from tests.writing import write_episode

from understudy.core import DamageError, Episode, StepSpec, StoreError
from understudy.core.examples import random_episode, robot_spec, small_spec, text_spec
from understudy.replay import EpisodeRecord, Reader, Store, repair, verify
from understudy.replay.format.paths import CATALOG_FILE, LOCK_FILE, MARK_FILE, SEAL_FILE, segment_files
from understudy.replay.format.segment import Segment, read_layout

NUM_REPAIRS, REPAIRS_EVERY_RUN = 60, 18


def write(store: Store, name: str, spec: StepSpec, episodes: list[Episode]) -> None:
    writer = store.writer(name, spec, commit_steps=4, background=False)
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


@pytest.mark.parametrize("num_flips", [60, pytest.param(1000, marks=pytest.mark.nightly)])
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


@pytest.mark.parametrize("stride", [31, pytest.param(1, marks=pytest.mark.nightly)])
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


# ---- every file of a store, closed or killed

WRITER = """
import os, sys
from pathlib import Path
from tests.faults.test_damage import write_for_damage
store = write_for_damage(Path(sys.argv[1]))
if sys.argv[2] == "idle":
    store.catalog.checkpoint()
os.kill(os.getpid(), 9)
"""

FILES = {
    "closed": ("catalog", "seal", "mark", "lock", "segments"),
    "killed": ("catalog", "log", "shm", "mark", "lock", "segments"),
    "idle": ("catalog", "values", "segments"),  # killed when its log was empty, so that all is in the main file
}
NAMES = {
    "catalog": CATALOG_FILE,
    "log": f"{CATALOG_FILE}-wal",
    "shm": f"{CATALOG_FILE}-shm",
    "seal": SEAL_FILE,
    "mark": MARK_FILE,
    "lock": LOCK_FILE,
    "values": CATALOG_FILE,
}
NUMBERS = [
    *(("segments", name) for name in ("spec", "capacity", "heap_bytes", "num_rows", "heap_used", "sealed")),
    *(
        ("spans", name)
        for name in ("commit_id", "episode", "first_index", "segment", "first_row", "num_rows", "row_check")
    ),
    *(("episodes", name) for name in ("writer", "number", "spec", "num_rows", "changed", "purged", "row_check")),
    *(("writers", "last_seq"), ("sqlite_sequence", "seq"), ("commits", "id")),
]
RowKey = tuple[int, int]  # episode, index


def write_for_damage(path: Path) -> Store:
    """A store that is still open: episodes of three specs, in several segments, with edits, half of it in the log."""
    store = Store.open(path, segment_bytes=20_000)
    for number, spec in enumerate((robot_spec(20), text_spec(), small_spec())):
        write(store, f"w{number}", spec, [random_episode(spec, 5 + n, 10 * number + n) for n in range(2)])
        store.label([2 * number + 1], {"seen": "yes"})
        if number == 1:
            store.catalog.checkpoint()
    store.delete([2])
    store.set_success([3], success=True)
    writer = store.writer("open", small_spec(), commit_steps=3, background=False)
    writer.begin(task="open")
    for step in list(random_episode(small_spec(), 8, 99).steps())[:6]:
        writer.append(step)
    return store


@dataclass(frozen=True, kw_only=True)
class Written:
    """A store and what it holds."""

    path: Path
    rows: dict[RowKey, bytes]
    places: dict[RowKey, tuple[int, int]]  # segment and row
    last_rows: set[RowKey]  # those with an episode's last observation, and no step
    episodes: list[EpisodeRecord]


@pytest.fixture(scope="module")
def written(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Written:
    path = tmp_path_factory.mktemp(request.param) / request.param
    if request.param != "closed":
        here = Path(__file__).parents[2]
        environment = {**os.environ, "PYTHONPATH": f"{os.environ.get('PYTHONPATH', '')}:{here}"}
        done = subprocess.run([sys.executable, "-c", WRITER, path, request.param], env=environment, check=False)
        assert done.returncode == -9
    else:
        write_for_damage(path).close()
    copy = path.with_name("copy")
    shutil.copytree(path, copy)
    with Reader(copy) as reader:
        records = list(reader.episodes("1"))
        spans = reader.catalog.spans()
        rows = {key: row for record in records for key, row in rows_in(reader, record).items()}
        last_rows = {(record.id, record.num_rows - 1) for record in records if record.state == "ended"}
    places = {
        (int(span["episode"]), int(span["first_index"]) + n): (int(span["segment"]), int(span["first_row"]) + n)
        for span in spans
        for n in range(int(span["num_rows"]))
    }
    return Written(path=path, rows=rows, places=places, last_rows=last_rows, episodes=records)


def rows_in(reader: Reader, record: EpisodeRecord) -> dict[RowKey, bytes]:
    _, columns = reader.rows(record.id)
    return {
        (record.id, index): b"".join(
            name.encode() + np.asarray(column[index]).tobytes() for name, column in sorted(columns.items())
        )
        for index in range(record.num_rows)
    }


def damage(file: Path, rng: random.Random) -> str:
    """Flip a bit, cut the file short, or remove it; most of all flip."""
    size = file.stat().st_size
    how = rng.choice(("flip", "flip", "flip", "cut", "remove"))
    if how == "remove" or size == 0:
        file.unlink()
        return f"{file.name} removed"
    if how == "cut":
        length = rng.randrange(size)
        os.truncate(file, length)
        return f"{file.name} cut to {length} of {size} bytes"
    bit = rng.randrange(size * 8)
    if file.suffix == ".safetensors" and rng.random() < 0.8:  # most of the file is empty
        bit = rng.choice([n for n, byte in enumerate(file.read_bytes()) if byte]) * 8 + rng.randrange(8)
    flip(file, bit)
    return f"{file.name}: bit {bit} flipped"


def damage_value(file: Path, rng: random.Random) -> str:
    """Flip a bit of a number in a table: nothing is wrong with the file, as SQLite sees it."""
    with closing(sqlite3.connect(file)) as db:
        table, column = rng.choice(NUMBERS)
        row, value = rng.choice(
            db.execute(f"select rowid, {column} from {table} where {column} is not null").fetchall()
        )
        new = value ^ (1 << rng.randrange(12))
        try:
            db.execute(f"update {table} set {column} = ? where rowid = ?", (new, row))
        except sqlite3.IntegrityError:
            return "nothing"
        db.execute("pragma journal_mode = wal")
        db.commit()
    return f"{table}.{column} of row {row}: {value} became {new}"


def whole_rows(path: Path, written: Written) -> set[RowKey]:
    """The rows whose bytes are all there, found with the layouts that the segments had before."""
    whole = set()
    for file in segment_files(written.path):
        damaged = path / "segments" / file.name
        keys = [key for key, place in written.places.items() if place[0] == int(file.stem)]
        if not damaged.exists() or not keys:
            continue
        layout = read_layout(file)
        content = damaged.read_bytes().ljust(layout.file_bytes, b"\0")
        copy = path.with_name("whole")
        copy.write_bytes(layout.header + content[len(layout.header) : layout.file_bytes])
        with closing(Segment.open(layout, copy)) as segment:
            for key in keys:
                if segment.read_checked(written.places[key][1], 1)[1].all():
                    whole.add(key)
    return whole


def kept_after_repair(written: Written, whole: set[RowKey]) -> set[RowKey]:
    """Whole rows, but for a last observation without the step before it."""
    return {key for key in whole if key not in written.last_rows or (key[0], key[1] - 1) in whole}


def content(path: Path) -> tuple[Counter[bytes], bool]:
    """All rows that a reader returns, deleted episodes included, and whether it returned every one it lists."""
    rows: Counter[bytes] = Counter()
    complete = True
    with Reader(path) as reader:
        for record in reader.episodes("not purged"):
            try:
                rows.update(rows_in(reader, record).values())
            except DamageError:
                complete = False
    return rows, complete


def files_of(path: Path) -> dict[Path, bytes]:
    """All files but those that every opening writes: the lock's text, -shm, and a log that is empty."""
    found = {file: file.read_bytes() for file in path.rglob("*") if file.is_file()}
    return {
        file: data
        for file, data in found.items()
        if file.name not in (LOCK_FILE, NAMES["shm"]) and (data or file.name != NAMES["log"])
    }


def check_damage(written: Written, kind: str, number: int, path: Path) -> str:
    """Damage one file of a copy, then open, verify and repair it; what came of opening."""
    shutil.rmtree(path, ignore_errors=True)
    shutil.copytree(written.path, path)
    rng = random.Random(f"{kind} {number}")
    file = rng.choice(segment_files(path)) if kind == "segments" else path / NAMES[kind]
    what = damage_value(file, rng) if kind == "values" else damage(file, rng)
    context = f"{written.path.name} store, {kind} {number}: {what}"
    before = files_of(path)
    whole = whole_rows(path, written)
    wanted = Counter(written.rows.values())
    assert len(whole) == len(written.rows) or kind == "segments", context
    with suppress(StoreError):
        served, _ = content(path)
        assert not served - wanted, f"{context}: rows were served that were never written"
    refusal = ""
    try:
        Store.open(path, create=False).close()
    except StoreError as error:
        refusal = str(error)
    outcome = "refused" if refusal else "opened"
    assert not refusal or "run `understudy" in refusal, f"{context}: {refusal}"
    assert not refusal or files_of(path) == before, f"{context}: a refused opening changed files ({refusal})"
    assert whole_rows(path, written) >= whole, f"{context}: {outcome}, and whole rows are gone"
    report = verify(path)
    if report.ok:
        outcome += ", sound"
        assert content(path) == (wanted, True), f"{context}: {outcome}, and rows are missing"
        with Reader(path) as reader:
            assert list(reader.episodes("1")) == written.episodes, f"{context}: {outcome}, and episodes changed"
    repaired = repair(path)
    assert repaired.after.ok, f"{context}: {repaired.after.problems}"
    kept, complete = content(path)
    assert complete, context
    assert not kept - wanted, f"{context}: repair made rows that were never written, or two of one"
    missing = Counter(written.rows[key] for key in kept_after_repair(written, whole)) - kept
    assert not missing, f"{context}: repair dropped {missing.total()} whole rows; {repaired.actions}"
    with Store.open(path) as store:
        write(store, "after", small_spec(), [random_episode(small_spec(), 3, 1000)])
    assert verify(path).ok, context
    return outcome


@pytest.mark.parametrize("num", [1, pytest.param(150, marks=pytest.mark.nightly)])
@pytest.mark.parametrize(
    ("written", "kind"), [(state, kind) for state, kinds in FILES.items() for kind in kinds], indirect=["written"]
)
def test_damage_to_any_file_then_open_verify_repair(written: Written, kind: str, num: int, tmp_path: Path) -> None:
    outcomes = Counter(check_damage(written, kind, number, tmp_path / "store") for number in range(num))
    if kind in ("shm", "mark", "lock"):  # nothing that was committed depends on them
        assert outcomes == {"opened, sound": num}
    if kind == "catalog" and written.path.name == "closed":
        assert outcomes == {"refused": num}
