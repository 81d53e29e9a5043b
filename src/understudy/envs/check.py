"""check_env: tests whether a world keeps its contract, and says what to change if it does not.

report = check_env(MyWorld)   # raises a CheckError that lists every problem
print(report)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from understudy.core import SPLITS, AnyTree, StepSpec, UnderstudyError
from understudy.core import tree as trees
from understudy.core.examples import random_tree
from understudy.core.spec import describe
from understudy.envs.gymnasium_advice import how_to_mark_simulated, is_gymnasium
from understudy.envs.suite import Suite
from understudy.envs.world import World, WorldError

MAX_STARTS = 200  # resets in total; larger suites are sampled evenly
MAX_STEPS = 25  # of an episode that is run twice


class CheckError(UnderstudyError):
    """A world breaks its contract; one line per problem."""

    def __init__(self, report: Report):
        super().__init__(f"{report.world}: {len(report.problems)} of {len(_CHECKS)} checks failed\n{report.listing}")
        self.report = report


@dataclass(frozen=True, kw_only=True)
class Report:
    """The checks that passed, and the problems found."""

    world: str
    passed: tuple[str, ...]  # names of checks
    problems: tuple[str, ...]  # one line each

    @property
    def listing(self) -> str:
        """One line for each problem; checks that found the same one share it."""
        finders: dict[str, list[str]] = {}
        for problem in self.problems:
            name, _, text = problem.partition(": ")
            finders.setdefault(text, []).append(name)
        return "\n".join(f"  - {', '.join(names)}: {text}" for text, names in finders.items())

    def __str__(self) -> str:
        left_out = len(_CHECKS) - len(self.passed) - len(self.problems)
        rest = f"; {left_out} skipped, because it is not deterministic" if left_out else ""
        return f"{self.world}: {len(self.passed)} checks passed ({', '.join(self.passed)}){rest}"


@dataclass(frozen=True, kw_only=True)
class Case:
    """One episode to run: its task, start, seed and actions."""

    task: str
    start: int
    seed: int
    actions: list[AnyTree]

    @property
    def options(self) -> dict[str, Any]:
        return {"task": self.task, "start": self.start}

    def __str__(self) -> str:
        return f"task {self.task!r}, start {self.start}, seed {self.seed}"


class _Broken(UnderstudyError):
    """One problem: what was expected, what was got, and what to do next."""


class _Different(_Broken):
    """Two runs that should be equal are not."""

    def __init__(self, found: str, advice: str):
        super().__init__(f"{found}; {advice}")
        self.found = found


def check_env(world: World | Callable[[], World], *, episodes: int = 3, random_actions: bool = False) -> Report:
    """Run a world and compare it with its contract; a factory is called twice, and its worlds are closed.

    `episodes` is the number of starts that are run several times; all starts are reset in addition. The actions are
    extreme and random ones. A world that is not simulated gets them only with `random_actions=True`.
    """
    if episodes < 1:
        raise WorldError(f"episodes: expected at least 1, got {episodes}; 3 is usual")
    if isinstance(world, World):
        _check_permission(world, random_actions)
        return _check(world, None, episodes)
    with world() as first:
        _check_permission(first, random_actions)
        with world() as second:
            return _check(first, second, episodes)


def _check_permission(world: World, random_actions: bool) -> None:
    if not (world.simulated or random_actions):
        raise WorldError(
            f"{type(world).__name__}: the check sends extreme and random actions, and this world does not say that it "
            f"is simulated; if nothing real moves, {how_to_mark_simulated(world)}, else "
            f"make sure that it is safe and ask for them (random_actions=True, --random-actions)"
        )


def _check(world: World, second: World | None, episodes: int) -> Report:
    name = type(world).__name__
    passed: list[str] = []
    problems: list[str] = []
    is_nondeterministic = False
    left_out = () if world.deterministic else _NEEDS_DETERMINISM
    for check in _CHECKS:
        title = check.__name__.removeprefix("_check_")
        if check in left_out:
            continue
        try:
            check(world, second, _cases(world, episodes) if passed else [])
        except UnderstudyError as problem:
            text = str(problem)
            if isinstance(problem, _Different) and is_nondeterministic:
                text = f"{problem.found}; this probably has the same cause as determinism: correct that first"
            is_nondeterministic |= isinstance(problem, _Different) and check is _check_determinism
            problems.append(f"{title}: {text}")
            if check is _check_description:  # without it there is nothing to run
                break
        else:
            passed.append(title)
    report = Report(world=name, passed=tuple(passed), problems=tuple(problems))
    if problems:
        raise CheckError(report)
    return report


# --- the checks: each raises at the first problem ---


def _check_description(world: World, second: World | None, cases: list[Case]) -> None:
    for name, wanted in (("step_spec", StepSpec), ("suite", Suite)):
        value = getattr(world, name, None)
        if not isinstance(value, wanted):
            raise _Broken(f"{name}: expected a {wanted.__name__}, got {describe(value)}; set it in __init__")
    for task in world.suite.tasks:
        if not task.instruction.strip():
            raise _Broken(f"task {task.name!r}: expected an instruction, got none; describe the task in plain words")


def _check_splits(world: World, second: World | None, cases: list[Case]) -> None:
    for task in world.suite.tasks:
        train, evaluation = (set(world.suite.starts(task, split)) for split in SPLITS)
        both = sorted(train & evaluation)
        if both:
            raise _Broken(
                f"task {task.name!r}: expected train and eval starts to be disjoint, got {both[0]} in both; "
                f"a score on training starts says little, so keep them separate"
            )
        if len(train) + len(evaluation) != task.num_starts:
            raise _Broken(
                f"task {task.name!r}: expected its {task.num_starts} starts in one split or the other, "
                f"got {len(train) + len(evaluation)}; correct the suite's eval_starts"
            )


def _check_starts(world: World, second: World | None, cases: list[Case]) -> None:
    """Every start of every task, or an even sample of them, can be reset to; and they are not all the same."""
    every = [(task, start) for task in world.suite.tasks for start in _sample(task.num_starts, MAX_STARTS)]
    for index in _sample(len(every), MAX_STARTS):
        task, start = every[index]
        info = world.reset_without_observation(seed=0, options={"task": task.name, "start": start})
        if world.task != task or (info["task"], info["start"]) != (task.name, start):
            raise _Broken(
                f"expected task {task.name!r} and start {start} after a reset to them, got {world.task.name!r} and "
                f"{info['start']}; do not override reset; implement begin"
            )
    for task in world.suite.tasks:
        some = [
            world.reset(seed=0, options={"task": task.name, "start": start})[0] for start in _sample(task.num_starts, 4)
        ]
        advice = "make begin depend on `start`, or set num_starts=1"
        if is_gymnasium(world):
            advice = "make reset depend on its seed, or pass num_starts=1 to GymWorld (gym:ID?num_starts=1)"
        if len(some) > 1 and all(trees.equal(some[0], other) for other in some[1:]):
            raise _Broken(
                f"task {task.name!r}: expected different start states for different starts, got the same observation "
                f"for each; {advice}"
            )


def _check_spec(world: World, second: World | None, cases: list[Case]) -> None:
    for case in cases:
        for number, result in enumerate(_run(world, case)):
            method = "observe()"
            try:
                observation: AnyTree = result.observation
                world.step_spec.observation.check(observation, "observation")
                world.step_spec.reward.check(result.reward, "reward")
                method = "extras()"
                world.step_spec.extras.check(result.extras, "extras")
            except UnderstudyError as error:
                raise _Broken(f"{error} ({_at(number, case)}); make {method} and step_spec agree") from error
            if not math.isfinite(result.reward):
                raise _Broken(f"reward: expected a finite number, got {result.reward} ({_at(number, case)}); fix it")


def _check_success(world: World, second: World | None, cases: list[Case]) -> None:
    for case in cases:
        for number, result in enumerate(_run(world, case, observe="never")):
            if number and not isinstance(result.info["success"], bool | np.bool_):
                raise _Broken(
                    f"info/success: expected True or False, got {describe(result.info['success'])} "
                    f"({_at(number, case)}); return bool(...) from advance"
                )


def _check_actions(world: World, second: World | None, cases: list[Case]) -> None:
    """The world does not modify the caller's action."""
    for case in cases:
        world.reset_without_observation(seed=case.seed, options=case.options)
        for action in case.actions:
            mine = trees.map_leaves(np.copy, action)
            _, terminated, truncated, _ = world.step_without_observation(mine)
            if not trees.equal(mine, action):
                raise _Broken("action: expected it unchanged after advance, got other numbers; copy it before clipping")
            if terminated or truncated:
                break


def _check_determinism(world: World, second: World | None, cases: list[Case]) -> None:
    first = [list(_run(world, case)) for case in cases]
    for case, before in zip(cases, first, strict=True):  # after all other episodes
        _compare(
            before,
            list(_run(world, case)),
            case,
            "two runs",
            "draw all randomness from self.np_random, which reset(seed=) seeds, and reset all state in reset"
            if is_gymnasium(world)
            else "draw all randomness from the rng argument of begin, and reset all state in begin",
        )
        if second is not None:
            _compare(
                before,
                list(_run(second, case)),
                case,
                "two worlds of the factory",
                "do not depend on the process, the clock or the order of construction",
            )


def _check_observe(world: World, second: World | None, cases: list[Case]) -> None:
    method = "render()" if is_gymnasium(world) else "observe()"
    for case in cases:
        once, twice = list(_run(world, case)), list(_run(world, case, observe="twice"))
        _compare(
            once,
            twice,
            case,
            "observing once and observing twice",
            f"{method} must not change anything, not even a random generator or a frame counter",
        )


def _check_step_without_observation(world: World, second: World | None, cases: list[Case]) -> None:
    for case in cases:
        seen = list(_run(world, case))
        blind = list(_run(world, case, observe="last"))
        _compare(
            seen,
            blind,
            case,
            "step and step_without_observation",
            "change the environment in step, not in render"
            if is_gymnasium(world)
            else "change the world in advance, not in observe",
        )


def _check_buffers(world: World, second: World | None, cases: list[Case]) -> None:
    for case in cases:
        kept, copies = [], []
        for number, result in enumerate(_run(world, case)):
            kept.append(result.observation)
            copies.append(_copy(result.observation))
            _scribble(result.observation)
            path = _difference(copies[-1], world.observe())
            if path is not None:
                raise _Broken(
                    f"{path}: expected a world that does not share its arrays, got another value after the caller "
                    f"wrote into it ({_at(number, case)}); return copies from observe()"
                )
            _restore(kept[-1], copies[-1])
        for number, (old, copy) in enumerate(zip(kept, copies, strict=True)):
            path = _difference(copy, old)
            if path is not None:
                raise _Broken(
                    f"{path}: expected the array of step {number} to stay as it was, got a later value in it "
                    f"({_at(number, case)}); return a new array from observe(), not a reused buffer"
                )


def _check_ends(world: World, second: World | None, cases: list[Case]) -> None:
    """An episode ends once: terminated by the task, or truncated at the step limit."""
    for task in {case.task: case for case in cases}.values():
        world.reset_without_observation(seed=task.seed, options=task.options)
        limit = world.task.max_steps
        for number in range(1, limit + 1):
            _, terminated, truncated, _ = world.step_without_observation(task.actions[number % len(task.actions)])
            if terminated or truncated:
                break
        else:
            raise _Broken(
                f"expected truncated after max_steps={limit} steps, got an episode that continues ({task}); "
                f"do not override step; implement advance"
            )
        try:
            world.step_without_observation(task.actions[0])
        except WorldError:
            continue
        raise _Broken(
            f"expected an error for a step after the end, got another step ({task}); "
            f"do not override step; implement advance"
        )


_CHECKS: tuple[Callable[[World, World | None, list[Case]], None], ...] = (
    _check_description,
    _check_splits,
    _check_starts,
    _check_spec,
    _check_success,
    _check_actions,
    _check_determinism,
    _check_observe,
    _check_step_without_observation,
    _check_buffers,
    _check_ends,
)

_NEEDS_DETERMINISM = (
    _check_determinism,
    _check_observe,
    _check_step_without_observation,
)  # skipped in real time


# --- running episodes ---


@dataclass(frozen=True, kw_only=True)
class _Result:
    """The result of a reset (the first) or a step."""

    observation: AnyTree | None  # None if it was not observed
    extras: AnyTree  # of the observation
    reward: float
    terminated: bool
    truncated: bool
    info: dict[str, Any]


def _run(world: World, case: Case, *, observe: Literal["once", "twice", "last", "never"] = "once") -> Iterator[_Result]:
    """Run one episode and yield its results; with "last" only the last one is observed."""
    info = world.reset_without_observation(seed=case.seed, options=case.options)
    reward, terminated, truncated = 0.0, False, False
    for number in range(len(case.actions) + 1):
        if number:
            reward, terminated, truncated, info = world.step_without_observation(case.actions[number - 1])
        ended = terminated or truncated or number == len(case.actions)
        if observe == "twice":
            world.observe()
        seen = observe in ("once", "twice") or (observe == "last" and ended)
        yield _Result(
            observation=world.observe() if seen else None,
            extras=world.extras() if seen else {},
            reward=reward,
            terminated=terminated,
            truncated=truncated,
            info=info,
        )
        if ended:
            return


def _cases(world: World, episodes: int) -> list[Case]:
    """Starts spread over tasks and splits, with extreme actions first and random ones after them."""
    cases = []
    for number in range(episodes):
        task = world.suite.tasks[number * len(world.suite.tasks) // episodes]
        start = number * (task.num_starts - 1) // max(1, episodes - 1)
        rng = np.random.default_rng(number)
        actions = [_extreme(world.step_spec, side) for side in ("low", "high")]
        actions += [random_tree(world.step_spec.action, rng) for _ in range(min(task.max_steps, MAX_STEPS))]
        cases.append(Case(task=task.name, start=start, seed=number, actions=actions[: task.max_steps]))
    return cases


def _extreme(spec: StepSpec, side: Literal["low", "high"]) -> AnyTree:
    """The lowest or highest action that the spec allows; zero where it has no bound."""

    def value(leaf: Any) -> Any:
        bound = getattr(leaf, side)
        zero = leaf.zero()
        return zero if bound is None else np.broadcast_to(np.asarray(bound), np.shape(zero)).astype(leaf.dtype)

    return trees.map_leaves(value, spec.action.tree)


def _sample(count: int, most: int) -> list[int]:
    """At most `most` of the numbers below `count`, evenly spread, including the first and the last."""
    if count <= most:
        return list(range(count))
    return [index * (count - 1) // (most - 1) for index in range(most)]


# --- comparing ---


def _compare(one: list[_Result], two: list[_Result], case: Case, between: str, advice: str) -> None:
    for number, (a, b) in enumerate(zip(one, two, strict=False)):
        if a.observation is not None and b.observation is not None:
            path = _difference(a.observation, b.observation)
            if path is not None:
                raise _Different(
                    f"{path}: expected the same bits in {between}, got a difference ({_at(number, case)})", advice
                )
        for name in ("reward", "terminated", "truncated"):
            if getattr(a, name) != getattr(b, name):
                raise _Different(
                    f"{name}: expected the same in {between}, got {getattr(a, name)} and {getattr(b, name)} "
                    f"({_at(number, case)})",
                    advice,
                )


def _difference(one: AnyTree, two: AnyTree) -> str | None:
    """The path of the first field that is not bit-equal."""
    flat, other = trees.flatten(one, "observation"), trees.flatten(two, "observation")
    if flat.keys() != other.keys():
        return min(flat.keys() ^ other.keys())
    return next((path for path, leaf in flat.items() if not trees.equal_leaf(leaf, other[path])), None)


def _at(number: int, case: Case) -> str:
    return f"{'after reset' if number == 0 else f'step {number}'}, {case}"


def _copy(tree: AnyTree) -> AnyTree:
    return trees.map_leaves(lambda leaf: leaf.copy() if isinstance(leaf, np.ndarray) else leaf, tree)


def _scribble(tree: AnyTree) -> None:
    """Write other numbers into every array that can be written to."""
    for _, leaf in trees.leaves(tree):
        if isinstance(leaf, np.ndarray) and leaf.flags.writeable and leaf.size:
            leaf.view(np.uint8 if leaf.ndim and leaf.flags.c_contiguous else leaf.dtype)[...] = 1


def _restore(tree: AnyTree, copy: AnyTree) -> None:
    for (_, leaf), (_, before) in zip(trees.leaves(tree), trees.leaves(copy), strict=True):
        if isinstance(leaf, np.ndarray) and leaf.flags.writeable:
            leaf[...] = before
