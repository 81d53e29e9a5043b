"""World: Gymnasium's reset and step for tasks with numbered start states, without gymnasium.

world = ToyTable()
observation, info = world.reset(seed=1, options={"task": "pick_red"})
while True:
    observation, reward, terminated, truncated, info = world.step(policy(observation))
    if terminated or truncated:
        break
"""

from __future__ import annotations

import abc
import difflib
import importlib
import importlib.metadata
import operator
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np

from understudy.core import ArraySpec, Nested, Spec, Split, StepSpec, Tree, UnderstudyError
from understudy.core import tree as trees
from understudy.core.closeable import Closeable
from understudy.core.spec import describe
from understudy.envs.suite import Suite, Task

OPTIONS = ("task", "start", "split")  # what `reset` understands


class WorldError(UnderstudyError):
    """A world was used in an order that it cannot follow, or broke its own contract."""


@dataclass(frozen=True, kw_only=True, eq=False)
class ExpertAction:
    """What a scripted expert would do now, and how far the task has come."""

    action: Tree
    progress: float  # rises as the task comes along; its scale is the world's own


class World(Closeable):
    """Something that is seen and acted on. A subclass says what it is (`step_spec`, `suite`) and writes four methods.

    Nothing is rendered unless `observe` is called: `step` looks after acting, `step_without_observation` does not.
    """

    step_spec: StepSpec
    suite: Suite
    version_packages: tuple[str, ...] = ("numpy",)  # packages whose versions change what it does
    deterministic: bool = True  # the same start, seed and actions give the same bits; False for what lives in real time
    hz: float | None = None  # the control rate that `step` keeps; None: it is as fast as it can

    _task: Task | None = None
    _seeds: np.random.Generator | None = None  # where seeds come from that nobody gave
    _num_steps = 0
    _state = "not reset"  # then "running", then "terminated" or "truncated"

    # --- what a subclass writes ---

    @abc.abstractmethod
    def begin(self, task: Task, start: int, rng: np.random.Generator) -> None:
        """Put the world into a start state of the task; the same task, start and seed give the same bits."""

    @abc.abstractmethod
    def advance(self, action: Tree) -> tuple[float, bool, bool, dict[str, Any]]:
        """Do one control step: reward, terminated, truncated (by the world itself), and an info with "success"."""

    @abc.abstractmethod
    def observe(self) -> Tree:
        """What is seen now, in arrays of the caller's own. Changes nothing, so it may be asked twice or never."""

    @abc.abstractmethod
    def close(self) -> None:
        """Let go of what the world holds; it is not used afterwards."""

    def expert_action(self, *, noise: float = 0.0, rng: np.random.Generator | None = None) -> ExpertAction:
        """What an expert would do now, for worlds that have one. Changes nothing. `noise` is the spread of what is
        added to speeds, drawn from `rng`, so that no two demonstrations are alike."""
        raise WorldError(
            f"{self._name}: it has no scripted expert; act with a device or a policy, or write {self._name}.expert_action"
        )

    def versions(self) -> dict[str, str]:
        """The versions of what the world stands on, for the fingerprint of a score."""
        found = {}
        for name in self.version_packages:
            with suppress(importlib.metadata.PackageNotFoundError):
                found[name] = importlib.metadata.version(name)
        return found

    # --- what everyone calls ---

    @property
    def has_expert(self) -> bool:
        """Whether `expert_action` was written."""
        return type(self).expert_action is not World.expert_action

    @property
    def task(self) -> Task:
        """The task of this episode; before the first, the first of the suite."""
        return self._task or self.suite.tasks[0]

    def choose(self, task: str) -> None:
        """Make a task that of the next episode."""
        if self._state == "running":
            raise WorldError(f"{self._name}: an episode is running; name the task in the options of reset")
        self._task = self.suite.task(task)

    def reset(
        self, *, seed: int | None = None, options: Mapping[str, Any] | None = None
    ) -> tuple[Tree, dict[str, Any]]:
        """Begin an episode. Options: "task" (stays as it was by default), "start", "split" ("train" by default).

        Without a start, one is drawn from the split. The info holds task, instruction, start, split and seed; given
        back as seed and options they begin the same episode again.
        """
        info = self.reset_without_observation(seed=seed, options=options)
        return self.observe(), info

    def reset_without_observation(
        self, *, seed: int | None = None, options: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        """As `reset`, without the observation."""
        chosen = _known(options or {})
        seed = self._next_seed(seed)
        task = self.suite.task(chosen["task"]) if chosen.get("task") is not None else self.task
        start, split = self._choose_start(task, chosen.get("start"), chosen.get("split"), seed)
        self._state = "not reset"  # should `begin` raise, there is no episode
        self._task, self._num_steps = task, 0
        self.begin(task, start, np.random.default_rng(seed))
        self._state = "running"
        return {"task": task.name, "instruction": task.instruction, "start": start, "split": split, "seed": seed}

    def step(self, action: Tree) -> tuple[Tree, float, bool, bool, dict[str, Any]]:
        """Act once and look: observation, reward, terminated, truncated, info."""
        reward, terminated, truncated, info = self.step_without_observation(action)
        return self.observe(), reward, terminated, truncated, info

    def step_without_observation(self, action: Tree) -> tuple[float, bool, bool, dict[str, Any]]:
        """Act once; for blocks of actions of which only the last one's outcome is looked at."""
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

    # --- stages of the above ---

    def _checked(self, action: Tree) -> Tree:
        flat = self.step_spec.action.check(action, "action")
        return trees.unflatten(trees.below(flat, "action"))

    def _refuse_step(self) -> None:
        if self._state == "not reset":
            raise WorldError(f"{self._name}: step was called before reset; call reset first")
        raise WorldError(
            f"{self._name}: the episode was {self._state} after {self._num_steps} steps and takes no more; call reset"
        )

    def _next_seed(self, seed: int | None) -> int:
        """The seed of this episode; one that is given also decides those that follow it."""
        if seed is not None:
            try:
                seed = operator.index(seed)
            except TypeError:
                raise WorldError(f"seed: expected a whole number or None, got {describe(seed)}; convert it") from None
            if not 0 <= seed < 2**63:
                raise WorldError(f"seed: expected a number from 0 to 2**63 - 1, got {seed}; choose another")
            self._seeds = np.random.default_rng([seed, 0])
            return seed
        if self._seeds is None:
            self._seeds = np.random.default_rng()
        return int(self._seeds.integers(2**31))

    def _choose_start(self, task: Task, start: Any, split: Any, seed: int) -> tuple[int, Split]:
        if start is not None:
            start = int(start) if isinstance(start, np.integer) else start
            found = self.suite.split_of(task, start)
            if split is not None and split != found:
                raise WorldError(
                    f"options: start {start} of task {task.name!r} is in split {found!r}, and {split!r} was asked for; "
                    f"leave one of the two out"
                )
            return start, found
        wanted: Split = "train" if split is None else split
        starts = self.suite.starts(task, wanted)
        if not starts:
            raise WorldError(
                f"options: task {task.name!r} has no starts in split {wanted!r}; "
                f"give it more starts, or name them in the suite's eval_starts"
            )
        # A stream of its own, so that a start drawn and the same start given leave `begin` the same random numbers.
        return starts[int(np.random.default_rng([seed, 1]).integers(len(starts)))], wanted

    @property
    def _name(self) -> str:
        return type(self).__name__


def _known(options: Mapping[str, Any]) -> Mapping[str, Any]:
    for name in options:
        if name not in OPTIONS:
            near = difflib.get_close_matches(str(name), OPTIONS, 1)
            advice = f"did you mean {near[0]!r}?" if near else f"reset knows {', '.join(OPTIONS)}"
            raise WorldError(f"options: no option {name!r}; {advice}")
    return options


def as_gymnasium(world: World) -> Any:
    """The world as a gymnasium.Env, with spaces made from its specs."""
    try:
        gymnasium = importlib.import_module("gymnasium")
    except ImportError as error:
        raise WorldError(f"gymnasium is not installed ({error}); run `pip install 'understudy[gym]'`") from error

    class GymnasiumWorld(gymnasium.Env):  # type: ignore[misc, name-defined]  # a class that may not be there
        """OperatorInput every call on to the world."""

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
        raise WorldError(f"{path}: expected a fixed shape, got {leaf}; gymnasium has no space for it, so leave it out")
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
