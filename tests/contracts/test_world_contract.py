"""The contract of World: one suite over the toy table, a Gymnasium environment, worlds in their own process, a robot.

Metaworld and LIBERO take part where they are installed. The robot is an arm behind a real server on loopback. Wrappers
that are not Worlds themselves (TakeoverWorld, as_gymnasium) keep the rules of reset, step and close.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.unit.robots.point_arm import PointArm
from tests.worlds import RealTimeWorld

from understudy.core import SpecError, Tree
from understudy.core import tree as trees
from understudy.core.examples import random_tree
from understudy.envs import SuiteError, ToyTable, World, WorldError, WorldFactory, as_gymnasium, check_env
from understudy.envs.registry import WORLD_REGISTRY, open_world
from understudy.envs.robot import RobotEnv
from understudy.envs.teleop import AlwaysScript, ScriptedHuman, Takeover, TakeoverWorld
from understudy.envs.workers import IsolatedWorld

TOY = WorldFactory(factory="understudy.envs.toy:ToyTable", options={"size": 16})
REAL_TIME = WorldFactory(factory="tests.worlds:RealTimeWorld", env={"PYTHONPATH": str(Path(__file__).parents[2])})
Make = Callable[[], World]


def open_cartpole() -> World:
    pytest.importorskip("gymnasium")
    return open_world("gym:CartPole-v1?num_starts=20&max_steps=12")


def installed(name: str, address: str) -> Make:
    def make() -> World:
        if not WORLD_REGISTRY[name].ready:
            pytest.skip(f"{name} is not installed; run `understudy env setup {name}`")
        return open_world(address)

    return make


WORLDS: dict[str, Make] = {
    "toy": lambda: ToyTable(size=16),
    "toy without cameras": lambda: ToyTable(cameras=False),
    "toy with the state of the task": lambda: ToyTable(cameras=False, state="task"),
    "gym": open_cartpole,
    "toy in its own process": lambda: IsolatedWorld(TOY),
    "metaworld": installed("metaworld", 'metaworld:?tasks=["reach-v3","push-v3"]&cameras=[]&max_steps=20'),
    "libero": installed("libero", "libero:libero_goal/turn_on_the_stove?size=64"),
}


class QuickArm(PointArm):
    """A fast one: each reset moves the arm in real time."""

    limits = replace(PointArm.limits, max_speed=3.0, max_turn_speed=10.0, max_lag_m=0.3)


@contextmanager
def open_robot() -> Iterator[World]:
    pytest.importorskip("fastapi")
    server = pytest.importorskip("understudy.robots.server")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("understudy.envs.robot_client.TIMEOUT_S", 60.0)  # the machine may be busy
        with server.ArmServer(QuickArm(), port=0) as served, RobotEnv(served.url, hz=50) as world:
            yield world


@pytest.fixture(scope="module", params=[*WORLDS, "robot"])
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    """One world for all tests of the module; each begins with a reset."""
    with open_robot() if request.param == "robot" else WORLDS[request.param]() as opened:
        yield opened


# LIBERO takes a minute for it; the tests above run it each time.
@pytest.fixture(params=[pytest.param(name, marks=[pytest.mark.nightly] if name == "libero" else []) for name in WORLDS])
def make(request: pytest.FixtureRequest) -> Make:
    return WORLDS[request.param]


def some_action(world: Any, seed: int = 0) -> Tree:
    return random_tree(world.step_spec.action, np.random.default_rng(seed))


def run_to_end(world: Any) -> tuple[int, tuple[Any, ...]]:
    """Random actions to the end of the episode: their number, and the result of the last."""
    for number in range(1, 1000):
        result = world.step(some_action(world, number))
        if result[2] or result[3]:
            return number, result
    raise AssertionError("the episode does not end")


def other_task(world: World) -> str:
    return world.suite.tasks[-1].name


# ---- one world, used by all tests


@pytest.mark.parametrize("world", [name for name in WORLDS if name not in ("metaworld", "libero")], indirect=True)
def test_check_env_finds_no_problem(world: World) -> None:
    """With larger simulators their own tests do this, because it takes long; a robot would need minutes."""
    report = check_env(world, episodes=1)
    assert "determinism" in report.passed


def test_reset_and_step_fit_the_spec(world: World) -> None:
    observation, info = world.reset(seed=3)
    world.step_spec.observation.check(observation)
    assert list(info) == ["task", "instruction", "start", "split", "seed"]
    assert (info["split"], info["seed"]) == ("train", 3)
    assert (info["task"], info["instruction"]) == (world.task.name, world.task.instruction)
    observation, reward, terminated, truncated, info = world.step(some_action(world))
    world.step_spec.observation.check(observation)
    assert [type(value) for value in (reward, terminated, truncated)] == [float, bool, bool]
    assert isinstance(info["success"], bool)
    world.step_spec.observation.check(world.observe())


def test_the_info_of_a_reset_begins_the_same_episode_again(world: World) -> None:
    first, info = world.reset(seed=5, options={"split": "eval"})
    assert info["split"] == "eval"
    world.step_without_observation(some_action(world))
    again, same = world.reset(seed=info["seed"], options={name: info[name] for name in ("task", "start", "split")})
    assert same == info
    assert not world.deterministic or trees.equal(first, again)


def test_a_seed_decides_the_following_episodes(world: World) -> None:
    def seeds() -> list[int]:
        infos = [world.reset_without_observation(seed=11)]
        infos += [world.reset_without_observation() for _ in range(2)]
        return [info["seed"] for info in infos]

    first = seeds()
    assert first == seeds()
    assert len({*first}) == 3


@pytest.mark.parametrize(
    ("seed", "options", "message"),
    [
        (None, {"tsak": "x"}, "options: no option 'tsak'; did you mean 'task'?"),
        (None, {"task": "no such task"}, "no task 'no such task'"),
        (None, {"start": 10**6}, "1000000"),
        (None, {"start": -1}, "-1"),
        (None, {"start": "first"}, "'first'"),
        (None, {"split": "test"}, "'test'"),
        (-1, {}, r"seed: expected a number from 0 to 2\*\*63 - 1, got -1"),
        (1.5, {}, "seed: expected a whole number or None, got float 1.5"),
    ],
)
def test_a_wrong_reset_is_refused_and_costs_nothing(
    world: World, seed: Any, options: dict[str, Any], message: str
) -> None:
    world.reset_without_observation(seed=1)
    with pytest.raises((WorldError, SuiteError), match=message):
        world.reset(seed=seed, options=options)
    world.step_without_observation(some_action(world))  # the episode before it still runs


def test_whole_numbers_of_numpy_are_taken(world: World) -> None:
    info = world.reset_without_observation(seed=np.int64(3), options={"start": np.int64(2)})  # type: ignore[arg-type]
    assert (info["seed"], info["start"]) == (3, 2)
    assert [type(info[name]) for name in ("seed", "start")] == [int, int]


def test_a_start_in_another_split_is_refused(world: World) -> None:
    start = world.suite.starts(world.task, "eval")[0]
    with pytest.raises(WorldError, match=f"start {start} of task .* is in split 'eval', and 'train' was asked for"):
        world.reset(options={"start": start, "split": "train"})


def test_an_action_that_does_not_fit_is_refused_and_costs_nothing(world: World) -> None:
    world.reset_without_observation(seed=1)
    for wrong in ({"nobody": np.zeros(3, np.float32)}, np.full(99, 0.5, np.float32), None):
        with pytest.raises(SpecError, match="action"):
            world.step(wrong)
    world.step(some_action(world))


def test_the_task_stays_until_another_is_chosen(world: World) -> None:
    first, last = world.suite.tasks[0].name, other_task(world)
    world.reset_without_observation(seed=1, options={"task": last})
    assert world.reset_without_observation(seed=2)["task"] == world.task.name == last
    with pytest.raises(WorldError, match="an episode is running; name the task in the options of reset"):
        world.choose(first)
    assert world.task.name == last


def test_an_expert_fits_the_spec_and_changes_nothing(world: World) -> None:
    observation, _ = world.reset(seed=1)
    if not world.has_expert:
        with pytest.raises(WorldError, match="no scripted expert"):
            world.expert_action()
        return
    one, two = world.expert_action(), world.expert_action()
    world.step_spec.action.check(one.action, "action")
    if world.deterministic:
        assert trees.equal(one.action, two.action)
        assert trees.equal(world.observe(), observation)
    rng = np.random.default_rng
    noisy = [world.expert_action(noise=0.3, rng=rng(seed)).action for seed in (1, 1, 2)]
    for action in noisy:
        world.step_spec.action.check(action, "action")
    assert not trees.equal(noisy[0], noisy[2])
    if world.deterministic:
        assert trees.equal(noisy[0], noisy[1])
    with pytest.raises(WorldError, match=r"rng: noise needs a random generator, got None"):
        world.expert_action(noise=0.3)


def test_versions_are_text(world: World) -> None:
    assert world.versions()["numpy"]
    assert all(isinstance(version, str) for version in world.versions().values())


# ---- a world from its first call to its last


def test_a_world_from_its_first_call_to_its_last(make: Make) -> None:
    with make() as world:
        assert world.task.name in world.suite.task_names
        with pytest.raises(WorldError, match="reset"):
            world.step(some_action(world))
        world.choose(other_task(world))
        _, info = world.reset(seed=0)
        assert info["task"] == world.task.name == other_task(world)
        num_steps, (_, _, terminated, truncated, _) = run_to_end(world)
        assert terminated or (truncated and num_steps == world.task.max_steps)
        with pytest.raises(WorldError, match="reset"):
            world.step(some_action(world))
        world.choose(world.suite.tasks[0].name)  # between episodes
        assert world.reset_without_observation(seed=0)["task"] == world.suite.tasks[0].name
    world.close()  # a second time: nothing happens


def test_its_own_process_changes_nothing() -> None:
    with ToyTable(size=16) as here, IsolatedWorld(TOY) as there:
        assert_same_description(here, there)
        assert_same_episode(here, there)
    with RealTimeWorld() as here, IsolatedWorld(REAL_TIME) as there:
        assert_same_description(here, there)


def assert_same_description(one: World, two: World) -> None:
    for name in ("step_spec", "suite", "deterministic", "simulated", "hz", "has_expert"):
        assert getattr(one, name) == getattr(two, name), name
    assert one.versions() == two.versions()


# ---- wrappers with Gymnasium's methods


def toy() -> ToyTable:
    return ToyTable(size=16)


def idle() -> ScriptedHuman:
    return ScriptedHuman(lambda: np.zeros(4, np.float32), lambda: 0.0, patience_steps=10**6)


def as_gym() -> Any:
    pytest.importorskip("gymnasium")
    return as_gymnasium(toy())


WRAPPERS: dict[str, Callable[[], Any]] = {
    "TakeoverWorld": lambda: TakeoverWorld(toy(), Takeover(idle())),
    "as_gymnasium": as_gym,
}


@pytest.fixture(params=WRAPPERS)
def wrapped(request: pytest.FixtureRequest) -> Iterator[Any]:
    with ExitStack() as stack:
        opened = WRAPPERS[request.param]()
        stack.callback(opened.close)
        yield opened


def assert_same_episode(one: Any, two: Any) -> None:
    options = {"task": "pick_red", "start": 7}
    first, second = one.reset(seed=4, options=options), two.reset(seed=4, options=options)
    for number in range(8):
        assert trees.equal(first[0], second[0])
        assert first[1:-1] == second[1:-1]
        assert first[-1].items() <= second[-1].items()
        action = some_action(toy(), number)
        first, second = one.step(action), two.step(action)


def test_a_wrapper_runs_the_same_episode(wrapped: Any) -> None:
    assert_same_episode(toy(), wrapped)


def test_a_wrapper_refuses_what_the_world_refuses(wrapped: Any) -> None:
    action = np.zeros(4, np.float32)
    with pytest.raises(WorldError, match="call reset first"):
        wrapped.step(action)
    with pytest.raises(WorldError, match="did you mean 'task'"):
        wrapped.reset(options={"tsak": "pick_red"})
    wrapped.reset(seed=0, options={"task": "pick_red"})
    with pytest.raises(SpecError):
        wrapped.step(np.zeros(5, np.float32))
    while not any(wrapped.step(action)[2:4]):
        pass
    with pytest.raises(WorldError, match="call reset first"):
        wrapped.step(action)
    wrapped.close()
    wrapped.close()


def test_a_takeover_world_executes_what_the_device_says() -> None:
    world = toy()
    driven = TakeoverWorld(world, Takeover(AlwaysScript(lambda: world.expert_action().action)))
    driven.reset(seed=0, options={"task": "pick_red", "start": 0})
    proposal = np.zeros(4, np.float32)
    ended, num_steps = False, 0
    while not ended:
        _, _, terminated, truncated, info = driven.step(proposal)
        ended, num_steps = terminated or truncated, num_steps + 1
        assert info["proposal"] is proposal
        assert not trees.equal(info["intervene_action"], proposal)
    assert info["success"]
    assert (info["intervention_count"], info["intervention_steps"]) == (1, num_steps)
