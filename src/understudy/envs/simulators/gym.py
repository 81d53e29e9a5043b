"""GymWorld: a Gymnasium environment as a world: an id that gymnasium can make, or an environment of your own.

world = GymWorld("FrozenLake-v1", options={"is_slippery": False}, num_starts=1)
world = GymWorld(MyEnv(), max_steps=50, expert=lambda observation: my_action(observation), simulated=True)

Start number n is `reset(seed=n)`. Later randomness follows the seed of the episode in environments that draw
from their `np_random`.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import numpy as np

from understudy.core import AnyTree, ArraySpec, Spec, StepSpec
from understudy.core import tree as trees
from understudy.core.spec import Bound, describe
from understudy.envs.suite import Suite, Task
from understudy.envs.world import ExpertAction, World, WorldError

SUCCESS_KEYS = ("success", "is_success", "succeed")
MAX_SIZE = 1024
OWN_MODULES = ("gymnasium.", "gymnasium_robotics.")  # their environments are simulations


Expert: TypeAlias = Callable[[Any], Any]  # the environment's own observation -> an action of its action space


class GymWorld(World):
    """A world with one task, named by the id. An observation that is not a dict is called "state"."""

    version_packages = ("numpy", "gymnasium", "mujoco")  # mujoco only matters for its environments

    def __init__(
        self,
        id: Any,
        *,
        name: str | None = None,
        options: Mapping[str, Any] | None = None,
        instruction: str | None = None,
        num_starts: int = 500,
        max_steps: int | None = None,
        success_return: float | None = None,
        size: int = 0,
        simulated: bool | None = None,
        expert: Expert | None = None,
        progress: Callable[[Any], float] | None = None,
    ):
        """`id` is an id or a gymnasium.Env; `options` are passed to gymnasium.make. `name` is that of the task.
        `max_steps` and `success_return`, the return from which an episode counts as a success, default to those of the
        id. `size` is the side of an "image" in pixels, 0 for none. `simulated` says that nothing real moves; by default
        only gymnasium's own environments count as simulated. `expert` chooses actions from the environment's own
        observations; `progress` returns a number that rises during the task, from which a scripted human sees that the
        policy stalls (default: the return so far)."""
        if type(size) is not int or not 0 <= size <= MAX_SIZE:
            raise WorldError(f"size: expected 0 (no image) to {MAX_SIZE} pixels, got {describe(size)}")
        gymnasium = _import_gymnasium()
        if isinstance(id, str):
            self._env = _make(gymnasium, id, {**(options or {}), **({"render_mode": "rgb_array"} if size else {})})
        else:
            self._env = _given(gymnasium, id, options, size)
        self._size = size
        self._expert, self._progress = expert, progress
        try:
            made = self._env.unwrapped.spec
            registered = gymnasium.spec(made.id) if isinstance(id, str) else self._env.spec
            name = name or (id if isinstance(id, str) else made.id if made else type(self._env.unwrapped).__name__)
            limit = registered.max_episode_steps if max_steps is None and registered is not None else max_steps
            if limit is None:
                raise WorldError(f"{name}: has no step limit; pass max_steps, such as 200")
            task = Task(name=name, instruction=instruction or name, num_starts=num_starts, max_steps=limit)
            self.suite = Suite(name="gym", tasks=(task,))
            own = registered is not None and str(registered.entry_point).startswith(OWN_MODULES)
            self.simulated = own if simulated is None else simulated
            self._seen_spec = _spec(gymnasium.spaces, self._env.observation_space, "observation", bounds=False)
            action = _spec(gymnasium.spaces, self._env.action_space, "action", bounds=True)
        except BaseException:
            self._env.close()
            raise
        self._uses_info = success_return is None
        self._seen: Any = None
        self._return = 0.0
        self._info_has_success = False  # in this episode
        threshold = None if registered is None else registered.reward_threshold
        self._success_return = threshold if success_return is None else success_return
        self._to_action = _to_action(gymnasium.spaces, self._env.action_space)
        self._is_bare = isinstance(self._seen_spec, ArraySpec)
        seen = {"state": self._seen_spec} if self._is_bare else self._seen_spec
        image = {"image": ArraySpec(shape=(size, size, 3), dtype="uint8")} if size else {}
        self.step_spec = StepSpec(observation=Spec({**seen, **image}), action=Spec(action))

    def begin(self, task: Task, start: int, rng: np.random.Generator) -> None:
        self._seen = self._env.reset(seed=start)[0]
        self._env.unwrapped.np_random = rng
        self._return = 0.0
        self._info_has_success = False

    def advance(self, action: AnyTree) -> tuple[float, bool, bool, dict[str, Any]]:
        self._seen, reward, terminated, truncated, info = self._env.step(self._to_action(action))
        self._return += float(reward)
        last = terminated or truncated or self._num_steps + 1 >= self.task.max_steps
        return float(reward), bool(terminated), bool(truncated), {"success": self._succeeded(info, last)}

    def observe(self) -> AnyTree:
        seen = _arrays(self._seen, self._seen_spec, "observation")
        observation = {"state": seen} if self._is_bare else seen
        if self._size:
            observation["image"] = scaled(np.asarray(self._env.render()), self._size)
        return observation

    @property
    def has_expert(self) -> bool:
        return self._expert is not None

    def expert_action(self, *, noise: float = 0.0, rng: np.random.Generator | None = None) -> ExpertAction:
        """What the given expert does. Noise is scaled by half the range of a float; a whole number is replaced by a
        random one with probability `noise`."""
        if self._expert is None:
            raise WorldError(f"{self.task.name}: has no scripted expert; pass one to GymWorld as expert=")
        action = _arrays(self._expert(self._seen), self.step_spec.action.tree, "action of the expert")
        if noise and rng is not None:
            action = trees.map_with_paths(
                lambda path, leaf: _noisy(leaf, self.step_spec.action.flat[path], noise, rng), action
            )
        progress = self._return if self._progress is None else self._progress(self._seen)
        return ExpertAction(action=action, progress=float(progress))

    def close(self) -> None:
        self._env.close()

    def _succeeded(self, info: Mapping[str, Any], last: bool) -> bool:
        """Success as the info of this episode says; if it never does, whether the final return is high enough."""
        if self._uses_info:
            success = next((info[key] for key in SUCCESS_KEYS if key in info), None)
            if success is not None:
                self._info_has_success = True
                return bool(success)
        if not last or self._info_has_success:
            return False
        if self._success_return is None:
            raise WorldError(
                f"{self.task.name}: its info has none of {', '.join(SUCCESS_KEYS)}, and its id has no reward "
                f"threshold; pass success_return (this episode's return was {self._return:g})"
            )
        return bool(self._return >= self._success_return)


def _import_gymnasium() -> Any:
    try:
        return importlib.import_module("gymnasium")
    except ImportError as error:
        raise WorldError(
            f"gymnasium is not installed ({error}); run `pip install 'understudy-robotics[gym]'`"
        ) from error


def _make(gymnasium: Any, id: str, options: Mapping[str, Any]) -> Any:
    """Make the environment without a time limit, because World counts the steps."""
    try:
        return gymnasium.make(id, max_episode_steps=-1, disable_env_checker=True, **options)
    except (gymnasium.error.Error, ImportError, TypeError) as error:
        raise WorldError(f"gym: could not make {id!r} with {dict(options)!r} ({error})") from error


def _given(gymnasium: Any, env: Any, options: Mapping[str, Any] | None, size: int) -> Any:
    """Check an environment that the user has made."""
    if not isinstance(env, gymnasium.Env):
        raise WorldError(f"id: expected an id or a gymnasium.Env, got {describe(env)}")
    if options:
        raise WorldError("options: they are for gymnasium.make; give them to your environment itself")
    if size and env.render_mode != "rgb_array":
        raise WorldError(f"size: an image needs render_mode='rgb_array', got {env.render_mode!r}; make it with that")
    return env


def _noisy(leaf: Any, spec: ArraySpec, noise: float, rng: np.random.Generator) -> Any:
    """An action of the expert with noise, within its bounds."""
    if isinstance(leaf, str) or leaf.dtype.kind == "b":
        return leaf
    low, high = spec.limits
    if leaf.dtype.kind == "f":
        half = np.where(np.isfinite(high - low), (high - low) / 2, 1.0)
        return np.clip(leaf + noise * half * rng.normal(size=leaf.shape), low, high).astype(leaf.dtype)
    if not np.isfinite(high - low).all():
        return leaf
    other = rng.integers(
        np.broadcast_to(low, leaf.shape).astype(int), np.broadcast_to(high, leaf.shape).astype(int) + 1
    )
    return np.where(rng.random(leaf.shape) < noise, other, leaf).astype(leaf.dtype)


# --- spaces ---


def _spec(spaces: Any, space: Any, path: str, *, bounds: bool) -> AnyTree:
    """ArraySpecs for a space; a tuple becomes a dict with the keys "0", "1", ..."""
    if isinstance(space, spaces.Dict | spaces.Tuple):
        return {name: _spec(spaces, child, trees.join(path, name), bounds=bounds) for name, child in _children(space)}
    if isinstance(space, spaces.Text):
        return ArraySpec(shape=(), dtype="str")
    low: Any
    high: Any
    if isinstance(space, spaces.Box):
        low, high = space.low, space.high
    elif isinstance(space, spaces.Discrete):
        low, high = space.start, space.start + space.n - 1
    elif isinstance(space, spaces.MultiDiscrete):
        low, high = space.start, space.start + space.nvec - 1
    elif isinstance(space, spaces.MultiBinary):
        low, high = 0, 1
    else:
        raise WorldError(
            f"{path}: expected a Box, Discrete, MultiDiscrete, MultiBinary, Text, Dict or Tuple space, got {space}; "
            f"register the environment with a wrapper that makes it one of them"
        )
    shape, dtype = space.shape or (), str(space.dtype)
    if not bounds:  # environments do not keep the bounds of their observation spaces
        return ArraySpec(shape=shape, dtype=dtype)
    return ArraySpec(shape=shape, dtype=dtype, low=_bound(low, shape, np.max), high=_bound(high, shape, np.min))


def _children(space: Any) -> list[tuple[str, Any]]:
    inner = space.spaces
    return list(inner.items()) if isinstance(inner, Mapping) else [(str(i), child) for i, child in enumerate(inner)]


def _bound(bound: Any, shape: tuple[int, ...], tightest: Callable[..., Any]) -> Bound:
    """One number, or one per element of the last dimension, as a spec allows; the tightest of several."""
    array = np.asarray(bound, np.float64)
    if array.ndim > 1:
        array = tightest(array.reshape(-1, shape[-1]), axis=0)
    if array.ndim and (array == array[0]).all():
        array = array[0]
    if not np.isfinite(array).any():
        return None
    return tuple(array.tolist()) if array.ndim else float(array)


def _arrays(value: Any, spec: AnyTree, path: str) -> AnyTree:
    """Convert an observation or an action to the spec of its space, in new arrays."""
    if isinstance(spec, ArraySpec):
        if spec.dtype == "str":
            return str(value)
        array = np.array(value, spec.numpy_dtype)
        if array.shape != spec.shape:
            raise WorldError(
                f"{path}: expected {list(spec.shape)}, as its space says, got {list(array.shape)}; "
                f"change the space or what is returned"
            )
        return array
    children = value if isinstance(value, Mapping) else {str(index): child for index, child in enumerate(value)}
    if not spec.keys() <= children.keys():
        raise WorldError(
            f"{path}: expected {', '.join(spec)}, as its space says, got {', '.join(children)}; "
            f"change the space or what is returned"
        )
    return {name: _arrays(children[name], child, trees.join(path, name)) for name, child in spec.items()}


def _to_action(spaces: Any, space: Any) -> Callable[[AnyTree], Any]:
    """A function that converts an action of the spec to one of the space."""
    if isinstance(space, spaces.Discrete):
        return int
    if isinstance(space, spaces.Tuple | spaces.Dict):
        inner = {name: _to_action(spaces, child) for name, child in _children(space)}
        if isinstance(space, spaces.Tuple):
            return lambda action: tuple(convert(action[name]) for name, convert in inner.items())
        return lambda action: {name: convert(action[name]) for name, convert in inner.items()}
    return lambda action: action if isinstance(action, str) else np.array(action)  # a copy


# --- images ---


def scaled(image: np.ndarray[Any, Any], size: int) -> np.ndarray[Any, Any]:  # uint8 [h, w, 3] -> [size, size, 3]
    """Resize to a square: each new pixel is the mean of those that it covers, or the nearest one."""
    means: np.ndarray[Any, Any] = image.astype(np.float64)
    for axis in (0, 1):
        edges = np.arange(size) * image.shape[axis] // size
        counts = np.maximum(np.diff([*edges, image.shape[axis]]), 1)
        means = np.add.reduceat(means, edges, axis=axis) / np.expand_dims(counts, (1, 2) if axis == 0 else (0, 2))
    square: np.ndarray[Any, Any] = np.rint(means).astype(np.uint8)
    return square
