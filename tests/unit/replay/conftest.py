"""Stores with known contents."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.writing import write_episode

from understudy.core import EpisodeInfo
from understudy.core.examples import random_episode, random_steps, small_spec
from understudy.replay import Reader, Store

LENGTHS = (3, 10, 1, 25, 7, 14)  # steps of the episodes 1 to 6
KINDS = ("practice", "demonstration", "practice", "practice", "demonstration", "practice")


@pytest.fixture
def reader(tmp_path: Path) -> Iterator[Reader]:
    """Six episodes of LENGTHS steps, in 15 commits and several segments."""
    spec = small_spec()
    with Store.open(tmp_path / "store", segment_bytes=4000) as store:
        writer = store.writer("w", spec, commit_steps=6)
        for seed, (length, kind) in enumerate(zip(LENGTHS, KINDS, strict=True)):
            writer.begin(EpisodeInfo(kind=kind, seed=seed))
            steps, last = random_steps(spec, length, seed, human=False)
            for step in steps:
                writer.append(step)
            writer.end(last, success=True)
    with Reader(tmp_path / "store") as opened:
        yield opened


@pytest.fixture(scope="session")
def _template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    spec = small_spec()
    path = tmp_path_factory.mktemp("template") / "store"
    with Store.open(path, segment_bytes=20_000) as store:
        writer = store.writer("w", spec)
        for seed in range(4):
            write_episode(writer, random_episode(spec, 5, seed))
    return path


@pytest.fixture
def path(_template: Path, tmp_path: Path) -> Path:
    """A closed store of four episodes of five steps, with the seeds 0 to 3, in one segment."""
    return Path(shutil.copytree(_template, tmp_path / "store"))
