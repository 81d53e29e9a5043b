"""Rot: damage to the files of a store that nobody writes to, and what must still be true of it.

A bit flips, a sector is lost, a sector is written to the wrong place, or a file is cut short. Then every row that is
read is right or refused, a store that `verify` finds whole keeps every promise, and `repair` leaves one that is whole.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

from tests.simulation.model import Model

from understudy.core import UnderstudyError
from understudy.replay import Reader, repair, verify
from understudy.replay.format.paths import CATALOG_FILE, SEAL_FILE, segment_files

SECTOR = 512


def damage(path: Path, rng: random.Random) -> str:
    """Damage one file of a store; says how."""
    files = [path / CATALOG_FILE, *segment_files(path)] + [path / SEAL_FILE] * (path / SEAL_FILE).exists()
    file = rng.choice(files)
    content = bytearray(file.read_bytes())
    written = [start for start in range(0, len(content), SECTOR) if any(content[start : start + SECTOR])]
    start = rng.choice(written)
    kind = rng.choice(("flip", "flip", "lose", "misdirect", "cut"))
    if kind == "flip":
        content[start + rng.randrange(len(content[start : start + SECTOR]))] ^= 1 << rng.randrange(8)
    elif kind == "lose":
        content[start : start + SECTOR] = bytes(len(content[start : start + SECTOR]))
    elif kind == "misdirect":
        target = rng.choice(written)
        content[target : target + SECTOR] = content[start : start + SECTOR]
    else:
        del content[start:]
    file.write_bytes(content)
    return f"{file.name}: {kind} at {start}"


def problems_after_damage(path: Path, model: Model, rng: random.Random) -> Iterator[str]:
    if not segment_files(path):
        return
    how = damage(path, rng)
    for problem in _problems(path, model):
        yield f"after {how}: {problem}"


def _problems(path: Path, model: Model) -> Iterator[str]:
    yield from _wrong_rows(path, model)
    if verify(path).ok:
        with Reader(path) as reader:
            yield from model.problems(reader)
        return
    repair(path)
    left = verify(path).problems
    if left:
        yield f"repair left {left}"
    yield from _wrong_rows(path, model)


def _wrong_rows(path: Path, model: Model) -> Iterator[str]:
    """Rows that are served and are not what was written."""
    try:
        with Reader(path) as reader:
            for record in list(reader.episodes("not purged")):
                number = int(record.info.seed or 0)
                if number in model.episodes:
                    try:
                        yield from model._row_problems(reader, record, number, {})
                    except UnderstudyError:
                        continue
    except UnderstudyError:
        return
