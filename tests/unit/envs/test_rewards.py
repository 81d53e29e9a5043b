"""A reward or a success function of the user's own, around any world and in any process."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from understudy.envs import IsolatedWorld, RewardedWorld, ToyTable, WorldError, check_env
from understudy.envs.registry import find_world, open_world

FUNCTIONS = """
def reward(observation, action, next_observation):
    return float(next_observation["state"][2]) - float(observation["state"][2])

def low(observation):
    return observation["state"][2] < 0.1

def text(observation, action, next_observation):
    return "much"
"""
DOWN = np.float32([0, 0, -1, 0])


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "own_functions.py").write_text(FUNCTIONS)
    yield tmp_path
    sys.modules.pop("own_functions", None)


def steps(world: Any, num: int = 60) -> list[tuple[Any, ...]]:
    """Observation, reward, terminated, truncated, info of steps down to the table, up to the end of the episode."""
    world.reset(seed=1)
    found = []
    while len(found) < num and not (found and (found[-1][2] or found[-1][3])):
        found.append(world.step(DOWN))
    return found


def test_a_reward_is_of_both_observations(here: Path) -> None:
    name = "toy:press_button?cameras=false"
    with open_world(f"{name}&reward=own_functions:reward") as world, open_world(name) as plain:
        mine, before = steps(world, 5), steps(plain, 5)
        heights = [plain.reset(seed=1)[0]["state"][2], *(step[0]["state"][2] for step in before)]
        assert [step[1] for step in mine] == pytest.approx(np.diff(heights), abs=1e-6)
        assert [step[4]["success"] for step in mine] == [step[4]["success"] for step in before]  # the world's own
        assert all(np.array_equal(a[0]["state"], b[0]["state"]) for a, b in zip(mine, before, strict=True))
        assert world.has_expert
        assert world.task.name == "press_button"


def test_a_success_ends_the_episode_and_is_the_reward(here: Path) -> None:
    with open_world("toy:press_button?cameras=false&success=own_functions:low") as world:
        found = steps(world)
        assert [step[4]["success"] for step in found] == [False] * (len(found) - 1) + [True]
        assert [step[1] for step in found] == [0.0] * (len(found) - 1) + [1.0]
        assert found[-1][2] is True
        with pytest.raises(WorldError, match="the episode was terminated"):
            world.step(DOWN)
        world.reset(seed=2)  # and the next one begins


def test_it_keeps_the_contract_of_a_world() -> None:
    def make() -> RewardedWorld:
        return RewardedWorld(ToyTable(cameras=False), success=lambda seen: seen["state"][2] < 0.1)

    assert "11 checks passed" in str(check_env(make, episodes=1))


def test_workers_call_it_too(here: Path) -> None:
    source = find_world("toy:press_button?cameras=false&success=own_functions:low").source
    with IsolatedWorld(source) as world:
        assert steps(world)[-1][4]["success"] is True


@pytest.mark.parametrize(
    ("option", "says"),
    [
        ("reward=own_functions:no", "own_functions.py has no 'no'"),
        ("success=nowhere:near", "there is no module 'nowhere', neither nowhere.py in /"),
    ],
)
def test_what_is_not_there_is_said(here: Path, option: str, says: str) -> None:
    with pytest.raises(WorldError, match=says):
        open_world(f"toy?cameras=false&{option}")


def test_a_reward_is_a_number(here: Path) -> None:
    with open_world("toy?cameras=false&reward=own_functions:text") as world:
        world.reset(seed=1)
        with pytest.raises(WorldError, match="expected your function to return a finite number, got str 'much'"):
            world.step(DOWN)
