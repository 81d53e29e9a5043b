"""Scene: one task of LIBERO, moved exactly as LIBERO moves it, without the work that nobody looks at.

LIBERO solves each of its 25 simulator steps three times, measures everything after each, and renders both cameras after
the last. Here positions and contacts are worked out once for the three, nothing is measured, and images are drawn
when they are asked for. States are LIBERO's own, bit for bit.
"""

from __future__ import annotations

import copy
import importlib
import importlib.util
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np

from understudy.envs.simulators.camera import Cameras
from understudy.envs.simulators.simplify import Simplifier
from understudy.envs.world import WorldError

SETTLE_STEPS = 10  # things begin some centimetres above where they stand; everyone lets them fall for ten steps
SETTLE_ACTION = np.array([0.0, 0.0, 0.0, 0.0, 0.0, 0.0, -1.0])  # stay, with the gripper open
CAMERAS = {"agentview": "agentview", "wrist": "robot0_eye_in_hand"}  # our names: LIBERO's
DRAWN_GROUPS = (1, 2)  # of geoms; 0 is what collides
MAX_TRIES = 100  # to find places for everything; one nearly always does

STATE_NAMES = (
    *(f"joint_{number}" for number in range(1, 8)),
    "x",
    "y",
    "z",
    "qx",
    "qy",
    "qz",
    "qw",
    "finger_1",
    "finger_2",
)


class SceneCameras(Cameras):
    """LIBERO's two cameras, which draw every face: the simplifier has left those that count."""

    def __init__(self, model: Any, size: int):
        super().__init__(model, list(CAMERAS.values()), size, geom_groups=DRAWN_GROUPS)
        self._context.free()  # it thins meshes by a grid, which tears those that are thin already
        drawn = copy.copy(model)
        drawn.vis.quality.offsamples = drawn.vis.quality.shadowsize = 0
        drawn.vis.global_.offwidth = drawn.vis.global_.offheight = size
        self._context = self._mujoco.MjrContext(drawn, self._mujoco.mjtFontScale.mjFONTSCALE_50)
        self._mujoco.mjr_setBuffer(self._mujoco.mjtFramebuffer.mjFB_OFFSCREEN, self._context)


class Scene:
    """A task that is built once and begun many times."""

    def __init__(self, bddl_file: Path, starts: np.ndarray[Any, Any], *, size: int, simplifier: Simplifier):
        """`starts` are LIBERO's own states, [starts, 1 + positions + velocities]; `size` is the side of images."""
        self._mujoco = importlib.import_module("mujoco")
        self._starts = starts
        self._size = size
        self._cameras: Cameras | None = None
        self._env = _build(bddl_file, simplifier)
        self._model, self._data = self._env.sim.model._model, self._env.sim.data._data

    def begin(self, start: int) -> None:
        """Put everything where this start state has it, and let it settle."""
        self._place(start)
        for robot in self._env.robots:
            robot.gripper.current_action = np.zeros(robot.gripper.dof)  # a reset forgets to
        self._env.sim.set_state_from_flattened(self._starts[start])
        self._env.sim.forward()
        self._env._check_success()
        self._env._post_process()
        self._data.qacc_warmstart[:] = 0.0  # the solver begins where it stopped, and that was the last episode
        for _ in range(SETTLE_STEPS):
            self.step(SETTLE_ACTION)

    def step(self, action: np.ndarray[Any, Any]) -> bool:
        """Do one control step of [7] float64; whether the task is done."""
        env, model, data, mujoco = self._env, self._model, self._data, self._mujoco

        def solve_again() -> None:
            # The solver begins with its last answer, so solving twice gives other bits than solving once. What comes
            # before it, positions, contacts and velocities, is the same each time.
            mujoco.mj_forwardSkip(model, data, mujoco.mjtStage.mjSTAGE_VEL, 1)

        env.sim.forward = solve_again  # the controller calls it
        try:
            for substep in range(int(env.control_timestep / env.model_timestep)):
                mujoco.mj_step1(model, data)
                solve_again()
                env._pre_action(action, substep == 0)
                mujoco.mj_step2(model, data)
        finally:
            del env.sim.forward
        success = bool(env._check_success())
        env._post_process()  # a stove that is on glows
        return success

    def state(self) -> np.ndarray[Any, Any]:  # [16] float32
        """The numbers of STATE_NAMES: radians; metres; a quaternion, w last; metres."""
        robot, data = self._env.robots[0], self._data
        w, x, y, z = self._env.sim.data.get_body_xquat(robot.robot_model.eef_name)
        joints, fingers = data.qpos[robot._ref_joint_pos_indexes], data.qpos[robot._ref_gripper_joint_pos_indexes]
        return np.array([*joints, *data.site_xpos[robot.eef_site_id], x, y, z, w, *fingers], np.float32)

    def physics(self) -> np.ndarray[Any, Any]:
        """Positions and velocities of all there is, float64."""
        return np.concatenate([self._data.qpos, self._data.qvel])

    def render(self) -> dict[str, np.ndarray[Any, Any]]:
        """What both cameras see, each [size, size, 3] uint8, the first row on top."""
        if self._cameras is None:
            self._cameras = SceneCameras(self._model, self._size)
        images = self._cameras.render(self._data)
        return {name: images[theirs] for name, theirs in CAMERAS.items()}

    def close(self) -> None:
        if self._cameras is not None:
            self._cameras.close()
        self._model = self._data = None
        self._env.close()

    def _place(self, start: int) -> None:
        """Reset. LIBERO draws places for cabinets and stoves, which no start holds; here the start decides them."""
        failure = importlib.import_module("robosuite.utils.errors").RandomizationError
        drawn = np.random.get_state()  # noqa: NPY002 (LIBERO draws from it)
        np.random.seed(start)  # noqa: NPY002
        try:
            for _ in range(MAX_TRIES):
                try:
                    self._env.reset()
                except failure:
                    continue
                return
        finally:
            np.random.set_state(drawn)  # noqa: NPY002
        raise WorldError(f"start {start}: LIBERO found no place for everything in {MAX_TRIES} tries; choose another")


def prepare() -> None:
    """Have LIBERO and robosuite import without questions, warnings, or files outside their virtual environment."""
    os.environ["LIBERO_CONFIG_PATH"] = os.devnull  # its own files, whatever another LIBERO was told
    os.environ.setdefault("MPLCONFIGDIR", str(Path(sys.prefix) / "matplotlib"))
    if "robosuite.macros" in sys.modules or importlib.util.find_spec("robosuite") is None:
        return
    # robosuite logs to a file in /tmp that belongs to whoever was first, unless its settings say otherwise when it is
    # imported; they can only be reached before that if they are loaded by hand.
    origin = importlib.util.find_spec("robosuite").origin  # type: ignore[union-attr]  # just seen
    spec = importlib.util.spec_from_file_location("robosuite.macros", Path(str(origin)).parent / "macros.py")
    assert spec is not None
    assert spec.loader is not None
    macros = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(macros)
    macros.FILE_LOGGING_LEVEL, macros.CONSOLE_LOGGING_LEVEL = None, "ERROR"  # type: ignore[attr-defined]
    sys.modules["robosuite.macros"] = macros


def _build(bddl_file: Path, simplifier: Simplifier) -> Any:
    """LIBERO's environment of a task, as its own wrapper makes it, without renderer and measurements."""
    envs = importlib.import_module("libero.libero.envs")
    robosuite = importlib.import_module("robosuite")
    simulation = importlib.import_module("robosuite.utils.binding_utils").MjSim
    info = importlib.import_module("libero.libero.envs.bddl_utils").get_problem_info(str(bddl_file))
    problem: Any = envs.TASK_MAPPING[info["problem_name"]]

    class Simplified(problem):  # type: ignore[misc]  # known when it runs
        """The same problem, compiled by the simplifier."""

        def _initialize_sim(self, xml_string: str | None = None) -> None:
            self.sim = simulation(simplifier.compile(xml_string or self.model.get_xml()))
            self.sim.forward()
            self.initialize_time(self.control_freq)

        def _setup_observables(self) -> dict[str, Any]:
            return {}

    Simplified.__name__ = problem.__name__  # LIBERO looks whether it fits the task's file
    return Simplified(
        str(bddl_file),
        robots=["Panda"],
        gripper_types="default",
        initialization_noise=None,
        controller_configs=robosuite.load_controller_config(default_controller="OSC_POSE"),
        use_camera_obs=False,
        has_offscreen_renderer=False,
        control_freq=20,
        hard_reset=False,
    )
