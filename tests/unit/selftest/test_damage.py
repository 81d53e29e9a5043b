"""Damage: what the crash test does to a copy of a store, and that its check can fail."""

from __future__ import annotations

import random
import shutil
from collections.abc import Collection
from functools import partial
from pathlib import Path

import pytest

from understudy.core import EpisodeInfo
from understudy.replay import Store, compact
from understudy.replay.format.paths import segment_files
from understudy.selftest import damage
from understudy.selftest.contents import Contents
from understudy.selftest.crash_test import _rows_match
from understudy.selftest.damage import DamageReport

CONTENTS = Contents()


@pytest.fixture
def stores(tmp_path: Path) -> tuple[Path, Path]:
    """A store of three episodes in several segments, and a copy of it."""
    with Store.open(tmp_path / "store", segment_bytes=20_000) as store:
        writer = store.writer("w", CONTENTS.spec)
        for seed in (11, 12, 13):
            writer.begin(EpisodeInfo(seed=seed))
            for index in range(5):
                writer.append(CONTENTS.step(seed, index, last=index == 4))
            writer.end(CONTENTS.observation(seed, 5))
    return tmp_path / "store", Path(shutil.copytree(tmp_path / "store", tmp_path / "copy"))


ACKNOWLEDGED = {11: 6, 12: 6, 13: 6}


def check(
    stores: tuple[Path, Path],
    damaged: str = "catalog.sqlite",
    acknowledged: dict[int, int] = ACKNOWLEDGED,
    written: Collection[int] = ACKNOWLEDGED,
) -> DamageReport:
    report = DamageReport()
    expected = damage._expected(stores[0], acknowledged)
    damage._check(stores[1], expected, written, Path(damaged), report, partial(_rows_match, CONTENTS))
    return report


def test_what_is_sound_passes(stores: tuple[Path, Path]) -> None:
    report = check(stores)
    assert (report.lost, report.different, report.hit) == (0, 0, 0)


def test_an_episode_that_is_gone_is_lost(stores: tuple[Path, Path]) -> None:
    with Store.open(stores[1]) as store:
        store.delete([2])
        compact(store, min_dead=0.0)
    assert check(stores).lost == 6
    assert check(stores, acknowledged={**ACKNOWLEDGED, 12: 4}).lost == 4  # the others may be lost with the log's end


def test_an_episode_that_was_hit_is_counted_apart(stores: tuple[Path, Path]) -> None:
    last = segment_files(stores[0])[-1].relative_to(stores[0])
    with Store.open(stores[1]) as store:
        store.delete([3])
        compact(store, min_dead=0.0)
    report = check(stores, str(last))
    assert report.lost == 0
    assert report.hit - report.hit_found == 6


def test_rows_of_another_episode_are_different(stores: tuple[Path, Path]) -> None:
    with Store.open(stores[1]) as store:
        writer = store.writer("w", CONTENTS.spec)
        writer.begin(EpisodeInfo(seed=14))
        writer.append(CONTENTS.step(99, 0, last=True))
        writer.end(CONTENTS.observation(99, 1))
    assert check(stores).different == 2


@pytest.mark.parametrize(
    ("labels", "seed", "wanted"),
    [
        ({"salvaged_from": "7"}, 21, 0),  # the end of an episode that was deleted once
        ({"salvaged_from": "7"}, 99, 2),  # nobody ever wrote it
        ({}, 21, 2),
    ],
)
def test_rows_without_information_are_of_an_episode_that_was_cut_off(
    stores: tuple[Path, Path], labels: dict[str, str], seed: int, wanted: int
) -> None:
    with Store.open(stores[1]) as store:
        writer = store.writer("w", CONTENTS.spec)
        writer.begin(EpisodeInfo(labels=labels))
        writer.append(CONTENTS.step(seed, 6, last=True))
        writer.end(CONTENTS.observation(seed, 7))
    assert check(stores, written={21}).different == wanted


def test_deleted_episodes_were_written_too(stores: tuple[Path, Path]) -> None:
    """Whether or not they were acknowledged, and although compaction has removed their rows."""
    before = damage._seeds(stores[0])
    with Store.open(stores[0]) as store:
        store.delete([1])
        compact(store, min_dead=0.0)
    assert damage._seeds(stores[0]) == before
    assert len(before) >= 3


def test_a_seed_does_the_same_damage_again_and_all_kinds_of_files_are_damaged(
    stores: tuple[Path, Path], tmp_path: Path
) -> None:
    found = set()
    for seed in range(30):
        again = []
        for name in ("a", "b"):
            copy = Path(shutil.copytree(stores[0], tmp_path / f"{name}{seed}"))
            file, what = damage._damage(copy, random.Random(seed))
            again.append((file, what, (copy / file).read_bytes()))
            assert (copy / file).read_bytes() != (stores[0] / file).read_bytes()
        assert again[0] == again[1]
        found.add((damage._kind(file), what))
    assert {"catalog.sqlite", "catalog.seal", "a segment"} <= {kind for kind, _ in found}
    assert {what for _, what in found} == {"cut short", "bits flipped"}
