"""RobotEnv: an arm served by `understudy robot` as a World with a fixed control rate, over HTTP.

An action is seven numbers from -1 to 1: the translation along x, y, z and the rotation about x, y, z, both as fractions
of the largest step, and the gripper: -0.5 or less closes it, 0.5 or more opens it, other values leave it as it is.
"""

from __future__ import annotations

import math
import time
import uuid
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import numpy as np

from understudy.core import ArraySpec, Sensor, SensorReading, Sensors, Spec, StepSpec, Tree
from understudy.core import tree as trees
from understudy.core.rotation import between, turned
from understudy.envs.pace import Pace
from understudy.envs.robot_client import HttpCamera, RobotHttpClient
from understudy.envs.suite import Suite, Task
from understudy.envs.world import ExpertAction, World, WorldError
from understudy.web.tokens import read_token

Array: TypeAlias = np.ndarray[Any, Any]

NUM_STARTS = 50
EPISODE_S = 12.0
SETTLE_S = 15.0  # to reach the start pose
AT_START = (0.005, 0.05)  # metres, rad
REACHED = (0.01, 0.1)
STEP_SHARE = 0.75  # of the arm's limits per step
CUBE = 0.04  # metres, its side
LIFTED = 0.1  # metres above the table
HELD = (0.3, 0.7)  # range of the gripper's opening while it holds the cube
MIN_REACH = 0.08  # metres from the start to the target of `reach`
GRASP_Z = 0.02
ABOVE_Z = 0.1
CLOSE, OPEN = -1.0, 1.0

STATE_NAMES = (
    *(f"tcp_{axis}" for axis in ("x", "y", "z", "qx", "qy", "qz", "qw")),
    *(f"tcp_{axis}" for axis in ("vx", "vy", "vz", "wx", "wy", "wz")),
    *(f"force_{axis}" for axis in "xyz"),
    *(f"torque_{axis}" for axis in "xyz"),
    "gripper",
    *(f"target_{axis}" for axis in "xyz"),
)


class Camera(Protocol):
    """Anything that returns images of one size.

    If it has an attribute `captured_ns`, that is when the last image was captured, by `time.monotonic_ns`; if not, the
    image was captured when `read` returned.
    """

    def read(self) -> Array:
        """uint8 [h, w, 3], a new array."""


class RobotEnv(World):
    """The task `reach` and, with a scene that can put the cube back, `lift`. It runs in real time.

    `cameras` maps names to Cameras or image URLs; None uses those of the scene. `scene` is the URL of the simulated
    surroundings; None asks the arm for it. `scale` is how far an action of 1 moves, in metres and rad; None derives it
    from the arm's limits. Each step has the times at which its state and its images were captured, unless `times` is
    False. `samples` keeps each state that the arm's control loop measured, not only that of each step.
    """

    state_names = STATE_NAMES
    deterministic = False

    def __init__(
        self,
        url: str = "http://127.0.0.1:5000",
        *,
        hz: float = 10.0,
        cameras: Mapping[str, Camera | str] | None = None,
        scene: str | None = None,
        scale: tuple[float, float] | None = None,
        token_file: str | None = None,
        times: bool = True,
        samples: bool = False,
    ):
        if samples and not times:
            raise WorldError("samples: expected times=true with samples=true, got false; leave times out")
        self.hz = hz
        self.pace = Pace(hz)
        token = None if token_file is None else read_token(Path(token_file))
        self._arm = RobotHttpClient(url, token=token, client=f"RobotEnv {uuid.uuid4().hex[:12]}")
        self.limits = self._arm.post_json("/limits")
        self.simulated = self.limits.get("simulated") is True  # a server that does not say so has a real arm
        scene = scene or self.limits["scene"]
        self._scene = None if scene is None else RobotHttpClient(scene, token=token)
        self._cameras = self._open_cameras(cameras, scene, token)
        self.scale = np.array(scale or self._usual_scale(), float)
        self._heartbeat_s = self.limits["heartbeat_s"] / 2
        self._home = np.array(self.limits["home"])
        self._target = self._home.copy()
        self._grip = OPEN
        self._sensors = Sensors({**dict.fromkeys(self._cameras, Sensor()), "state": Sensor(keep_all=samples)})
        self._times, self._samples = times, samples
        self._tick: int | None = None  # of the newest state that the sensors have
        self._captured_ns = 0
        self._image_ns: dict[str, int] = {}  # when the last image of each camera was captured
        self._seen: SensorReading | None = None  # of this step, once it was observed
        self._measured = self._read_state()
        if samples and self._measured["tick"] is None:
            raise WorldError(
                f"samples: expected an arm's server that numbers its states, as `understudy robot` does, got {url} "
                f"that does not; leave samples out"
            )
        self.suite = self._make_suite()
        fields = {name: ArraySpec(shape=camera.read().shape, dtype="uint8") for name, camera in self._cameras.items()}
        fields["state"] = ArraySpec(shape=(len(STATE_NAMES),), dtype="float32")
        action = ArraySpec(shape=(7,), dtype="float32", low=-1.0, high=1.0)
        spec = StepSpec(observation=Spec(fields), action=Spec(action))
        self.step_spec = self._sensors.timed_spec(spec) if times else spec

    # --- methods of World ---

    def begin(self, task: Task, start: int, rng: np.random.Generator) -> None:
        """Open the gripper, move up, place the objects of this start, and move to the start pose."""
        del rng
        self._arm.post("/clearerr")
        self._arm.post("/startimp")
        self._grip = OPEN
        self._arm.post("/open_gripper")
        first, target = start_of(task.name, start, self.limits)
        up = np.concatenate(
            [self._measured["pose"][:2], [max(self._measured["pose"][2], self._home[2])], self._home[3:]]
        )
        self._settle(up)
        self._settle(np.concatenate([first, self._home[3:]]))
        self._target = np.concatenate([target, self._home[3:]])
        if self._scene is not None:
            objects = {"cube": target[:2].tolist()} if task.name == "lift" else {"target": target.tolist()}
            self._scene.post("/place", {"cube": [0.3, 0.35], "target": [0.0, 0.0, -1.0], **objects})
        self.refresh()

    def advance(self, action: Tree) -> tuple[float, bool, bool, dict[str, Any]]:
        pose, action = self._measured["pose"], np.asarray(action)
        position = np.clip(pose[:3] + self.scale[0] * action[:3], self.limits["low"], self.limits["high"])
        self._arm.post("/pose", {"arr": [*position.tolist(), *turned(pose[3:], self.scale[1] * action[3:6]).tolist()]})
        self._command_gripper(float(action[6]))
        self._wait()
        self._measure()
        success = self._succeeded()
        return float(success), success, False, {"success": success}

    def observe(self) -> Tree:
        """The state at the end of the step; images are taken at the first call."""
        return trees.map_leaves(np.copy, self._see().observation)

    def extras(self) -> Tree:
        """When the state and the images of this step were captured."""
        return self._see().extras if self._times else {}

    def labels(self) -> dict[str, str]:
        return self._sensors.labels() if self._times else {}

    def refresh(self) -> None:
        """Measure the state and take images again, and restart the clock of the control rate."""
        self.pace.begin()
        self._measure()
        self._sensors.begin()

    def close(self) -> None:
        self._arm.close()
        for client in (self._scene, *self._cameras.values()):
            if isinstance(client, RobotHttpClient | HttpCamera):
                client.close()

    def expert_action(self, *, noise: float = 0.0, rng: np.random.Generator | None = None) -> ExpertAction:
        """Straight to the target, or above the cube, down, close and up; computed from the measured state."""
        pose = self._measured["pose"]
        goal, grip = (self._target[:3], OPEN) if self.task.name == "reach" else self._lift_plan()
        way = (goal - pose[:3]) / self.scale[0]
        turn = between(pose[3:], self._target[3:]) / self.scale[1]
        if noise:
            if rng is None:
                raise WorldError("rng: noise needs a random generator, got None; pass np.random.default_rng(seed)")
            way = way / max(1.0, float(np.abs(way).max())) + noise * rng.normal(size=3)
        action = np.clip(np.array([*way, *turn, grip]), -1.0, 1.0).astype(np.float32)
        return ExpertAction(action=action, progress=self._progress())

    # --- helpers ---

    def _measure(self) -> None:
        """Measure the state; images will be taken when they are asked for."""
        measured: list[dict[str, Any]] = []
        if self._samples and self._tick is not None:
            found = self._arm.post_json("/getstates", {"after": self._tick})["states"]
            measured = [_parsed(state) for state in found]
        measured = measured or [self._read_state()]  # there is none if the server was started again
        now_ns = time.monotonic_ns()
        for state in measured:
            self._put_state(state, now_ns)
        self._measured, self._seen = measured[-1], None

    def _put_state(self, measured: dict[str, Any], now_ns: int) -> None:
        if measured["tick"] is not None and measured["tick"] == self._tick:  # asked twice in one tick
            return
        captured_ns = max(now_ns - round(measured["age_s"] * 1e9), self._captured_ns + 1)
        numbers = [measured[name] for name in ("pose", "vel", "force", "torque", "gripper_pos")]
        state = np.concatenate([*map(np.atleast_1d, numbers), self._target[:3]]).astype(np.float32)
        self._sensors.put("state", state, monotonic_ns=captured_ns)
        self._tick, self._captured_ns = measured["tick"], captured_ns

    def _see(self) -> SensorReading:
        if self._seen is None:
            for name, camera in self._cameras.items():
                self._put_image(name, camera)
            self._seen = self._sensors.read()
        return self._seen

    def _put_image(self, name: str, camera: Camera) -> None:
        image = camera.read()
        captured_ns = getattr(camera, "captured_ns", None) or time.monotonic_ns()
        if captured_ns != self._image_ns.get(name):  # a slow camera may give one image twice
            self._sensors.put(name, image, monotonic_ns=captured_ns)
            self._image_ns[name] = captured_ns

    def _lift_plan(self) -> tuple[Array, float]:
        pose, opening = self._measured["pose"], self._measured["gripper_pos"]
        target = self._target[:3]
        beside = math.dist(pose[:2], target[:2])
        if self._grip == CLOSE and opening < HELD[1]:
            if opening < HELD[0] and pose[2] < ABOVE_Z:  # nothing in the gripper
                return np.array([*pose[:2], ABOVE_Z + 0.02]), OPEN
            return np.array([*pose[:2], LIFTED + 0.06]), CLOSE
        if beside < 0.008 and pose[2] < GRASP_Z + 0.008:
            return target, CLOSE
        if beside < 0.015:
            return np.array([*target[:2], GRASP_Z]), OPEN
        return np.array([*target[:2], max(ABOVE_Z, float(pose[2]) if beside > 0.05 else ABOVE_Z)]), OPEN

    def _progress(self) -> float:
        pose = self._measured["pose"]
        if self.task.name == "lift" and self._holding():
            return 1.0 + float(pose[2])
        return -math.dist(pose[:3], self._target[:3])

    def _succeeded(self) -> bool:
        pose = self._measured["pose"]
        if self.task.name == "lift":
            return self._holding() and bool(pose[2] > LIFTED)
        turn = float(np.linalg.norm(between(pose[3:], self._target[3:])))
        return math.dist(pose[:3], self._target[:3]) < REACHED[0] and turn < REACHED[1]

    def _holding(self) -> bool:
        return self._grip == CLOSE and HELD[0] < self._measured["gripper_pos"] < HELD[1]

    def _command_gripper(self, command: float) -> None:
        if abs(command) >= 0.5 and math.copysign(1.0, command) != self._grip:
            self._grip = math.copysign(1.0, command)
            self._arm.post("/open_gripper" if self._grip == OPEN else "/close_gripper")

    def _wait(self) -> None:
        """Wait for the next tick and send heartbeats, so that the arm does not stop during a long step."""
        while self.pace.remaining_s > 1.5 * self._heartbeat_s:
            time.sleep(self._heartbeat_s)
            self._arm.post("/heartbeat")
        self.pace.wait()

    def _settle(self, pose: Array) -> None:
        """Move to a pose and wait until the arm stands still there."""
        until = time.monotonic() + SETTLE_S
        while True:
            self._arm.post("/pose", {"arr": pose.tolist()})
            self._measured = self._read_state()
            away = math.dist(self._measured["pose"][:3], pose[:3])
            turn = float(np.linalg.norm(between(self._measured["pose"][3:], pose[3:])))
            if away < AT_START[0] and turn < AT_START[1] and np.linalg.norm(self._measured["vel"][:3]) < 0.01:
                return
            if time.monotonic() > until:
                raise WorldError(
                    f"{self._arm.url}: after {SETTLE_S:g} s the arm is {away * 100:.1f} cm from the start "
                    f"pose; is something in its way?"
                )
            time.sleep(0.03)

    def _read_state(self) -> dict[str, Any]:
        return _parsed(self._arm.post_json("/getstate"))

    def _usual_scale(self) -> tuple[float, float]:
        return (
            STEP_SHARE * self.limits["max_speed"] / self.pace.hz,
            STEP_SHARE / 2 * self.limits["max_turn_speed"] / self.pace.hz,
        )

    def _open_cameras(
        self, cameras: Mapping[str, Camera | str] | None, scene: str | None, token: str | None
    ) -> dict[str, Camera]:
        if cameras is None:
            names = [] if self._scene is None else self._scene.get_json("/cameras")["cameras"]
            cameras = {name: f"{scene}/camera/{name}" for name in names}
        return {
            name: HttpCamera(camera, token=token) if isinstance(camera, str) else camera
            for name, camera in cameras.items()
        }

    def _make_suite(self) -> Suite:
        num_steps = math.ceil(EPISODE_S * self.pace.hz)
        tasks = [("reach", "go to the green ball")]
        if self._scene is not None:
            tasks.append(("lift", "lift the red cube"))
        return Suite(
            name="robot",
            tasks=tuple(
                Task(name=name, instruction=text, num_starts=NUM_STARTS, max_steps=num_steps) for name, text in tasks
            ),
        )


def _parsed(found: Mapping[str, Any]) -> dict[str, Any]:
    """A state as the arm's server gives it. One that says no age (HIL-SERL's) measured it when it was asked."""
    numbers = {
        name: np.array(value, float) if isinstance(value, list) else float(value) for name, value in found.items()
    }
    return {"age_s": 0.0, **numbers, "tick": found.get("tick")}


def start_of(task: str, start: int, limits: Mapping[str, Any]) -> tuple[Array, Array]:
    """Start position of the arm and position of the target or cube, [3] each, determined by index and limits."""
    rng = np.random.default_rng([zlib.crc32(task.encode()), start])
    low, high = np.array(limits["low"]), np.array(limits["high"])
    least, most = low + 0.12 * (high - low), high - 0.12 * (high - low)
    least[2], most[2] = low[2] + 0.1, min(float(most[2]), low[2] + 0.3)
    if np.any(most < least) or np.linalg.norm(most - least) < 2 * MIN_REACH:
        raise WorldError(
            f"limits: expected a box with space for the task {task!r}, got {low.tolist()} to {high.tolist()}; "
            f"enlarge the arm's limits, 0.2 m on each axis are enough"
        )
    while True:
        first, target = rng.uniform(least, most, (2, 3))
        if task == "lift":
            target[2] = GRASP_Z
            first[2] = max(float(first[2]), low[2] + 0.15)
            return first, target
        if np.linalg.norm(first - target) > MIN_REACH:
            return first, target
