"""Damage: flips bits in a killed store, or cuts a file short, does what an operator would, and checks what is left.

The damage is done to a copy of the store, so that each kill is followed by exactly one. The operator opens the store or
verifies it first, repairs it if that is refused or finds something, and goes on writing. Two things must hold then:
each row that a reader returns is what was written, and the acknowledged rows of each episode with no row in a damaged
segment are there. A last commit that was not acknowledged may be lost: a damaged log is like one that ends before it.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from understudy.core import UnderstudyError
from understudy.replay.format.paths import LOCK_FILE, SEGMENTS_DIRECTORY, segment_path
from understudy.replay.maintain.repair import repair
from understudy.replay.maintain.verify import verify
from understudy.replay.read.reader import Reader
from understudy.replay.write.store import Store

MAX_FLIPS = 8
MAX_EPISODE_ROWS = 41  # of those that the crash test writes
# Whether the rows in these columns are those of an episode with this seed, from some index on.
RowsMatch = Callable[[Mapping[str, Any], int, int], bool]  # columns, seed, first index


@dataclass(kw_only=True)
class DamageReport:
    """What was damaged, and what was left of it, in rows."""

    damaged: Counter[str] = field(default_factory=Counter)  # by file and by what was done to it
    num_repaired: int = 0
    num_refused: int = 0  # plain opens
    hit: int = 0  # rows of episodes that have rows in a damaged segment
    hit_found: int = 0
    lost: int = 0  # rows of other episodes
    different: int = 0
    problems: list[str] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class _Expected:
    """An episode of the undamaged store."""

    num_rows: int  # that were acknowledged
    files: frozenset[Path]  # its segments, relative to the store


def damage_copy(
    killed: Path,
    reopened: Path,
    acknowledged: Mapping[int, int],
    rng: random.Random,
    report: DamageReport,
    rows_match: RowsMatch,
    write_more: Callable[[Store], None],
) -> None:
    """Damage `killed`, a copy of a store as a kill left it; `reopened` is the same store, sound and closed.

    `acknowledged` is how many rows of each episode were, by its seed.
    """
    expected = _expected(reopened, acknowledged)
    written = _seeds(reopened)
    file, what = _damage(killed, rng)
    report.damaged[f"{_kind(file)}: {what}"] += 1
    where = f"damage {report.damaged.total()}, {file}: {what}"
    try:
        _operate(killed, rng, report, write_more)
        _check(killed, expected, written, file, report, rows_match)
    except UnderstudyError as error:
        report.problems.append(f"{where}: {error}")
    report.problems += [f"{where}: {problem}" for problem in verify(killed).problems[:3]]


def _expected(store: Path, acknowledged: Mapping[int, int]) -> dict[int, _Expected]:
    """The episodes that are not deleted, by seed."""
    found = {}
    with Reader(store) as reader:
        for record in reader.episodes("deleted is null"):
            spans = reader.catalog.spans("episode = ?", (record.id,))
            files = frozenset(segment_path(store, int(span["segment"])).relative_to(store) for span in spans)
            assert record.info.seed is not None
            num_rows = min(record.num_rows, acknowledged.get(record.info.seed, 0))
            found[record.info.seed] = _Expected(num_rows=num_rows, files=files)
    return found


def _seeds(store: Path) -> set[int]:
    """Of all episodes that a store has had, deleted and unacknowledged ones too."""
    with Reader(store) as reader:
        return {record.info.seed for record in reader.episodes("1") if record.info.seed is not None}


def _damage(store: Path, rng: random.Random) -> tuple[Path, str]:
    """Damage one file, each kind of file as often as another; returns the file, relative to the store."""
    files: dict[str, list[Path]] = {}
    for path in sorted(store.rglob("*")):
        if path.is_file() and path.name != LOCK_FILE and path.stat().st_size:
            files.setdefault(_kind(path.relative_to(store)), []).append(path)
    path = rng.choice(files[rng.choice(sorted(files))])
    size = path.stat().st_size
    if rng.random() < 0.3:
        with path.open("r+b") as file:
            file.truncate(rng.choice([0, rng.randrange(size), size - 1]))
        return path.relative_to(store), "cut short"
    with path.open("r+b") as file:
        for _ in range(rng.randint(1, MAX_FLIPS)):
            at = rng.randrange(min(size, 4096) if rng.random() < 0.3 else size)  # headers are small, and matter
            file.seek(at)
            (byte,) = file.read(1)
            file.seek(at)
            file.write(bytes([byte ^ 1 << rng.randrange(8)]))
    return path.relative_to(store), "bits flipped"


def _kind(file: Path) -> str:
    return "a segment" if file.parts[0] == SEGMENTS_DIRECTORY else file.parts[0]


def _operate(store: Path, rng: random.Random, report: DamageReport, write_more: Callable[[Store], None]) -> None:
    """What an operator does with a store that misbehaves, or only may."""
    sound = False
    if rng.random() < 0.5:
        try:
            with Store.open(store, create=False):
                sound = True
        except UnderstudyError:
            report.num_refused += 1
    if not sound or not verify(store).ok:
        report.num_repaired += not repair(store).before.ok
    with Store.open(store, create=False) as opened:
        write_more(opened)


def _check(
    store: Path,
    expected: Mapping[int, _Expected],
    written: Collection[int],
    damaged: Path,
    report: DamageReport,
    rows_match: RowsMatch,
) -> None:
    found: Counter[int] = Counter()
    with Reader(store) as reader:
        for record in reader.episodes("not purged"):
            _, columns = reader.rows(record.id)
            seed = record.info.seed
            untouched = seed is not None and seed in expected and damaged not in expected[seed].files
            first_indices = (0,) if untouched else range(MAX_EPISODE_ROWS)  # what repair cut off begins later
            # The end of a deleted episode whose beginning compaction has removed already, with all that said of whom it
            # was, comes back when the catalog with the deletion is lost.
            others = written if "salvaged_from" in record.info.labels else ()
            seeds = others if seed is None else (seed,)
            matching = (one for one in seeds for first in first_indices if rows_match(columns, one, first))
            if (match := next(matching, None)) is None:
                report.different += record.num_rows
            else:
                found[match] += record.num_rows
    for seed, episode in expected.items():
        if damaged in episode.files:
            report.hit += episode.num_rows
            report.hit_found += min(found[seed], episode.num_rows)
        else:
            report.lost += max(episode.num_rows - found[seed], 0)
