"""Scene: one task of LIBERO with bit-identical physics, without computing what is not observed.

LIBERO solves each of its 25 simulator steps three times, measures everything after each, and renders both cameras after
the last. Here positions and contacts are computed once for the three, nothing is measured, and images are rendered only
on request. States are bit for bit those of LIBERO.

A stock scene also observes what LIBERO does, bit for bit: whole meshes and textures, rendered as robosuite renders
them, at the simulator step at which robosuite measures, which is not the last one of a control step.
"""

from __future__ import annotations

import copy
import importlib
import importlib.util
import math
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from understudy.envs.simulators.camera import Cameras
from understudy.envs.simulators.simplify_model import Simplifier
from understudy.envs.world import WorldError

SETTLE_STEPS = 10  # objects start some centimetres too high; published evaluations let them fall for ten steps
SETTLE_ACTION = np.array([0.0, 0.0, 0.0, 0.0, 0.0, 0.0, -1.0])  # stay, with the gripper open
CAMERAS = {"agentview": "agentview", "wrist": "robot0_eye_in_hand"}  # our names: LIBERO's
DRAWN_GROUPS = (1, 2)  # of geoms; group 0 is collision geometry
MAX_TRIES = 100  # to place all objects; the first nearly always succeeds

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


AXIS_ANGLE_NAMES = ("x", "y", "z", "ax", "ay", "az", "finger_1", "finger_2")


class SceneCameras(Cameras):
    """LIBERO's two cameras, which render every face, because the simplifier has already removed the others."""

    def __init__(self, model: Any, size: int):
        super().__init__(model, list(CAMERAS.values()), size, geom_groups=DRAWN_GROUPS)
        self._context.free()  # it reduces meshes by a grid, which tears those that are already reduced
        drawn = copy.copy(model)
        drawn.vis.quality.offsamples = drawn.vis.quality.shadowsize = 0
        drawn.vis.global_.offwidth = drawn.vis.global_.offheight = size
        self._context = self._mujoco.MjrContext(drawn, self._mujoco.mjtFontScale.mjFONTSCALE_50)
        self._mujoco.mjr_setBuffer(self._mujoco.mjtFramebuffer.mjFB_OFFSCREEN, self._context)


class StockCameras(Cameras):
    """LIBERO's two cameras with shadows, reflections and anti-aliasing, as robosuite renders them."""

    def __init__(self, model: Any, size: int):
        super().__init__(model, list(CAMERAS.values()), size, geom_groups=DRAWN_GROUPS)
        self._context.free()
        for flag in ("mjRND_SHADOW", "mjRND_REFLECTION"):
            self._scene.flags[getattr(self._mujoco.mjtRndFlag, flag)] = 1
        drawn = copy.copy(model)
        drawn.vis.global_.offwidth = drawn.vis.global_.offheight = size
        self._context = self._mujoco.MjrContext(drawn, self._mujoco.mjtFontScale.mjFONTSCALE_150)
        self._mujoco.mjr_setBuffer(self._mujoco.mjtFramebuffer.mjFB_OFFSCREEN, self._context)


class StockSample:
    """What robosuite would have measured last: a copy of the simulation, and the colours of sites at that moment.

    robosuite counts simulator steps up to a control step and measures at the first step of each such period. A reset
    and a start state count as one step each, so that the period begins shortly before the end of a control step.
    """

    def __init__(self, model: Any, data: Any, *, model_timestep: float, control_timestep: float):
        self._model, self._live = model, data
        self._model_timestep, self._control_timestep = model_timestep, control_timestep
        self._time_since_last = 0.0
        self._sampled = False
        self._site_rgba = model.site_rgba.copy()
        self.data = data  # a mujoco.MjData

    def begin(self) -> None:
        """Measure a start state, after a reset that was measured as well."""
        self._time_since_last = self._model_timestep + self._model_timestep
        self._take()

    def count(self) -> None:
        """Count one simulator step, with the rounding errors of robosuite's sum, and measure if it is time to."""
        self._time_since_last += self._model_timestep
        if not self._sampled and self._control_timestep >= self._time_since_last:
            self._take()
        if self._time_since_last >= self._control_timestep:
            self._time_since_last %= self._control_timestep
            self._sampled = False

    def render(self, cameras: Cameras) -> dict[str, np.ndarray[Any, Any]]:
        """Its images; LIBERO colours sites anew at the end of a control step, which is later."""
        live = self._model.site_rgba.copy()
        self._model.site_rgba[:] = self._site_rgba
        try:
            return cameras.render(self.data)
        finally:
            self._model.site_rgba[:] = live

    def _take(self) -> None:
        self.data = copy.copy(self._live)
        self._site_rgba = self._model.site_rgba.copy()
        self._sampled = True


class Scene:
    """A task that is built once and reset many times."""

    def __init__(self, bddl_file: Path, starts: np.ndarray[Any, Any], *, size: int, simplifier: Simplifier | None):
        """`starts` are LIBERO's own states, [starts, 1 + positions + velocities]; `size` is the side of images.

        Without a simplifier it is a stock scene.
        """
        self._mujoco = importlib.import_module("mujoco")
        self._starts = starts
        self._size = size
        self._cameras: Cameras | None = None
        self._env = _build(
            bddl_file, self._mujoco.MjModel.from_xml_string if simplifier is None else simplifier.compile
        )
        self._model, self._data = self._env.sim.model._model, self._env.sim.data._data
        _compile_turns()
        self._stock: StockSample | None = None
        if simplifier is None:
            self._stock = StockSample(
                self._model,
                self._data,
                model_timestep=self._env.model_timestep,
                control_timestep=1.0 / self._env.control_freq,
            )

    def begin(self, start: int) -> None:
        """Set the start state and let objects settle."""
        self._reset_to(start)
        for robot in self._env.robots:
            robot.gripper.current_action = np.zeros(robot.gripper.dof)  # LIBERO's reset does not clear it
        self._env.sim.set_state_from_flattened(self._starts[start])
        self._env.sim.forward()
        self._env._check_success()
        self._env._post_process()
        if self._stock is not None:
            self._stock.begin()
        self._data.qacc_warmstart[:] = 0.0  # or the solver would start from the last episode
        for _ in range(SETTLE_STEPS):
            self.step(SETTLE_ACTION)

    def step(self, action: np.ndarray[Any, Any]) -> bool:
        """Execute one control step of [7] float64; returns whether the task succeeded."""
        env, model, data, mujoco = self._env, self._model, self._data, self._mujoco

        def solve_again() -> None:
            # The solver starts from its last solution, so solving twice gives other bits than solving once. What it
            # depends on (positions, contacts and velocities) is the same each time.
            mujoco.mj_forwardSkip(model, data, mujoco.mjtStage.mjSTAGE_VEL, 1)

        env.sim.forward = solve_again  # the controller calls it
        try:
            for substep in range(int(env.control_timestep / env.model_timestep)):
                mujoco.mj_step1(model, data)
                solve_again()
                env._pre_action(action, substep == 0)
                mujoco.mj_step2(model, data)
                if self._stock is not None:
                    self._stock.count()
        finally:
            del env.sim.forward
        success = bool(env._check_success())
        env._post_process()  # for example, makes a stove glow
        return success

    def state(self) -> np.ndarray[Any, Any]:  # [16] float32
        """The numbers of STATE_NAMES: radians; metres; a quaternion, w last; metres."""
        robot, data = self._env.robots[0], self._observed
        joints, fingers = data.qpos[robot._ref_joint_pos_indexes], data.qpos[robot._ref_gripper_joint_pos_indexes]
        position, quaternion = self._hand()
        return np.array([*joints, *position, *quaternion, *fingers], np.float32)

    def axis_angle_state(self) -> np.ndarray[Any, Any]:  # [8] float32
        """The numbers of AXIS_ANGLE_NAMES: metres; radians; metres."""
        fingers = self._observed.qpos[self._env.robots[0]._ref_gripper_joint_pos_indexes]
        position, quaternion = self._hand()
        return np.array([*position, *axis_angle(quaternion), *fingers], np.float32)

    def _hand(self) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:  # [3], [4] float64
        """Position and quaternion, w last, of the gripper."""
        robot, data = self._env.robots[0], self._observed
        w, x, y, z = data.xquat[self._env.sim.model.body_name2id(robot.robot_model.eef_name)]
        return data.site_xpos[robot.eef_site_id], np.array([x, y, z, w])

    @property
    def _observed(self) -> Any:
        """The mujoco.MjData that observations are of."""
        return self._data if self._stock is None else self._stock.data

    def physics(self) -> np.ndarray[Any, Any]:
        """Positions and velocities of all bodies, float64."""
        return np.concatenate([self._data.qpos, self._data.qvel])

    def render(self) -> dict[str, np.ndarray[Any, Any]]:
        """What both cameras see, each [size, size, 3] uint8, the first row on top."""
        if self._cameras is None:
            self._cameras = (SceneCameras if self._stock is None else StockCameras)(self._model, self._size)
        images = self._cameras.render(self._data) if self._stock is None else self._stock.render(self._cameras)
        return {name: images[libero_name] for name, libero_name in CAMERAS.items()}

    def close(self) -> None:
        if self._cameras is not None:
            self._cameras.close()
        self._model = self._data = self._stock = None
        self._env.close()

    def _reset_to(self, start: int) -> None:
        """Reset. LIBERO draws random poses of cabinets and stoves, which no start state holds; seed them by it."""
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
        raise WorldError(f"start {start}: LIBERO could not place all objects in {MAX_TRIES} tries; choose another")


def _compile_turns() -> None:
    """Compile now what robosuite compiles when an action first turns the hand.

    It takes seconds. On a busy machine that is longer than the limit of a step, and a reset has a longer one.
    """
    importlib.import_module("robosuite.utils.transform_utils").quat2mat(np.array([0.0, 0.0, 0.0, 1.0]))


def prepare() -> None:
    """Make LIBERO and robosuite import without prompts, warnings, or files outside their virtual environment."""
    os.environ["LIBERO_CONFIG_PATH"] = os.devnull  # ignore the settings of another LIBERO
    os.environ.setdefault("MPLCONFIGDIR", str(Path(sys.prefix) / "matplotlib"))
    if "robosuite.macros" in sys.modules or importlib.util.find_spec("robosuite") is None:
        return
    # By default robosuite logs to a file in /tmp that belongs to the first user. Its settings must be changed before
    # robosuite is imported, so they are loaded by hand.
    origin = importlib.util.find_spec("robosuite").origin  # type: ignore[union-attr]  # checked above
    spec = importlib.util.spec_from_file_location("robosuite.macros", Path(str(origin)).parent / "macros.py")
    assert spec is not None
    assert spec.loader is not None
    macros = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(macros)
    macros.FILE_LOGGING_LEVEL, macros.CONSOLE_LOGGING_LEVEL = None, "ERROR"  # type: ignore[attr-defined]
    sys.modules["robosuite.macros"] = macros


def axis_angle(quaternion: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:  # [4] float64, w last, to [3] float64
    """The axis of a rotation times its angle, from 0 to 2 pi; robosuite does not choose the shorter way round.

    So q and -q, which are the same rotation, give different numbers, as in the data that published policies learned.
    """
    *axis, w = quaternion
    w = min(max(w, -1.0), 1.0)
    length = math.sqrt(1.0 - w * w)
    if length == 0.0:
        return np.zeros(3)
    return np.asarray(axis) * 2.0 * math.acos(w) / length


def _build(bddl_file: Path, compile_model: Callable[[str], Any]) -> Any:
    """LIBERO's environment of a task, as its own wrapper makes it, without renderer and observables."""
    envs = importlib.import_module("libero.libero.envs")
    robosuite = importlib.import_module("robosuite")
    simulation = importlib.import_module("robosuite.utils.binding_utils").MjSim
    info = importlib.import_module("libero.libero.envs.bddl_utils").get_problem_info(str(bddl_file))
    problem: Any = envs.TASK_MAPPING[info["problem_name"]]

    class Compiled(problem):  # type: ignore[misc]  # known when it runs
        """The same problem, compiled by another compiler."""

        def _initialize_sim(self, xml_string: str | None = None) -> None:
            self.sim = simulation(compile_model(xml_string or self.model.get_xml()))
            self.sim.forward()
            self.initialize_time(self.control_freq)

        def _setup_observables(self) -> dict[str, Any]:
            return {}

    Compiled.__name__ = problem.__name__  # LIBERO compares it with the task's file
    return Compiled(
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
