"""Demonstrations of a scripted expert, from Python."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from understudy.core import Source
from understudy.core.cameras import CodecName
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
    assert exact.info.labels == {}  # no count of takeovers: the script always drives
    assert np.std(np.diff(noisy.action, axis=0)) > np.std(np.diff(exact.action, axis=0))


def test_large_cameras_are_encoded_and_a_store_goes_on_as_it_began(tmp_path: Path) -> None:
    def codecs_after(store: str, successes: int, codec: CodecName, size: int = 144) -> list[dict[str, str]]:
        with ToyTable(size=size) as world:
            world.choose("press_button")
            record_script(world, tmp_path / store, successes=successes, codec=codec)
        with Reader(tmp_path / store) as reader:
            specs = [reader.spec(number) for number in reader.catalog.spec_ids()]
        return [{path: chosen.name for path, chosen in spec.encoded.items()} for spec in specs]

    encoded = {"observation/front": "h264", "observation/wrist": "h264"}
    assert codecs_after("new", 1, "auto") == [encoded]
    assert codecs_after("small", 1, "auto", size=128) == [{}]
    assert codecs_after("asked", 1, "raw") == [{}]
    assert codecs_after("asked", 2, "auto") == [{}]  # as it began
    assert codecs_after("asked", 3, "jpeg") == [{}, dict.fromkeys(encoded, "jpeg")]


def test_a_world_without_an_expert_says_so(tmp_path: Path) -> None:
    pytest.importorskip("gymnasium")
    with open_world("gym:CartPole-v1") as world, pytest.raises(WorldError, match="has no scripted expert"):
        record_script(world, tmp_path / "store", successes=1)
