"""check_env: whether a world keeps its contract, and if not, what to change.

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
from understudy.envs.suite import Suite
from understudy.envs.world import World, WorldError

MAX_STARTS = 200  # reset in all; of longer suites an even sample
MAX_STEPS = 25  # of an episode that is played twice


class CheckError(UnderstudyError):
    """A world breaks its contract; one line per problem."""

    def __init__(self, report: Report):
        super().__init__(f"{report.world}: {len(report.problems)} of {len(_CHECKS)} checks failed\n{report.listing}")
        self.report = report


@dataclass(frozen=True, kw_only=True)
class Report:
    """What was checked, and what is wrong."""

    world: str
    passed: tuple[str, ...]  # names of checks
    problems: tuple[str, ...]  # one line each

    @property
    def listing(self) -> str:
        return "\n".join(f"  - {problem}" for problem in self.problems)

    def __str__(self) -> str:
        left_out = len(_CHECKS) - len(self.passed) - len(self.problems)
        rest = f"; {left_out} left out, since it lives in real time" if left_out else ""
        return f"{self.world}: {len(self.passed)} checks passed ({', '.join(self.passed)}){rest}"


@dataclass(frozen=True, kw_only=True)
class Case:
    """One episode to play: from where, and what is done."""

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
    """One problem: what, got, wanted, what to do next."""


def check_env(world: World | Callable[[], World], *, episodes: int = 3) -> Report:
    """Play a world and compare it with its contract; a factory is called twice, and its worlds are closed.

    `episodes` is how many starts are played several times over; the resets of all starts come on top.
    """
    if episodes < 1:
        raise WorldError(f"episodes: expected at least 1, got {episodes}; 3 is usual")
    if isinstance(world, World):
        return _check(world, None, episodes)
    with world() as first, world() as second:
        return _check(first, second, episodes)


def _check(world: World, second: World | None, episodes: int) -> Report:
    name = type(world).__name__
    passed: list[str] = []
    problems: list[str] = []
    left_out = () if world.deterministic else _NEEDS_DETERMINISM
    for check in _CHECKS:
        title = check.__name__.removeprefix("_check_")
        if check in left_out:
            continue
        try:
            check(world, second, _cases(world, episodes) if passed else [])
        except UnderstudyError as problem:
            problems.append(f"{title}: {problem}")
            if check is _check_description:  # without one there is nothing to play
                break
        else:
            passed.append(title)
    report = Report(world=name, passed=tuple(passed), problems=tuple(problems))
    if problems:
        raise CheckError(report)
    return report


# --- the checks: each raises at the first thing that is wrong ---


def _check_description(world: World, second: World | None, cases: list[Case]) -> None:
    for name, wanted in (("step_spec", StepSpec), ("suite", Suite)):
        value = getattr(world, name, None)
        if not isinstance(value, wanted):
            raise _Broken(f"{name}: expected a {wanted.__name__}, got {describe(value)}; set it in __init__")
    for task in world.suite.tasks:
        if not task.instruction.strip():
            raise _Broken(f"task {task.name!r}: expected an instruction, got none; say what to do in plain words")


def _check_splits(world: World, second: World | None, cases: list[Case]) -> None:
    for task in world.suite.tasks:
        train, evaluation = (set(world.suite.starts(task, split)) for split in SPLITS)
        both = sorted(train & evaluation)
        if both:
            raise _Broken(
                f"task {task.name!r}: expected train and eval starts to be disjoint, got {both[0]} in both; "
                f"a score on starts that were trained on says little, so keep them apart"
            )
        if len(train) + len(evaluation) != task.num_starts:
            raise _Broken(
                f"task {task.name!r}: expected its {task.num_starts} starts in one split or the other, "
                f"got {len(train) + len(evaluation)}; correct the suite's eval_starts"
            )


def _check_starts(world: World, second: World | None, cases: list[Case]) -> None:
    """Every start of every task, or an even sample of them, can be begun; and they are not all the same."""
    every = [(task, start) for task in world.suite.tasks for start in _sample(task.num_starts, MAX_STARTS)]
    for index in _sample(len(every), MAX_STARTS):
        task, start = every[index]
        info = world.reset_without_observation(seed=0, options={"task": task.name, "start": start})
        if world.task != task or (info["task"], info["start"]) != (task.name, start):
            raise _Broken(
                f"expected task {task.name!r} and start {start} after a reset to them, got {world.task.name!r} and "
                f"{info['start']}; do not override reset: write begin"
            )
    for task in world.suite.tasks:
        some = [
            world.reset(seed=0, options={"task": task.name, "start": start})[0] for start in _sample(task.num_starts, 4)
        ]
        if len(some) > 1 and all(trees.equal(some[0], other) for other in some[1:]):
            raise _Broken(
                f"task {task.name!r}: expected different start states for different starts, got the same observation "
                f"for each; make begin depend on `start`, or set num_starts=1"
            )


def _check_spec(world: World, second: World | None, cases: list[Case]) -> None:
    for case in cases:
        for number, moment in enumerate(_play(world, case)):
            try:
                observation: AnyTree = moment.observation
                world.step_spec.observation.check(observation, "observation")
                world.step_spec.reward.check(moment.reward, "reward")
            except UnderstudyError as error:
                raise _Broken(f"{error} ({_at(number, case)}); make observe() and step_spec agree") from error
            if not math.isfinite(moment.reward):
                raise _Broken(f"reward: expected a finite number, got {moment.reward} ({_at(number, case)}); mend it")


def _check_success(world: World, second: World | None, cases: list[Case]) -> None:
    for case in cases:
        for number, moment in enumerate(_play(world, case, look="never")):
            if number and not isinstance(moment.info["success"], bool | np.bool_):
                raise _Broken(
                    f"info/success: expected True or False, got {describe(moment.info['success'])} "
                    f"({_at(number, case)}); return bool(...) from advance"
                )


def _check_actions(world: World, second: World | None, cases: list[Case]) -> None:
    """The world leaves the caller's action as it was."""
    for case in cases:
        world.reset_without_observation(seed=case.seed, options=case.options)
        for action in case.actions:
            mine = trees.map_leaves(np.copy, action)
            _, terminated, truncated, _ = world.step_without_observation(mine)
            if not trees.equal(mine, action):
                raise _Broken("action: expected it unchanged after advance, got other numbers; copy it before you clip")
            if terminated or truncated:
                break


def _check_determinism(world: World, second: World | None, cases: list[Case]) -> None:
    first = [list(_play(world, case)) for case in cases]
    for case, before in zip(cases, first, strict=True):  # all the other episodes lie between
        _compare(
            before,
            list(_play(world, case)),
            case,
            "two runs",
            "draw all randomness from the rng that begin is given, and put back all state in begin",
        )
        if second is not None:
            _compare(
                before,
                list(_play(second, case)),
                case,
                "two worlds of the factory",
                "let nothing depend on the process, the clock or the order of construction",
            )


def _check_observing(world: World, second: World | None, cases: list[Case]) -> None:
    for case in cases:
        once, twice = list(_play(world, case)), list(_play(world, case, look="twice"))
        _compare(
            once,
            twice,
            case,
            "looking once and looking twice",
            "observe() must change nothing, not even a random generator or a frame counter",
        )


def _check_looking(world: World, second: World | None, cases: list[Case]) -> None:
    for case in cases:
        seen = list(_play(world, case))
        blind = list(_play(world, case, look="last"))
        _compare(
            seen,
            blind,
            case,
            "step and step_without_observation",
            "whatever changes the world belongs in advance, not in observe",
        )


def _check_buffers(world: World, second: World | None, cases: list[Case]) -> None:
    for case in cases:
        kept, copies = [], []
        for number, moment in enumerate(_play(world, case)):
            kept.append(moment.observation)
            copies.append(_copy(moment.observation))
            _scribble(moment.observation)
            path = _difference(copies[-1], world.observe())
            if path is not None:
                raise _Broken(
                    f"{path}: expected the world not to read what it gave away, got another value after the caller "
                    f"wrote into it ({_at(number, case)}); return copies from observe()"
                )
            _restore(kept[-1], copies[-1])
        for number, (old, copy) in enumerate(zip(kept, copies, strict=True)):
            path = _difference(copy, old)
            if path is not None:
                raise _Broken(
                    f"{path}: expected the array of step {number} to stay as it was, got a later value in it "
                    f"({_at(number, case)}); return a new array from observe(), not a buffer that is used again"
                )


def _check_ends(world: World, second: World | None, cases: list[Case]) -> None:
    """An episode ends once: terminated by the task, or truncated by the time limit and no later."""
    for task in {case.task: case for case in cases}.values():
        world.reset_without_observation(seed=task.seed, options=task.options)
        limit = world.task.max_steps
        for number in range(1, limit + 1):
            _, terminated, truncated, _ = world.step_without_observation(task.actions[number % len(task.actions)])
            if terminated or truncated:
                break
        else:
            raise _Broken(
                f"expected truncated after max_steps={limit} steps, got an episode that goes on ({task}); "
                f"do not override step: write advance"
            )
        try:
            world.step_without_observation(task.actions[0])
        except WorldError:
            continue
        raise _Broken(
            f"expected an error for a step after the end, got another step ({task}); "
            f"do not override step: write advance"
        )


_CHECKS: tuple[Callable[[World, World | None, list[Case]], None], ...] = (
    _check_description,
    _check_splits,
    _check_starts,
    _check_spec,
    _check_success,
    _check_actions,
    _check_determinism,
    _check_observing,
    _check_looking,
    _check_buffers,
    _check_ends,
)

_NEEDS_DETERMINISM = (_check_determinism, _check_observing, _check_looking)  # what lives in real time cannot pass them


# --- playing ---


@dataclass(frozen=True, kw_only=True)
class _Moment:
    """What came of a reset (the first) or a step."""

    observation: AnyTree | None  # None if nobody looked
    reward: float
    terminated: bool
    truncated: bool
    info: dict[str, Any]


def _play(world: World, case: Case, *, look: Literal["once", "twice", "last", "never"] = "once") -> Iterator[_Moment]:
    """The moments of one episode; with "last" only the last is looked at."""
    info = world.reset_without_observation(seed=case.seed, options=case.options)
    reward, terminated, truncated = 0.0, False, False
    for number in range(len(case.actions) + 1):
        if number:
            reward, terminated, truncated, info = world.step_without_observation(case.actions[number - 1])
        ended = terminated or truncated or number == len(case.actions)
        if look == "twice":
            world.observe()
        seen = look in ("once", "twice") or (look == "last" and ended)
        yield _Moment(
            observation=world.observe() if seen else None,
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
    """The least or the greatest action that the spec allows; zero where it has no bound."""

    def value(leaf: Any) -> Any:
        bound = getattr(leaf, side)
        zero = leaf.zero()
        return zero if bound is None else np.broadcast_to(np.asarray(bound), np.shape(zero)).astype(leaf.dtype)

    return trees.map_leaves(value, spec.action.tree)


def _sample(count: int, most: int) -> list[int]:
    """At most `most` of the numbers below `count`, evenly spread, the first and the last among them."""
    if count <= most:
        return list(range(count))
    return [index * (count - 1) // (most - 1) for index in range(most)]


# --- comparing ---


def _compare(one: list[_Moment], two: list[_Moment], case: Case, between: str, advice: str) -> None:
    for number, (a, b) in enumerate(zip(one, two, strict=False)):
        if a.observation is not None and b.observation is not None:
            path = _difference(a.observation, b.observation)
            if path is not None:
                raise _Broken(
                    f"{path}: expected the same bits in {between}, got a difference ({_at(number, case)}); {advice}"
                )
        for name in ("reward", "terminated", "truncated"):
            if getattr(a, name) != getattr(b, name):
                raise _Broken(
                    f"{name}: expected the same in {between}, got {getattr(a, name)} and {getattr(b, name)} "
                    f"({_at(number, case)}); {advice}"
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
