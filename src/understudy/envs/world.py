"""World: an environment with Gymnasium's reset and step, several tasks and numbered start states.

world = ToyTable()
observation, info = world.reset(seed=1, options={"task": "pick_red"})
while True:
    observation, reward, terminated, truncated, info = world.step(policy(observation))
    if terminated or truncated:
        break
"""

from __future__ import annotations

import abc
import importlib
import operator
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np

from understudy.core import ArraySpec, Nested, Spec, SpecError, Split, StepSpec, Tree, UnderstudyError
from understudy.core import tree as trees
from understudy.core.closeable import Closeable
from understudy.core.spec import describe
from understudy.core.suggestion import did_you_mean
from understudy.envs.suite import Suite, Task

OPTIONS = ("task", "start", "split")  # of `reset`


class WorldError(UnderstudyError):
    """A world was called in the wrong order or with wrong arguments, or broke its own contract."""


@dataclass(frozen=True, kw_only=True, eq=False)
class ExpertAction:
    """The action of a scripted expert in the current state, and the progress of the task."""

    action: Tree
    progress: float  # rises during the task; each world has its own scale


class World(Closeable):
    """Base class of environments. A subclass sets `step_spec` and `suite` and implements four methods.

    Nothing is rendered unless `observe` is called: `step` observes after acting, `step_without_observation` does not.
    """

    step_spec: StepSpec
    suite: Suite
    version_packages: tuple[str, ...] = ("numpy",)  # packages whose versions affect its behaviour
    deterministic: bool = True  # same start, seed and actions give the same bits; False for real-time worlds
    simulated: bool = False  # whether nothing real moves; only then random actions need nobody's permission
    hz: float | None = None  # control rate that `step` keeps; None: as fast as possible

    _task: Task | None = None
    _seeds: np.random.Generator | None = None  # draws the seed of a reset without one
    _num_steps = 0
    _state = "not reset"  # then "running", then "terminated" or "truncated"

    # --- implemented by a subclass ---

    @abc.abstractmethod
    def begin(self, task: Task, start: int, rng: np.random.Generator) -> None:
        """Set the world to a start state of the task; the same task, start and seed give the same bits."""

    @abc.abstractmethod
    def advance(self, action: Tree) -> tuple[float, bool, bool, dict[str, Any]]:
        """Execute one control step; return reward, terminated, truncated (by the world itself), info with "success"."""

    @abc.abstractmethod
    def observe(self) -> Tree:
        """The current observation, in new arrays. Changes nothing, so it may be called twice or never."""

    @abc.abstractmethod
    def close(self) -> None:
        """Release all resources; the world is not used afterwards."""

    def refresh(self) -> None:
        """Read the sensors of a world that changes by itself again, so that `observe` is of now.

        It is called while an episode waits for its operator's first input, before any action.
        """

    def extras(self) -> Tree:
        """The extras of `step_spec` that belong to the last observation, such as the times of its sensors."""
        return {}

    def labels(self) -> dict[str, str]:
        """Labels of this episode up to the last observation, which are stored with it, such as `Sensors.labels`."""
        return {}

    def expert_action(self, *, noise: float = 0.0, rng: np.random.Generator | None = None) -> ExpertAction:
        """The scripted expert's action in the current state, for worlds that have an expert. Changes nothing.

        `noise` is the standard deviation of the noise that `rng` adds to the speeds, so that demonstrations differ.
        """
        raise WorldError(
            f"{self._name}: has no scripted expert; use a device or a policy, or implement {self._name}.expert_action"
        )

    def versions(self) -> dict[str, str]:
        """The versions of `version_packages`, for the fingerprint of a score."""
        import importlib.metadata  # 40 ms, which no help of a command should take

        found = {}
        for name in self.version_packages:
            with suppress(importlib.metadata.PackageNotFoundError):
                found[name] = importlib.metadata.version(name)
        return found

    # --- called by users ---

    @property
    def has_expert(self) -> bool:
        """Whether the subclass implements `expert_action`."""
        return type(self).expert_action is not World.expert_action

    @property
    def task(self) -> Task:
        """The task of this episode; before the first episode, the first task of the suite."""
        return self._task or self.suite.tasks[0]

    def choose(self, task: str) -> None:
        """Select the task of the next episode."""
        if self._state == "running":
            raise WorldError(f"{self._name}: an episode is running; name the task in the options of reset")
        self._task = self.suite.task(task)

    def reset(
        self, *, seed: int | None = None, options: Mapping[str, Any] | None = None
    ) -> tuple[Tree, dict[str, Any]]:
        """Begin an episode. Options: "task" (default: the last one), "start", "split" (default: "train").

        Without a start, one is drawn from the split. The info holds task, instruction, start, split and seed; a reset
        with these as seed and options begins the same episode again.
        """
        info = self.reset_without_observation(seed=seed, options=options)
        return self.observe(), info

    def reset_without_observation(
        self, *, seed: int | None = None, options: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        """Like `reset`, without the observation."""
        chosen = checked_options(options or {})
        task = self.suite.task(chosen["task"]) if chosen.get("task") is not None else self.task
        starts, split = starts_to_choose(self.suite, task, chosen.get("start"), chosen.get("split"))
        seed = self._next_seed(seed)
        # A separate stream: `begin` gets the same random numbers whether the start was drawn or given.
        start = starts[int(np.random.default_rng([seed, 1]).integers(len(starts)))]
        self._state = "not reset"  # if `begin` raises, there is no episode
        self._task, self._num_steps = task, 0
        self.begin(task, start, np.random.default_rng(seed))
        self._state = "running"
        return {"task": task.name, "instruction": task.instruction, "start": start, "split": split, "seed": seed}

    def step(self, action: Tree) -> tuple[Tree, float, bool, bool, dict[str, Any]]:
        """Execute an action and return observation, reward, terminated, truncated, info."""
        reward, terminated, truncated, info = self.step_without_observation(action)
        return self.observe(), reward, terminated, truncated, info

    def step_without_observation(self, action: Tree) -> tuple[float, bool, bool, dict[str, Any]]:
        """Execute an action without observing, for blocks of actions that are observed once at their end."""
        if self._state != "running":
            self._refuse_step()
        reward, terminated, truncated, info = self.advance(self._checked(action))
        if "success" not in info:
            raise WorldError(
                f"info: expected 'success' after each step, got {describe(info)}; return it from {self._name}.advance"
            )
        self._num_steps += 1
        if self._num_steps >= self.task.max_steps and not terminated:
            truncated = True
        if terminated or truncated:
            self._state = "terminated" if terminated else "truncated"
        return float(reward), bool(terminated), bool(truncated), info

    # --- helpers ---

    def _checked(self, action: Tree) -> Tree:
        flat = self.step_spec.action.check(action, "action")
        for path, value in flat.items():
            if isinstance(value, np.ndarray) and value.dtype.kind == "f" and not np.isfinite(value).all():
                raise SpecError(
                    f"{path}: expected finite numbers, got {value[~np.isfinite(value)].flat[0]}; the step was not "
                    f"executed: fix the policy, or whatever gave this action"
                )
        return trees.unflatten(trees.below(flat, "action"))

    def _refuse_step(self) -> None:
        if self._state == "not reset":
            raise WorldError(f"{self._name}: step was called before reset; call reset first")
        raise WorldError(f"{self._name}: the episode was {self._state} after {self._num_steps} steps; call reset first")

    def _next_seed(self, seed: int | None) -> int:
        """The seed of this episode; a given seed also determines the seeds of the following episodes."""
        if seed is not None:
            seed = checked_seed(seed)
            self._seeds = np.random.default_rng([seed, 0])
            return seed
        if self._seeds is None:
            self._seeds = np.random.default_rng()
        return int(self._seeds.integers(2**31))

    @property
    def _name(self) -> str:
        return type(self).__name__


# --- the arguments of reset, which IsolatedWorld checks before it sends them to its process ---


def checked_options(options: Mapping[str, Any]) -> Mapping[str, Any]:
    """The options; a WorldError if there is one that reset does not know."""
    for name in options:
        if name not in OPTIONS:
            advice = did_you_mean(name, OPTIONS, f"reset knows {', '.join(OPTIONS)}")
            raise WorldError(f"options: no option {name!r}; {advice}")
    return options


def checked_seed(seed: Any) -> int:
    """The seed as an int; a WorldError if it is none, or out of range."""
    try:
        number = operator.index(seed)
    except TypeError:
        raise WorldError(f"seed: expected a whole number or None, got {describe(seed)}; convert it") from None
    if not 0 <= number < 2**63:
        raise WorldError(f"seed: expected a number from 0 to 2**63 - 1, got {number}; choose another")
    return number


def starts_to_choose(suite: Suite, task: Task, start: Any, split: Any) -> tuple[Sequence[int], Split]:
    """The given start, or without one all starts of the split (default: "train"); and their split."""
    if start is not None:
        start = int(start) if isinstance(start, np.integer) else start
        found = suite.split_of(task, start)
        if split is not None and split != found:
            raise WorldError(
                f"options: start {start} of task {task.name!r} is in split {found!r}, and {split!r} was asked for; "
                f"leave one of the two out"
            )
        return (start,), found
    wanted: Split = "train" if split is None else split
    starts = suite.starts(task, wanted)
    if not starts:
        raise WorldError(
            f"options: task {task.name!r} has no starts in split {wanted!r}; "
            f"give it more starts, or name them in the suite's eval_starts"
        )
    return starts, wanted


def as_gymnasium(world: World) -> Any:
    """Wrap the world as a gymnasium.Env, with spaces made from its specs."""
    try:
        gymnasium = importlib.import_module("gymnasium")
    except ImportError as error:
        raise WorldError(
            f"gymnasium is not installed ({error}); run `pip install 'understudy-robotics[gym]'`"
        ) from error

    class GymnasiumWorld(gymnasium.Env):  # type: ignore[misc, name-defined]  # gymnasium is optional
        """Passes every call on to the world."""

        metadata: dict[str, Any] = {"render_modes": []}  # noqa: RUF012 (gymnasium's own name and kind)

        def __init__(self) -> None:
            self.world = world
            self.observation_space = _space(gymnasium.spaces, world.step_spec.observation, "observation")
            self.action_space = _space(gymnasium.spaces, world.step_spec.action, "action")

        def reset(
            self, *, seed: int | None = None, options: dict[str, Any] | None = None
        ) -> tuple[Tree, dict[str, Any]]:
            super().reset(seed=seed)
            observation, info = world.reset(seed=seed, options=options)
            return _arrays(observation), info

        def step(self, action: Tree) -> tuple[Tree, float, bool, bool, dict[str, Any]]:
            observation, reward, terminated, truncated, info = world.step(action)
            return _arrays(observation), reward, terminated, truncated, info

        def close(self) -> None:
            world.close()

    return GymnasiumWorld()


def _space(spaces: Any, spec: Spec, path: str) -> Any:
    def build(tree: Nested[ArraySpec], path: str) -> Any:
        if isinstance(tree, ArraySpec):
            return _leaf_space(spaces, tree, path)
        return spaces.Dict({name: build(child, trees.join(path, name)) for name, child in tree.items()})

    return build(spec.tree, path)


def _leaf_space(spaces: Any, leaf: ArraySpec, path: str) -> Any:
    if leaf.ragged:
        raise WorldError(f"{path}: expected a fixed shape, got {leaf}; gymnasium has no space for it; leave it out")
    dtype = leaf.numpy_dtype
    least: float
    most: float
    if dtype.kind == "b":
        least, most = 0, 1
    elif dtype.kind == "f":
        least, most = -np.inf, np.inf
    else:
        least, most = np.iinfo(dtype).min, np.iinfo(dtype).max
    low, high = (
        np.broadcast_to(np.asarray(default if bound is None else bound), leaf.fixed_shape).astype(dtype)
        for bound, default in ((leaf.low, least), (leaf.high, most))
    )
    return spaces.Box(low=low, high=high, shape=leaf.fixed_shape, dtype=dtype.type)


def _arrays(tree: Tree) -> Tree:
    return trees.map_leaves(np.asarray, tree)
