"""Demonstrations of a scripted expert, from Python."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from understudy.core import Source
from understudy.envs import ToyTable, WorldError
from understudy.envs.registry import open_world
from understudy.replay import Reader
from understudy.training import record_script


def test_a_script_records_what_is_missing(tmp_path: Path) -> None:
    with ToyTable(cameras=False) as world:
        world.choose("press_button")
        first = record_script(world, tmp_path / "store", successes=1, noise=0.0)
        both = record_script(world, tmp_path / "store", successes=2, noise=0.2)
        assert (first.num_successes, both.num_successes) == (1, 2)
        assert record_script(world, tmp_path / "store", successes=2).num_steps == 0
    with Reader(tmp_path / "store") as reader:
        exact, noisy = (reader.read(number) for number in (1, 2))
    assert (exact.info.kind, exact.info.success) == ("demonstration", True)
    assert set(exact.source) == {Source.SCRIPT}
    assert np.std(np.diff(noisy.action, axis=0)) > np.std(np.diff(exact.action, axis=0))


def test_a_world_without_an_expert_says_so(tmp_path: Path) -> None:
    pytest.importorskip("gymnasium")
    with open_world("gym:CartPole-v1") as world, pytest.raises(WorldError, match="has no scripted expert"):
        record_script(world, tmp_path / "store", successes=1)
