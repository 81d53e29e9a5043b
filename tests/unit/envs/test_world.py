"""The contract of World: resets, steps, limits and what is said about mistakes."""

import warnings
from typing import Any

import numpy as np
import pytest

from understudy.core import ArraySpec, Spec, SpecError, StepSpec, Tree
from understudy.core import tree as trees
from understudy.envs import SuiteError, ToyTable, as_gymnasium
from understudy.envs import world as world_module
from understudy.envs.suite import Suite, Task
from understudy.envs.world import World, WorldError


class Line(World):
    """A point on a line that wants to get to 3; it counts its looks."""

    def __init__(self) -> None:
        self.step_spec = StepSpec(
            observation=Spec({"at": ArraySpec(shape=(), dtype="float64"), "seen": ArraySpec(shape=(2,), dtype="bool")}),
            action=Spec({"move": ArraySpec(shape=(1,), dtype="float32", low=-1.0, high=1.0)}),
        )
        tasks = (
            Task(name="walk", instruction="walk to three", num_starts=10, max_steps=5),
            Task(name="rest", instruction="stay where you are", num_starts=1, max_steps=2),
        )
        self.suite = Suite(name="line", tasks=tasks)
        self.num_looks = 0
        self.closed = False

    def begin(self, task: Task, start: int, rng: np.random.Generator) -> None:
        self.at = start / 100 + rng.normal()

    def advance(self, action: Tree) -> tuple[float, bool, bool, dict[str, Any]]:
        self.at += float(action["move"][0])
        return float(self.at > 3), self.at > 3, self.at < -3, {"success": self.at > 3}

    def observe(self) -> Tree:
        self.num_looks += 1
        return {"at": np.asarray(self.at), "seen": np.array([True, False])}

    def close(self) -> None:
        self.closed = True


MOVE = {"move": np.ones(1, np.float32)}
STAY = {"move": np.zeros(1, np.float32)}


def test_a_seed_decides_start_and_state() -> None:
    one, two = Line(), Line()
    first, info = one.reset(seed=7)
    second, again = two.reset(seed=7)
    assert trees.equal(first, second)
    assert info == again
    assert info["task"] == "walk"
    assert info["instruction"] == "walk to three"
    assert info["split"] == "train"
    assert info["start"] in range(8)
    assert info["seed"] == 7


def test_the_info_begins_the_same_episode_again() -> None:
    world = Line()
    for _ in range(20):
        first, info = world.reset()
        second, again = world.reset(
            seed=info["seed"], options={"task": info["task"], "start": info["start"], "split": info["split"]}
        )
        assert trees.equal(first, second)
        assert info == again


def test_resets_without_a_seed_follow_from_the_last_seed() -> None:
    def seeds() -> list[int]:
        world = Line()
        world.reset(seed=3)
        return [world.reset()[1]["seed"] for _ in range(5)]

    assert seeds() == seeds()
    assert len(set(seeds())) == 5


def test_a_split_is_drawn_from() -> None:
    world = Line()
    drawn = {world.reset(seed=seed, options={"split": "eval"})[1]["start"] for seed in range(30)}
    assert drawn == {8, 9}
    assert world.reset(options={"start": 9})[1]["split"] == "eval"


def test_the_task_stays_until_another_is_asked_for() -> None:
    world = Line()
    assert world.task.name == "walk"
    world.reset(options={"task": "rest"})
    world.reset()
    assert world.task.name == "rest"


def test_the_time_limit_truncates() -> None:
    world = Line()
    world.reset(seed=0, options={"task": "rest"})
    assert world.step(STAY)[2:4] == (False, False)
    assert world.step(STAY)[2:4] == (False, True)


def test_terminated_in_the_last_step_is_not_truncated() -> None:
    world = Line()
    world.reset(seed=0, options={"task": "rest"})
    world.at = 1.5
    world.step(MOVE)
    _, reward, terminated, truncated, info = world.step(MOVE)
    assert (reward, terminated, truncated, info["success"]) == (1.0, True, False, True)


def test_a_world_may_truncate_by_itself() -> None:
    world = Line()
    world.reset(seed=0)
    world.at = -4.0
    assert world.step(STAY)[2:4] == (False, True)


def test_blind_steps_do_not_look() -> None:
    world = Line()
    world.reset(seed=0)
    for _ in range(3):
        world.step_without_observation(STAY)
    world.reset_without_observation(seed=0)
    assert world.num_looks == 1


def test_lists_are_taken_as_actions() -> None:
    world = Line()
    world.reset(seed=0)
    world.step({"move": [0.5]})


def test_wrong_actions_are_named() -> None:
    world = Line()
    world.reset(seed=0)
    with pytest.raises(SpecError, match=r"action/move: expected float32 \[1\], got float32 \[2\]"):
        world.step({"move": np.zeros(2, np.float32)})
    with pytest.raises(SpecError, match="action/move"):
        world.step({"move": np.full(1, 1.5, np.float32)})
    with pytest.raises(SpecError, match="action: expected a dict with move"):
        world.step(np.zeros(1, np.float32))


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_an_action_that_is_not_finite_is_not_executed(bad: float) -> None:
    world = Line()
    world.reset(seed=0)
    with pytest.raises(SpecError, match=r"action/move\[0\]: expected a value from -1 to 1, got (nan; fix|inf; clip)"):
        world.step({"move": np.full(1, bad, np.float32)})
    free = Spec({"move": ArraySpec(shape=(1,), dtype="float32")})
    world.step_spec = StepSpec(observation=world.step_spec.observation, action=free)
    before = world.at
    with pytest.raises(SpecError, match=f"action/move: expected finite numbers, got {bad}; .* fix the policy"):
        world.step({"move": np.full(1, bad, np.float32)})
    assert world.at == before


def test_steps_out_of_order() -> None:
    world = Line()
    with pytest.raises(WorldError, match="Line: step was called before reset; call reset first"):
        world.step(STAY)
    world.reset(seed=0, options={"task": "rest"})
    world.step(STAY)
    world.step(STAY)
    with pytest.raises(WorldError, match="the episode was truncated after 2 steps; call reset first"):
        world.step(STAY)


def test_a_reset_that_fails_leaves_no_episode(monkeypatch: pytest.MonkeyPatch) -> None:
    world = Line()
    world.reset()
    monkeypatch.setattr(world, "begin", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        world.reset()
    with pytest.raises(WorldError, match="before reset"):
        world.step(STAY)


def test_wrong_resets_are_explained() -> None:
    world = Line()
    with pytest.raises(WorldError, match=r"options: no option 'stat'; did you mean 'start'\?"):
        world.reset(options={"stat": 1})
    with pytest.raises(WorldError, match="start 9 of task 'walk' is in split 'eval', and 'train' was asked for"):
        world.reset(options={"start": 9, "split": "train"})
    with pytest.raises(WorldError, match="task 'rest' has no starts in split 'eval'; give it more starts"):
        world.reset(options={"task": "rest", "split": "eval"})
    with pytest.raises(SuiteError, match="start: task 'walk' has the starts 0 to 9, got int 10"):
        world.reset(options={"start": 10})
    with pytest.raises(WorldError, match=r"seed: expected a whole number or None, got float 0\.5"):
        world.reset(seed=0.5)  # type: ignore[arg-type]
    with pytest.raises(WorldError, match="seed: expected a number from 0"):
        world.reset(seed=-1)


def test_a_world_without_success_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    world = Line()
    world.reset()
    monkeypatch.setattr(world, "advance", lambda action: (0.0, False, False, {}))
    with pytest.raises(WorldError, match=r"info: expected 'success' after each step, .* return it from Line.advance"):
        world.step(STAY)


def test_with_closes() -> None:
    with Line() as world:
        assert not world.closed
    assert world.closed


@pytest.mark.parametrize("make", [Line, ToyTable, lambda: ToyTable(cameras=False)])
def test_gymnasium_agrees(make: Any) -> None:
    checker = pytest.importorskip("gymnasium.utils.env_checker")
    env = as_gymnasium(make())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it recommends bounds for everything
        checker.check_env(env, skip_render_check=True)
    observation, info = env.reset(seed=1, options={"split": "eval"})
    assert env.observation_space.contains(observation)
    assert info["split"] == "eval"
    env.close()


def test_gymnasium_has_no_ragged_spaces() -> None:
    pytest.importorskip("gymnasium")
    world = Line()
    world.step_spec = StepSpec(
        observation=Spec({"tokens": ArraySpec(shape=(None,), dtype="int32")}), action=world.step_spec.action
    )
    with pytest.raises(WorldError, match=r"observation/tokens: expected a fixed shape, got int32 \[\?\]"):
        as_gymnasium(world)


def test_without_gymnasium_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> None:
        raise ImportError(f"No module named {name!r}")

    monkeypatch.setattr(world_module.importlib, "import_module", absent)  # type: ignore[attr-defined]
    with pytest.raises(
        WorldError, match=r"gymnasium is not installed .*; run `pip install 'understudy-robotics\[gym\]'`"
    ):
        as_gymnasium(Line())
