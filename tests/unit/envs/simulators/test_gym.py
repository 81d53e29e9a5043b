"""Gymnasium ids as worlds: real ones from gymnasium, and one with every kind of space."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from tests.docs.pages import DOCS, blocks

from understudy.core import SpecError
from understudy.core import tree as trees
from understudy.envs import CheckError, WorldError, WorldFactory, check_env
from understudy.envs.registry import WORLD_REGISTRY
from understudy.envs.rewards import RewardedWorld
from understudy.envs.simulators.gym import GymWorld, scaled
from understudy.envs.workers.isolated import IsolatedWorld
from understudy.envs.workers.outcomes import WorkerRaised
from understudy.envs.world import World

gymnasium = pytest.importorskip("gymnasium")
spaces = gymnasium.spaces


class Rooms(gymnasium.Env):  # type: ignore[misc, name-defined]
    """Every kind of space; says of success what it is told to, and has an image that is red on the left."""

    metadata = {"render_modes": ["rgb_array"]}  # noqa: RUF012 (gymnasium's own name and kind)
    observation_space = spaces.Dict(
        {
            "place": spaces.Box(-1.0, 1.0, (2, 3), np.float64),
            "room": spaces.Discrete(5, start=2),
            "pair": spaces.Tuple((spaces.MultiBinary(3), spaces.MultiDiscrete([2, 4]))),
            "sign": spaces.Text(10),
        }
    )
    action_space = spaces.Dict(
        {
            "go": spaces.Box(
                np.array([[-1.0, -2.0], [-3.0, -2.0]]), np.array([[1.0, 2.0], [3.0, 2.0]]), dtype=np.float64
            ),
            "door": spaces.Tuple((spaces.Discrete(3, start=1), spaces.MultiDiscrete([2, 3]))),
        }
    )

    def __init__(self, key: str | None = "success", tells: int = 99, render_mode: str | None = None):
        self.key, self.tells, self.render_mode = key, tells, render_mode
        self.buffer = np.zeros((2, 3))  # used again and again
        self.actions: list[Any] = []

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.buffer[:] = self.np_random.uniform(-1, 1, (2, 3))
        self.door = 1
        return self._seen(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        assert self.action_space.contains(action), action
        self.actions.append(action)
        self.buffer[:] = self.np_random.uniform(-1, 1, (2, 3))
        self.door = action["door"][0]
        info = {} if self.key is None or len(self.actions) > self.tells else {self.key: self.door == 3}
        return self._seen(), 1.5, self.door == 3, False, info

    def render(self) -> Any:
        image = np.zeros((30, 60, 3), np.uint8)
        image[:, :30, 0] = 200
        return image

    def _seen(self) -> Any:
        return {
            "place": self.buffer,
            "room": 2,
            "pair": (np.array([1, 0, 1], np.int8), (1, 3)),
            "sign": f"door {self.door}",
        }


@pytest.fixture(autouse=True)
def rooms() -> Iterator[None]:
    gymnasium.register("Rooms-v0", Rooms, max_episode_steps=7)
    gymnasium.register("Endless-v0", Rooms)
    yield
    for id in ("Rooms-v0", "Endless-v0"):
        del gymnasium.registry[id]


def act(door: int = 1) -> dict[str, Any]:
    return {"go": np.zeros((2, 2)), "door": {"0": np.array(door), "1": np.array([1, 2])}}


def play(world: GymWorld, action: Any, **options: Any) -> list[tuple[Any, ...]]:
    world.reset(seed=0, options=options)
    outcomes: list[tuple[Any, ...]] = []
    while not outcomes or not (outcomes[-1][2] or outcomes[-1][3]):
        outcomes.append(world.step(action() if callable(action) else action))
    return outcomes


# --- real environments ---


@pytest.mark.parametrize(
    ("id", "options"),
    [
        ("CartPole-v1", {}),
        ("FrozenLake-v1", {"num_starts": 1}),
        ("Pendulum-v1", {"success_return": -300.0, "max_steps": 30}),
        ("Taxi-v4", {"max_steps": 30}),
        ("Blackjack-v1", {"max_steps": 9, "success_return": 1.0}),
        ("Rooms-v0", {"size": 16, "simulated": True}),
    ],
)
def test_worlds_keep_their_contract(id: str, options: dict[str, Any]) -> None:
    report = check_env(lambda: GymWorld(id, **options))
    assert len(report.passed) == 11


def test_an_unstable_start_is_told_by_the_check() -> None:
    with pytest.raises(Exception, match=r"make reset depend on its seed, or pass num_starts=1 to GymWorld \(gym:ID"):
        check_env(lambda: GymWorld("FrozenLake-v1", num_starts=20))


def test_options_go_to_gymnasium_and_the_goal_is_a_success() -> None:
    with GymWorld("FrozenLake-v1", options={"is_slippery": False}, num_starts=1, instruction="cross the lake") as world:
        _, info = world.reset(seed=0)
        assert info["instruction"] == "cross the lake"
        down, right = 1, 2
        for move in (down, down, right, right, down):
            *_, terminated, truncated, info = world.step(np.array(move))
            assert (terminated, truncated, info["success"]) == (False, False, False)
        observation, reward, terminated, _, info = world.step(np.array(right))
        assert (observation["state"], reward, terminated, info["success"]) == (15, 1.0, True, True)


def test_a_fall_is_no_success_though_it_is_rewarded() -> None:
    with GymWorld("CartPole-v1") as world:
        outcomes = play(world, np.array(0))
        assert outcomes[-1][1:3] == (1.0, True)  # rewarded and terminated
        assert not outcomes[-1][4]["success"]


def test_a_return_that_is_enough_is_a_success_at_the_end() -> None:
    with GymWorld("CartPole-v1", success_return=8.0) as world:
        outcomes = play(world, np.array(0))
        assert 8 <= len(outcomes) < 12
        assert [outcome[4]["success"] for outcome in outcomes] == [False] * (len(outcomes) - 1) + [True]


def test_the_seed_decides_what_happens_after_the_start() -> None:
    """On ice, the same start and actions lead elsewhere with another seed, and to the same place with the same."""
    with GymWorld("FrozenLake-v1", num_starts=1) as world:

        def places(seed: int) -> list[int]:
            world.reset(seed=seed)
            found = []
            for _ in range(6):
                observation, _, terminated, _, _ = world.step(np.array(2))
                found.append(observation["state"].item())
                if terminated:
                    break
            return found

        assert places(1) == places(1)
        assert len({tuple(places(seed)) for seed in range(8)}) > 1


def test_starts_are_seeds() -> None:
    with GymWorld("Pendulum-v1", success_return=0.0, num_starts=3) as world:
        seen = [world.reset(seed=9, options={"start": start})[0]["state"] for start in range(3)]
        wanted = [gymnasium.make("Pendulum-v1").reset(seed=start)[0] for start in range(3)]
        assert all(np.array_equal(a, b) for a, b in zip(seen, wanted, strict=True))
        assert not np.array_equal(seen[0], seen[1])
        assert world.suite.tasks[0].num_starts == 3


# --- limits ---


def test_the_time_limit_is_the_ids_own_and_applied_once() -> None:
    with GymWorld("Rooms-v0") as world:
        assert world.task.max_steps == 7
        outcomes = play(world, act())
        assert [outcome[3] for outcome in outcomes] == [False] * 6 + [True]


def test_a_longer_limit_is_kept() -> None:
    with GymWorld("Rooms-v0", max_steps=12) as world:
        assert len(play(world, act())) == 12


def test_an_endless_environment_needs_a_limit() -> None:
    with pytest.raises(WorldError, match=r"Endless-v0: has no step limit; pass max_steps"):
        GymWorld("Endless-v0")


# --- success ---


@pytest.mark.parametrize("key", ["success", "is_success", "succeed"])
def test_info_tells_of_success(key: str) -> None:
    with GymWorld("Rooms-v0", options={"key": key}) as world:
        assert not play(world, act(2))[-1][4]["success"]
        assert play(world, act(3))[-1][4]["success"]


def test_silence_about_success_is_an_error_that_teaches() -> None:
    with GymWorld("Rooms-v0", options={"key": None}) as world:
        with pytest.raises(WorldError, match=r"none of success, is_success, succeed.*pass success_return .* was 10.5"):
            play(world, act())
        assert world._num_steps == 6  # no earlier than at the end: the last info might have told


def test_infos_that_fall_silent_have_told_enough() -> None:
    with GymWorld("Rooms-v0", options={"tells": 1}) as world:
        assert not play(world, act())[-1][4]["success"]


def test_a_return_that_is_given_overrules_the_info() -> None:
    with GymWorld("Rooms-v0", success_return=100.0) as world:
        assert not play(world, act(3))[-1][4]["success"]


# --- spaces ---


def test_each_space_becomes_arrays_and_back() -> None:
    with GymWorld("Rooms-v0") as world:
        observation, _ = world.reset(seed=0)
        flat = {path: (str(leaf.dtype), leaf.shape) for path, leaf in trees.leaves(observation) if path != "sign"}
        assert flat == {
            "place": ("float64", (2, 3)),
            "room": ("int64", ()),
            "pair/0": ("int8", (3,)),
            "pair/1": ("int64", (2,)),
        }
        assert observation["sign"] == "door 1"
        world.step(act(2))
        executed = world._env.unwrapped.actions[-1]  # `contains` was asked there, too
        assert executed["door"][0] == 2
        assert isinstance(executed["door"], tuple)


def test_bounds_of_actions_are_kept() -> None:
    with GymWorld("Rooms-v0") as world:
        world.reset(seed=0)
        go = world.step_spec.action.flat["go"]
        assert (go.low, go.high) == ((-1.0, -2.0), (1.0, 2.0))  # the tightest of each column
        with pytest.raises(SpecError, match=r"action/door/0: expected a value from 1 to 3, got 4"):
            world.step(act(4))
    with GymWorld("Pendulum-v1", success_return=0.0) as world:
        assert (world.step_spec.action.tree.low, world.step_spec.action.tree.high) == (-2.0, 2.0)


def test_a_space_without_arrays_is_named() -> None:
    class Strange(Rooms):
        observation_space = spaces.Dict({"list": spaces.Sequence(spaces.Discrete(2))})

    gymnasium.register("Strange-v0", Strange, max_episode_steps=5)
    try:
        with pytest.raises(WorldError, match=r"observation/list: expected a Box, .* got Sequence"):
            GymWorld("Strange-v0")
    finally:
        del gymnasium.registry["Strange-v0"]


# --- images ---


def test_a_picture_is_of_the_size_asked_for() -> None:
    with GymWorld("Rooms-v0", size=10) as world:
        observation, _ = world.reset(seed=0)
        image = observation["image"]
        assert (image.shape, str(image.dtype)) == ((10, 10, 3), "uint8")
        assert image[:, :5, 0].tolist() == [[200] * 5] * 10
        assert not image[:, 5:].any()
    with GymWorld("Rooms-v0") as world:
        assert "image" not in world.reset(seed=0)[0]


@pytest.mark.parametrize("size", [3, 4, 7])
def test_a_scaled_picture_has_the_means(size: int) -> None:
    image = np.random.default_rng(0).integers(0, 255, (6, 5, 3), np.uint8)
    small = scaled(image, size)
    assert small.shape == (size, size, 3)
    for row in range(size):
        for column in range(size):
            top, left = row * 6 // size, column * 5 // size
            part = image[top : max((row + 1) * 6 // size, top + 1), left : max((column + 1) * 5 // size, left + 1)]
            assert np.abs(small[row, column] - part.mean(axis=(0, 1))).max() <= 0.5


def test_a_size_that_is_none_is_refused() -> None:
    with pytest.raises(WorldError, match=r"size: expected 0 \(no image\) to 1024 pixels, got int -1"):
        GymWorld("Rooms-v0", size=-1)


# --- names ---


def test_an_unknown_id_shows_what_gymnasium_says() -> None:
    with pytest.raises(WorldError, match=r"gym: could not make 'CartPol-v1' .*CartPole"):
        GymWorld("CartPol-v1")


def test_an_unknown_option_is_refused() -> None:
    with pytest.raises(WorldError, match=r"could not make 'Rooms-v0' with \{'colour': 1\}"):
        GymWorld("Rooms-v0", options={"colour": 1})


def test_it_works_in_a_process_of_its_own() -> None:
    source = WorldFactory(factory="understudy.envs.simulators.gym:GymWorld", options={"id": "CartPole-v1"})
    with IsolatedWorld(source) as there, GymWorld("CartPole-v1") as here:
        for world in (there, here):
            world.reset(seed=3, options={"start": 4})
        for _ in range(5):
            a, b = (world.step(np.array(1)) for world in (there, here))
            assert trees.equal(a[0], b[0])
            assert a[1:] == b[1:]
    with pytest.raises(WorkerRaised, match="pass max_steps"):
        IsolatedWorld(WorldFactory(factory=source.factory, options={"id": "Blackjack-v1"}))


@pytest.mark.skipif(not WORLD_REGISTRY["metaworld"].ready, reason="run `understudy env setup metaworld` first")
def test_it_works_in_another_virtual_environment() -> None:
    """With mujoco, which is not asked for here."""
    source = WorldFactory(
        factory="understudy.envs.simulators.gym:GymWorld",
        options={"id": "InvertedPendulum-v5", "size": 24},
        python=str(WORLD_REGISTRY["metaworld"].python),
        env=dict(WORLD_REGISTRY["metaworld"].variables),
    )
    with IsolatedWorld(source) as world:
        first, _ = world.reset(seed=0, options={"start": 1})
        for _ in range(2):
            observation, *_ = world.step(np.full(1, 3.0, np.float32))
        assert not np.array_equal(first["image"], observation["image"])
        assert trees.equal(world.reset(seed=0, options={"start": 1})[0], first)


def test_the_code_of_the_page_runs(capsys: pytest.CaptureFixture[str]) -> None:
    page = DOCS / "simulators.md"
    section = page.read_text().partition("\n## Any Gymnasium id\n")[2].partition("\n## ")[0]
    (block,) = blocks(section)
    exec(compile(block, page.name, "exec"), {})
    printed = capsys.readouterr().out.splitlines()
    assert printed[0] == "15 True"
    assert printed[1].startswith("GymWorld: 11 checks passed")


def test_only_environments_of_gymnasium_itself_count_as_simulated() -> None:
    with GymWorld("CartPole-v1") as world:
        assert world.simulated
    for simulated, wanted in ((None, False), (True, True), (False, False)):
        with GymWorld("Rooms-v0", simulated=simulated) as world:
            assert world.simulated is wanted


class Dot(gymnasium.Env):  # type: ignore[misc, name-defined]
    """A point on a line that is not registered anywhere."""

    metadata = {"render_modes": ["rgb_array"]}  # noqa: RUF012 (gymnasium's own name and kind)
    observation_space = spaces.Box(-2, 2, (1,), np.float32)

    def __init__(self, *, discrete: bool = False, render_mode: str | None = None):
        self.action_space = spaces.Discrete(3) if discrete else spaces.Box(-2, 4, (1,), np.float32)
        self.discrete, self.render_mode = discrete, render_mode

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.at = self.np_random.uniform(0.5, 1.5)
        return np.float32([self.at]), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        assert self.action_space.contains(action), action
        self.at += 0.1 * (float(action) - 1 if self.discrete else float(action[0]))
        there = bool(abs(self.at) < 0.3)
        return np.float32([self.at]), float(there), there, False, {"success": there}


def dot(**options: Any) -> GymWorld:
    return GymWorld(Dot(), max_steps=40, simulated=True, expert=lambda seen: np.clip(-seen, -1, 1), **options)


class Careless(Dot):
    """Draws from the random generator of the whole process."""

    def reset(self, **options: Any) -> tuple[Any, dict[str, Any]]:
        super().reset(**options)
        self.at = np.random.uniform(0.5, 1.5)  # noqa: NPY002 (what is to be found)
        return np.float32([self.at]), {}


def test_one_cause_is_told_first_and_in_the_words_of_gymnasium() -> None:
    for wrapped in (False, True):
        world: World = GymWorld(Careless(), max_steps=40, simulated=True)
        with pytest.raises(CheckError) as caught:
            check_env(RewardedWorld(world, success=lambda seen: False) if wrapped else world)
        first, *others = caught.value.report.listing.splitlines()
        assert first.startswith("  - determinism: observation/state: expected the same bits in two runs, got")
        advice = "; draw all randomness from self.np_random, which reset(seed=) seeds, and reset all state in reset"
        assert first.endswith(advice)
        assert [line.partition(":")[0] for line in others] == ["  - observe", "  - step_without_observation"]
        same = "; this probably has the same cause as determinism: correct that first"
        assert all(line.endswith(same) for line in others)
        assert not any(name in line for name in ("begin", "advance", "observe()") for line in (first, *others))


def test_a_forgotten_simulated_is_told_as_it_is_written() -> None:
    with pytest.raises(WorldError, match=r"nothing real moves, make it with GymWorld\(\.\.\., simulated=True\), or as"):
        check_env(GymWorld(Dot(), max_steps=40))


def test_an_environment_of_ones_own_with_an_expert() -> None:
    assert "11 checks passed" in str(check_env(dot, episodes=1))
    with dot(progress=lambda seen: -abs(seen[0])) as world:
        assert (world.task.name, world.task.max_steps, world.has_expert) == ("Dot", 40, True)
        seen, _ = world.reset(seed=1)
        assert world.expert_action().progress == pytest.approx(-seen["state"][0])
        outcome: dict[str, Any] = {"success": False}
        for _ in range(40):
            _, _, ended, _, outcome = world.step(world.expert_action().action)
            if ended:
                break
        assert outcome["success"] is True
    with dot(name="go-home", instruction="go home") as world:
        assert (world.task.name, world.task.instruction) == ("go-home", "go home")


def test_noise_is_scaled_by_the_range_and_stays_within_it() -> None:
    rng = np.random.default_rng(0)
    with dot() as world:
        world.reset(seed=1)
        still = world.expert_action().action
        drawn = np.array([world.expert_action(noise=0.1, rng=rng).action for _ in range(500)])
        assert np.std(drawn - still) == pytest.approx(0.3, rel=0.15)  # of a range of 6
        far = np.array([world.expert_action(noise=10.0, rng=rng).action for _ in range(20)])
        assert far.min() >= -2
        assert far.max() <= 4
    with GymWorld(Dot(discrete=True), max_steps=9, expert=lambda seen: 0) as world:
        world.reset(seed=1)
        chosen = [int(world.expert_action(noise=0.3, rng=rng).action) for _ in range(500)]
        assert np.mean(np.array(chosen) == 0) == pytest.approx(0.8, abs=0.06)  # a third of the random ones is 0
        assert set(chosen) == {0, 1, 2}


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: GymWorld(Dot()), "Dot: has no step limit; pass max_steps"),
        (lambda: GymWorld(3), "expected an id or a gymnasium.Env, got int 3"),
        (lambda: GymWorld(Dot(), max_steps=5, options={"a": 1}), "give them to your environment itself"),
        (lambda: GymWorld(Dot(), max_steps=5, size=32), "needs render_mode='rgb_array', got None"),
    ],
)
def test_an_environment_that_does_not_fit_is_refused(make: Any, says: str) -> None:
    with pytest.raises(WorldError, match=says):
        make()


class Unlike(Dot):
    """Dot, whose space says one thing while it returns another."""

    def __init__(self, space: Any, seen: Any):
        super().__init__()
        self.observation_space, self.seen = space, seen

    def reset(self, **options: Any) -> tuple[Any, dict[str, Any]]:
        return self.seen, super().reset(**options)[1]


@pytest.mark.parametrize(
    ("space", "seen", "says"),
    [
        (spaces.Box(-2, 2, (4,)), np.zeros(5), "observation: expected [4], as its space says, got [5]"),
        (spaces.Discrete(3), np.zeros(1), "observation: expected [], as its space says, got [1]"),
        (spaces.Dict(arm=spaces.Box(-2, 2, (4,))), {"arm": np.zeros(2)}, "observation/arm: expected [4]"),
        (spaces.Dict(arm=spaces.Box(-2, 2, (4,))), {"leg": 0}, "observation: expected arm, as its space says, got leg"),
    ],
)
def test_an_observation_that_is_not_of_its_space_is_refused_before_the_expert_sees_it(
    space: Any, seen: Any, says: str
) -> None:
    world = GymWorld(Unlike(space, seen), max_steps=5, simulated=True, expert=lambda seen: pytest.fail("was asked"))
    with pytest.raises(WorldError, match=re.escape(says)):
        world.reset(seed=1)
    with pytest.raises(CheckError) as failed:
        check_env(world, episodes=1)
    assert str(failed.value).count(says) == 1  # though many checks find it


def test_an_action_of_the_expert_that_is_not_of_its_space_is_refused() -> None:
    with GymWorld(Dot(), max_steps=5, expert=lambda seen: np.zeros(3)) as world:
        world.reset(seed=1)
        with pytest.raises(
            WorldError, match=re.escape("action of the expert: expected [1], as its space says, got [3]")
        ):
            world.expert_action()


def test_without_an_expert_it_says_how_to_give_one() -> None:
    with GymWorld(Dot(), max_steps=5) as world:
        world.reset(seed=1)
        assert not world.has_expert
        with pytest.raises(WorldError, match="pass one to GymWorld as expert="):
            world.expert_action()
