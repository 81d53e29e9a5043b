"""check_env: passes a good world, and catches each way of breaking the contract with a text that helps."""

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from tests.worlds import SensingWorld

from understudy.core import ArraySpec, Spec, Split, StepSpec, Tree
from understudy.envs import CheckError, Report, ToyTable, check_env
from understudy.envs.suite import Suite, Task
from understudy.envs.world import World, WorldError


class Good(World):
    """A point in the plane that drifts, and terminates far to the right."""

    simulated = True

    def __init__(self) -> None:
        self.step_spec = StepSpec(
            observation=Spec(
                {"at": ArraySpec(shape=(2,), dtype="float32"), "step": ArraySpec(shape=(), dtype="int64")}
            ),
            action=Spec(ArraySpec(shape=(2,), dtype="float32", low=-1.0, high=1.0)),
        )
        self.suite = Suite(
            name="plane",
            tasks=(
                Task(name="right", instruction="go right", num_starts=10, max_steps=30),
                Task(name="left", instruction="go left", num_starts=500, max_steps=8),
            ),
        )
        self.closed = False

    def begin(self, task: Task, start: int, rng: np.random.Generator) -> None:
        self.rng = rng
        self.at = np.array([start, 0], np.float32)
        self.num = 0

    def advance(self, action: Tree) -> tuple[float, bool, bool, dict[str, Any]]:
        self.at += action + self.rng.normal(size=2).astype(np.float32)
        self.num += 1
        success = bool(self.at[0] > 1000)
        return float(success), success, False, {"success": success}

    def observe(self) -> Tree:
        return {"at": self.at.copy(), "step": np.asarray(self.num)}

    def close(self) -> None:
        self.closed = True


def problems(world: World) -> str:
    with pytest.raises(CheckError) as caught:
        check_env(world)
    assert str(caught.value).startswith(f"{type(world).__name__}: {len(caught.value.report.problems)} of 11 checks")
    return str(caught.value)


def test_a_good_world_passes() -> None:
    report = check_env(Good())
    assert isinstance(report, Report)
    assert report.problems == ()
    assert str(report).startswith("Good: 11 checks passed (description, splits, starts,")


def test_the_number_of_episodes_is_a_choice() -> None:
    assert check_env(Good(), episodes=1).problems == ()
    with pytest.raises(WorldError, match="episodes: expected at least 1, got 0; 3 is usual"):
        check_env(Good(), episodes=0)


def test_a_factory_is_called_twice_and_its_worlds_closed() -> None:
    made = []

    def make() -> World:
        made.append(Good())
        return made[-1]

    check_env(make)
    assert [world.closed for world in made] == [True, True]


@pytest.mark.parametrize("cameras", [True, False])
def test_the_toy_table_passes(cameras: bool) -> None:
    check_env(lambda: ToyTable(cameras=cameras, size=32))


def test_description() -> None:
    world = Good()
    world.suite = None  # type: ignore[assignment]
    assert "description: suite: expected a Suite, got None; set it in __init__" in problems(world)


def test_instruction() -> None:
    world = Good()
    object.__setattr__(world.suite.tasks[0], "instruction", " ")
    assert "description: task 'right': expected an instruction, got none; describe the task" in problems(world)


def test_splits_overlap() -> None:
    class Overlapping(Suite):
        def starts(self, task: Task | str, split: Split) -> Sequence[int]:
            return range(3)

    world = Good()
    world.suite = Overlapping(name="s", tasks=world.suite.tasks)
    assert "splits: task 'right': expected train and eval starts to be disjoint, got 0 in both" in problems(world)


def test_splits_leave_some_out() -> None:
    class Short(Suite):
        def starts(self, task: Task | str, split: Split) -> Sequence[int]:
            return super().starts(task, split)[1:]

    world = Good()
    world.suite = Short(name="s", tasks=world.suite.tasks)
    assert "splits: task 'right': expected its 10 starts in one split or the other, got 8" in problems(world)


def test_starts_are_ignored() -> None:
    class SameStart(Good):
        def begin(self, task: Task, start: int, rng: np.random.Generator) -> None:
            super().begin(task, 0, rng)

    text = problems(SameStart())
    assert "starts: task 'right': expected different start states for different starts" in text
    assert "make begin depend on `start`" in text


def test_reset_is_overridden() -> None:
    class OwnReset(Good):
        def reset_without_observation(self, **arguments: Any) -> dict[str, Any]:
            return super().reset_without_observation(seed=0)

    assert "do not override reset; implement begin" in problems(OwnReset())


def test_observation_does_not_fit() -> None:
    class Wide(Good):
        def observe(self) -> Tree:
            return {"at": self.at.astype(np.float64), "step": np.asarray(self.num)}

    text = problems(Wide())
    assert "spec: observation/at: expected float32 [2], got float64 [2]" in text
    assert "(after reset, task 'right', start 0, seed 0); make observe() and step_spec agree" in text


def test_extras_do_not_fit() -> None:
    with SensingWorld() as world:
        assert "spec" in check_env(world).passed
    with SensingWorld(forgets_extras=True) as world:
        text = problems(world)
    assert "spec: extras/monotonic/observation/camera: expected int64 [], got nothing" in text
    assert "make extras() and step_spec agree" in text


def test_reward_is_not_a_number() -> None:
    class NoReward(Good):
        def advance(self, action: Tree) -> tuple[float, bool, bool, dict[str, Any]]:
            return float("nan"), *super().advance(action)[1:]

    assert "spec: reward: expected a finite number, got nan (step 1, task 'right'" in problems(NoReward())


def test_success_is_missing() -> None:
    class Silent(Good):
        def advance(self, action: Tree) -> tuple[float, bool, bool, dict[str, Any]]:
            return *super().advance(action)[:3], {}

    found = problems(Silent())
    assert found.startswith("Silent: 8 of 11 checks failed\n  - spec, success, actions, ")  # one line for all of them
    assert found.count("info: expected 'success' after each step, got a dict with no fields") == 1


def test_success_is_no_flag() -> None:
    class Rated(Good):
        def advance(self, action: Tree) -> tuple[float, bool, bool, dict[str, Any]]:
            return *super().advance(action)[:3], {"success": 0.3}

    assert "success: info/success: expected True or False, got float 0.3 (step 1" in problems(Rated())


def test_the_action_is_written_to() -> None:
    class Clipping(Good):
        def advance(self, action: Tree) -> tuple[float, bool, bool, dict[str, Any]]:
            np.clip(action, -0.5, 0.5, out=action)
            return super().advance(action)

    text = problems(Clipping())
    assert "actions: action: expected it unchanged after advance, got other numbers; copy it before clipping" in text


def test_own_randomness() -> None:
    class Restless(Good):
        def begin(self, task: Task, start: int, rng: np.random.Generator) -> None:
            super().begin(task, start, np.random.default_rng())

    text = problems(Restless())
    assert "determinism: observation/at: expected the same bits in two runs, got a difference (step 1" in text
    assert "draw all randomness from the rng argument of begin" in text


def test_state_that_outlives_an_episode() -> None:
    class Forgetful(Good):
        num_episodes = 0

        def begin(self, task: Task, start: int, rng: np.random.Generator) -> None:
            super().begin(task, start, rng)
            self.num_episodes += 1
            self.at[1] = self.num_episodes

    text = problems(Forgetful())
    assert "determinism: observation/at: expected the same bits in two runs, got a difference (after reset" in text
    assert "reset all state in begin" in text


def test_two_worlds_differ() -> None:
    class Numbered(Good):
        made = 0

        def __init__(self) -> None:
            super().__init__()
            Numbered.made += 1
            self.number = Numbered.made

        def begin(self, task: Task, start: int, rng: np.random.Generator) -> None:
            super().begin(task, start + self.number, rng)

    with pytest.raises(CheckError, match="expected the same bits in two worlds of the factory"):
        check_env(Numbered)


def test_looking_changes_the_world() -> None:
    class Shy(Good):
        def observe(self) -> Tree:
            self.at += np.float32(1.0)
            return super().observe()

    text = problems(Shy())
    assert "observe: observation/at: expected the same bits in observing once and observing twice" in text
    assert "observe() must not change anything" in text


def test_acting_blindly_differs() -> None:
    class Lazy(Good):
        """Moves only when looked at."""

        pending = 0.0

        def begin(self, task: Task, start: int, rng: np.random.Generator) -> None:
            super().begin(task, start, rng)
            self.pending = 0.0

        def advance(self, action: Tree) -> tuple[float, bool, bool, dict[str, Any]]:
            self.num += 1
            self.pending = float(action[0])
            return 0.0, False, False, {"success": False}

        def observe(self) -> Tree:
            self.at[0] += np.float32(self.pending)
            self.pending = 0.0
            return super().observe()

    text = problems(Lazy())
    assert "step_without_observation: observation/at: expected the same bits in step and step_without_obs" in text
    assert "change the world in advance" in text


def test_buffers_are_used_again() -> None:
    class Thrifty(Good):
        buffer = np.zeros(2, np.float32)

        def observe(self) -> Tree:
            self.buffer[:] = self.at
            return {"at": self.buffer, "step": np.asarray(self.num)}

    text = problems(Thrifty())
    assert "buffers: observation/at: expected the array of step 0 to stay as it was, got a later value" in text
    assert "return a new array from observe()" in text


def test_the_state_itself_is_given_away() -> None:
    class Naked(Good):
        def observe(self) -> Tree:
            return {"at": self.at, "step": np.asarray(self.num)}

    assert "buffers: observation/at: expected a world that does not share its arrays" in problems(Naked())


def test_the_limit_is_ignored() -> None:
    class Endless(Good):
        def step_without_observation(self, action: Tree) -> tuple[float, bool, bool, dict[str, Any]]:
            return self.advance(action)

    text = problems(Endless())
    assert "ends: expected truncated after max_steps=30 steps, got an episode that continues" in text
    assert "do not override step; implement advance" in text


def test_steps_go_on_after_the_end() -> None:
    class Undead(Good):
        def step_without_observation(self, action: Tree) -> tuple[float, bool, bool, dict[str, Any]]:
            self._state = "running"
            return super().step_without_observation(action)

    assert "ends: expected an error for a step after the end, got another step" in problems(Undead())


def test_all_problems_are_listed() -> None:
    class Twice(Good):
        def advance(self, action: Tree) -> tuple[float, bool, bool, dict[str, Any]]:
            super().advance(action)
            return time.perf_counter(), False, False, {"success": 1}

    with pytest.raises(CheckError) as caught:
        check_env(Twice())
    assert [problem.split(":")[0] for problem in caught.value.report.problems] == [
        "success",
        "determinism",
        "observe",
        "step_without_observation",
    ]
    assert "description" in caught.value.report.passed


def test_what_lives_in_real_time_is_not_asked_to_repeat_itself() -> None:
    class Clock(Good):
        """Begins somewhere else each time."""

        def begin(self, task: Task, start: int, rng: np.random.Generator) -> None:
            super().begin(task, start, np.random.default_rng())

    with pytest.raises(CheckError, match="determinism"):
        check_env(Clock())
    Clock.deterministic = False
    report = check_env(Clock())
    assert "determinism" not in report.passed
    assert str(report).endswith("; 3 skipped, because it is not deterministic")


class Arm(Good):
    """A world that does not say that nothing real moves."""

    simulated = World.simulated

    def advance(self, action: Any) -> Any:
        raise AssertionError("a real arm moved")


def test_a_world_that_is_not_simulated_gets_random_actions_only_on_request() -> None:
    for world in (Arm, Arm()):
        with pytest.raises(WorldError, match=r"Arm: .* random actions, .* ask for them \(random_actions=True"):
            check_env(world)
    with pytest.raises(AssertionError, match="a real arm moved"):
        check_env(Arm, random_actions=True)
