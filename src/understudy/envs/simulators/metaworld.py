"""MetaworldWorld: the fifty tasks of Metaworld, one Sawyer arm over a table, with Metaworld's own experts.

An action is four numbers from -1 to 1: speeds of the hand along x, y, z (1 cm per simulator step), and grip (positive
closes). The reward is 1 in the step that succeeds, which ends the episode, and 0 otherwise.
"""

from __future__ import annotations

import importlib
import warnings
import zlib
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from understudy.core import ArraySpec, Spec, StepSpec, Tree
from understudy.core.spec import describe
from understudy.envs.simulators.camera import Cameras, check_size
from understudy.envs.suite import Suite, SuiteError, Task
from understudy.envs.world import ExpertAction, World, WorldError

NUM_STARTS = 500  # of each task; the last hundred are for evaluation
SIMULATOR_STEPS = 500  # of an episode, as Metaworld has it
MAX_ALIVE = 10  # simulators that are kept open; the least recently used one is closed first

# name: instruction
TASKS: dict[str, str] = {
    "assembly-v3": "pick up the ring by its handle and put it over the peg",
    "basketball-v3": "put the basketball into the basket",
    "bin-picking-v3": "pick up the green block and put it into the blue bin",
    "box-close-v3": "put the lid on the box",
    "button-press-topdown-v3": "press the button from above",
    "button-press-topdown-wall-v3": "reach over the wall and press the button from above",
    "button-press-v3": "press the button from the front",
    "button-press-wall-v3": "reach over the wall and press the button from the front",
    "coffee-button-v3": "press the button of the coffee machine",
    "coffee-pull-v3": "pull the mug away from the coffee machine",
    "coffee-push-v3": "push the mug under the coffee machine",
    "dial-turn-v3": "turn the dial",
    "disassemble-v3": "lift the ring off the peg by its handle",
    "door-close-v3": "close the door",
    "door-lock-v3": "lock the door",
    "door-open-v3": "open the door",
    "door-unlock-v3": "unlock the door",
    "drawer-close-v3": "close the drawer",
    "drawer-open-v3": "open the drawer",
    "faucet-close-v3": "close the faucet",
    "faucet-open-v3": "open the faucet",
    "hammer-v3": "pick up the hammer and drive the nail in",
    "hand-insert-v3": "put the gripper into the hole in the table",
    "handle-press-side-v3": "press the handle down from the side",
    "handle-press-v3": "press the handle down",
    "handle-pull-side-v3": "pull the handle up from the side",
    "handle-pull-v3": "pull the handle up",
    "lever-pull-v3": "pull the lever up",
    "peg-insert-side-v3": "pick up the green peg and put it into the hole of the box",
    "peg-unplug-side-v3": "pull the peg out of the box",
    "pick-out-of-hole-v3": "lift the puck out of the hole and bring it to the goal",
    "pick-place-v3": "pick up the puck and bring it to the goal",
    "pick-place-wall-v3": "pick up the puck and bring it over the wall to the goal",
    "plate-slide-back-side-v3": "slide the black disc sideways out of the net",
    "plate-slide-back-v3": "slide the black disc back out of the net",
    "plate-slide-side-v3": "slide the black disc sideways into the net",
    "plate-slide-v3": "slide the black disc forward into the net",
    "push-back-v3": "pull the puck back to the goal",
    "push-v3": "push the puck to the goal",
    "push-wall-v3": "push the puck around the wall to the goal",
    "reach-v3": "move the gripper to the goal",
    "reach-wall-v3": "move the gripper over the wall to the goal",
    "shelf-place-v3": "pick up the blue block and put it on the shelf",
    "soccer-v3": "push the ball into the goal",
    "stick-pull-v3": "pick up the blue stick and pull the thermos with it",
    "stick-push-v3": "pick up the blue stick and push the thermos with it",
    "sweep-into-v3": "sweep the puck into the hole in the table",
    "sweep-v3": "sweep the puck off the table",
    "window-close-v3": "close the window",
    "window-open-v3": "open the window",
}

CAMERAS = ("topview", "corner", "corner2", "corner3", "corner4", "behindGripper", "gripperPOV")
UPSIDE_DOWN = ("corner", "corner2", "corner3", "corner4")  # as mounted; their images are rotated

_SEEN = (
    "hand_x",
    "hand_y",
    "hand_z",
    "opening",
    *(f"{thing}_{name}" for thing in ("object", "other") for name in ("x", "y", "z", "qw", "qx", "qy", "qz")),
)
STATE_NAMES = (*_SEEN, *(f"previous_{name}" for name in _SEEN), "goal_x", "goal_y", "goal_z")
HAND_NAMES = STATE_NAMES[:4]  # of the arm only


@dataclass(kw_only=True)
class Simulator:
    """One task: Metaworld's environment and expert, and the cameras once an image was rendered."""

    env: Any
    policy: Any
    cameras: Cameras | None = None

    def close(self) -> None:
        if self.cameras is not None:
            self.cameras.close()
        self.env.close()


class MetaworldWorld(World):
    """Metaworld 3, its tasks as one suite. Needs metaworld; MUJOCO_GL=egl and LP_NUM_THREADS=1 for images."""

    version_packages = ("numpy", "mujoco", "metaworld")
    simulated = True
    state_names: tuple[str, ...]  # metres; quaternions w first; opening is 0 to 1; zero where there is no second object
    camera_names: tuple[str, ...]

    def __init__(
        self,
        *,
        tasks: Sequence[str] | None = None,
        cameras: Sequence[str] = ("corner4", "gripperPOV"),
        size: int = 128,
        action_repeat: int = 1,
        max_steps: int | None = None,
        hide_goal: bool = False,
        state: Literal["all", "hand"] = "all",
    ):
        """`tasks`: some of the fifty. `cameras`: some of CAMERAS; without any, only the state is observed. `size`: side
        of the images in pixels. `action_repeat`: simulator steps per step. `max_steps`: by default as many as make 500
        simulator steps. `hide_goal`: the goal is zero in the state and has no marker in the images. `state`: "hand" is
        the state of the hand alone, as on a real arm; everything else must be seen in the images."""
        for name, value in (("action_repeat", action_repeat), ("max_steps", max_steps)):
            if value is not None and (type(value) is not int or value < 1):
                raise WorldError(f"{name}: expected a whole number from 1, got {describe(value)}")
        check_size(size)
        if state not in ("all", "hand"):
            raise WorldError(f"state: expected 'all' or 'hand', got {describe(state)}")
        self.state_names = STATE_NAMES if state == "all" else HAND_NAMES
        self._repeat = action_repeat
        self._hide_goal = hide_goal
        self._size = size
        self._simulators: OrderedDict[str, Simulator] = OrderedDict()
        self._current: Simulator | None = None
        self._numbers = np.zeros(len(STATE_NAMES))  # Metaworld's observation
        self._progress = 0.0
        self.suite = _suite(tasks, max_steps or max(1, SIMULATOR_STEPS // action_repeat))
        self.camera_names = _cameras(cameras)
        fields = {name: ArraySpec(shape=(size, size, 3), dtype="uint8") for name in self.camera_names}
        fields["state"] = ArraySpec(shape=(len(self.state_names),), dtype="float32")
        self.step_spec = StepSpec(
            observation=Spec(fields), action=Spec(ArraySpec(shape=(4,), dtype="float32", low=-1.0, high=1.0))
        )
        self._library = _import("metaworld.env_dict")
        self._policies = _import("metaworld.policies").ENV_POLICY_MAP

    def begin(self, task: Task, start: int, rng: np.random.Generator) -> None:
        """The start index alone determines the state; `rng` is not used."""
        del rng
        simulator = self._simulator(task)
        simulator.env.seed(zlib.crc32(f"{task.name}/{start}".encode()))
        self._numbers = simulator.env.reset()[0]
        self._progress = 0.0
        self._current = simulator

    def advance(self, action: Tree) -> tuple[float, bool, bool, dict[str, Any]]:
        assert self._current is not None
        hand, expert = self._numbers[:3], self._ask_expert(self._current)[:3]
        success, dense_reward = False, 0.0
        for _ in range(self._repeat):
            self._numbers, dense_reward, _, _, info = self._current.env.step(action)
            success = bool(info["success"])
            if success:
                break
        self._progress += _along(expert, self._numbers[:3] - hand)
        return float(success), success, False, {"success": success, "dense_reward": float(dense_reward)}

    def observe(self) -> Tree:
        assert self._current is not None
        state = self._numbers.astype(np.float32)
        if self._hide_goal:
            state[-3:] = 0.0
        return {**self._images(self._current), "state": state[: len(self.state_names)]}

    def expert_action(self, *, noise: float = 0.0, rng: np.random.Generator | None = None) -> ExpertAction:
        """The action of Metaworld's own expert. It uses the true state, goal included, and has no memory.

        Progress is the distance in metres that the hand moved in the expert's direction.
        """
        if self._current is None:
            raise WorldError("expert_action: there is no episode; call reset first")
        action = self._ask_expert(self._current)
        if noise:
            if rng is None:
                raise WorldError("rng: noise needs a random generator, got None; pass np.random.default_rng(seed)")
            action[:3] = np.clip(action[:3] + noise * rng.normal(size=3), -1.0, 1.0)
        return ExpertAction(action=action, progress=self._progress)

    def close(self) -> None:
        while self._simulators:
            self._simulators.popitem()[1].close()
        self._current = None

    def _ask_expert(self, simulator: Simulator) -> np.ndarray[Any, Any]:  # [4] float32
        """The expert's action in the current state, clipped."""
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Constant")  # its warning that the action was clipped
            action = simulator.policy.get_action(self._numbers.copy())  # some experts write into their argument
        return np.clip(np.asarray(action, np.float32), -1.0, 1.0)

    def _simulator(self, task: Task) -> Simulator:
        """The task's simulator, created at first use (about 0.3 s and 25 MB)."""
        found = self._simulators.pop(task.name, None)
        if found is None:
            if len(self._simulators) >= MAX_ALIVE:
                self._simulators.popitem(last=False)[1].close()
            env = self._library.ALL_V3_ENVIRONMENTS_GOAL_OBSERVABLE[f"{task.name}-goal-observable"](seed=0)
            env.seeded_rand_vec, env._freeze_rand_vec = True, False  # each reset draws from its seed
            env.max_path_length = task.max_steps * self._repeat
            found = Simulator(env=env, policy=self._policies[task.name]())
        self._simulators[task.name] = found
        return found

    def _images(self, simulator: Simulator) -> dict[str, np.ndarray[Any, Any]]:
        if not self.camera_names:
            return {}
        env = simulator.env
        if simulator.cameras is None:
            simulator.cameras = Cameras(env.model, self.camera_names, self._size, sites=not self._hide_goal)
        with _markers_in_place(env):
            images = simulator.cameras.render(env.data)
        return {
            name: np.ascontiguousarray(image[::-1, ::-1]) if name in UPSIDE_DOWN else image
            for name, image in images.items()
        }


def _along(direction: np.ndarray[Any, Any], motion: np.ndarray[Any, Any]) -> float:  # [3], [3]
    """Length of a motion along a direction; 0 if the direction is zero."""
    return float(motion @ direction) / max(float(np.linalg.norm(direction)), 1e-9)


@contextmanager
def _markers_in_place(env: Any) -> Iterator[None]:
    """Move the goal's marker to the goal while an image is rendered: Metaworld leaves it elsewhere in the first image
    of most tasks, and in all images of some."""
    positions = env.data.site_xpos
    before = positions.copy()
    for name, position in env._target_site_config:
        env.data.site(name).xpos[:] = position[:3]
    try:
        yield
    finally:
        positions[:] = before


def _import(module: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise WorldError(
            f"metaworld: is not installed ({error}); run `understudy env setup metaworld` and open "
            f"'metaworld:push-v3', or `pip install metaworld==3.1.1 mujoco==3.3.0 packaging`"
        ) from error


def _suite(tasks: Sequence[str] | None, max_steps: int) -> Suite:
    every = Suite(
        name="metaworld",
        tasks=tuple(
            Task(name=name, instruction=instruction, num_starts=NUM_STARTS, max_steps=max_steps)
            for name, instruction in TASKS.items()
        ),
    )
    if tasks is None:
        return every
    if isinstance(tasks, str):
        raise SuiteError(f"tasks: expected a list of names, got {describe(tasks)}; put it into a list")
    return Suite(name=every.name, tasks=tuple(every.task(name) for name in tasks))


def _cameras(names: Sequence[str]) -> tuple[str, ...]:
    if isinstance(names, str) or not all(name in CAMERAS for name in names) or len(set(names)) < len(names):
        raise WorldError(f"cameras: expected a list with some of {', '.join(CAMERAS)}, got {describe(names)}")
    return tuple(names)
