"""Stitcher: transitions that follow each other are one episode, and others begin a new one."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from understudy.compat.stitch_episodes import Stitcher
from understudy.core import ArraySpec, EpisodeInfo, Spec, SpecError, Step, StepSpec
from understudy.replay import Reader, Store

SPEC = StepSpec(
    observation=Spec({"x": ArraySpec(shape=(), dtype="float32")}), action=Spec(ArraySpec(shape=(1,), dtype="float32"))
)


def at(x: float) -> dict[str, np.float32]:
    return {"x": np.float32(x)}


def lengths(path: Path, pairs: Sequence[tuple[float, float]], max_steps: int | None = None) -> list[tuple[str, int]]:
    """The episodes that the transitions from the first to the second of each pair become."""
    with Store.open(path) as store:
        stitcher = Stitcher(store.writer("w", SPEC), max_steps=max_steps)
        for now, then in pairs:
            step = Step(observation=at(now), action=np.zeros(1, np.float32), reward=0.0)
            stitcher.add(step, at(then), EpisodeInfo())
        assert stitcher.open == bool(pairs and (max_steps is None or len(pairs) % max_steps))
        stitcher.cut()
        stitcher.flush()
        assert not stitcher.open
    with Reader(path) as reader:
        return [(record.state, len(reader.read(record.id))) for record in reader.episodes("1")]


def test_neighbours_are_joined_and_a_gap_begins_another_episode(tmp_path: Path) -> None:
    assert lengths(tmp_path / "s", [(0, 1), (1, 2), (5, 6)]) == [("cut", 2), ("cut", 1)]


def test_a_long_episode_is_stored_in_pieces(tmp_path: Path) -> None:
    assert lengths(tmp_path / "s", [(n, n + 1) for n in range(6)], max_steps=3) == [("cut", 3), ("cut", 3)]


def test_a_step_that_does_not_fit_leaves_no_open_episode(tmp_path: Path) -> None:
    with Store.open(tmp_path / "s") as store:
        stitcher = Stitcher(store.writer("w", SPEC))
        step = Step(observation=at(0), action=np.zeros(2, np.float32), reward=0.0)
        with pytest.raises(SpecError, match="action: expected"):
            stitcher.add(step, at(1), EpisodeInfo())
        assert not stitcher.open
