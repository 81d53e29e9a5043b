"""RobotEnv against a real server, in front of an arm that goes where it is told; tests/system has the simulated one."""

import http.server
import json
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")

from tests.unit.robots.point_arm import PointArm
from tests.waiting import wait_for

import understudy as us
from understudy.core.rotation import between, turned
from understudy.core.times import counts_of
from understudy.envs.check import check_env
from understudy.envs.robot import STATE_NAMES, RobotEnv, start_of
from understudy.envs.robot_client import HttpCamera
from understudy.envs.world import WorldError
from understudy.robots.franka import SimulatedFranka
from understudy.robots.server import ArmServer
from understudy.web.errors import AccessError

PICTURE = np.arange(4 * 6 * 3, dtype=np.uint8).reshape(4, 6, 3)


class Images(http.server.BaseHTTPRequestHandler):
    """A camera of its own kind: any server that gives PPM."""

    def do_GET(self) -> None:
        body = b"P6\n6 4\n255\n" + PICTURE.tobytes() if self.path == "/good" else b"GIF89a"
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def images() -> Iterator[str]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Images)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def arm() -> PointArm:
    return PointArm()


@pytest.fixture
def server(arm: PointArm) -> Iterator[ArmServer]:
    with ArmServer(arm, port=0) as found:
        yield found


def test_the_expert_reaches_and_the_rate_is_kept(server: ArmServer) -> None:
    with RobotEnv(server.url, hz=20) as world:
        assert world.suite.task_names == ["reach"]  # nobody can put a cube back here
        observation, _ = world.reset(seed=0, options={"start": 3})
        numbers = dict(zip(STATE_NAMES, observation["state"].tolist(), strict=True))
        first, target = start_of("reach", 3, world.limits)
        assert [numbers[f"tcp_{axis}"] for axis in "xyz"] == pytest.approx(first, abs=0.006)
        assert [numbers[f"target_{axis}"] for axis in "xyz"] == pytest.approx(target)
        assert (numbers["force_z"], numbers["gripper"]) == (3.0, 1.0)
        terminated = truncated = False
        while not (terminated or truncated):
            observation, reward, terminated, truncated, info = world.step(world.expert_action().action)
        assert terminated
        assert (reward, info["success"]) == (1.0, True)
        report = world.pace.report
        assert report.hz == 20
        assert report.rate < 20.5  # not faster than asked


def test_an_action_of_one_goes_as_far_as_the_scale_says(
    server: ArmServer, arm: PointArm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However late the control loop is: the client's last target is held until the arm is there."""
    targets: list[tuple[np.ndarray, str]] = []
    set_target = server.control.set_target

    def recorded(pose: np.ndarray, client: str) -> None:
        targets.append((pose, client))
        set_target(pose, client)

    monkeypatch.setattr(server.control, "set_target", recorded)
    for scale, wanted in (((0.004, 0.02), 0.004), (None, 0.75 * 0.25 / 5)):
        with RobotEnv(server.url, hz=5, scale=scale) as world:
            world.reset(seed=0, options={"start": 0})
            before = world.observe()["state"][:7].astype(np.float64)  # from where it will go; it may still be settling
            world.step(np.array([1, 0, 0, 0, 0, 1, 0], np.float32))
            pose, client = targets[-1]
            until = time.monotonic() + 60
            while np.abs(arm.pose[:3] - pose[:3]).max() > 1e-4 or np.abs(between(arm.pose[3:], pose[3:])).max() > 1e-3:
                assert time.monotonic() < until
                set_target(pose, client)
                time.sleep(0.01)
            assert arm.pose[0] - before[0] == pytest.approx(wanted, rel=0.1)
            turn = between(before[3:], arm.pose[3:])
            assert turn[2] == pytest.approx(scale[1] if scale else 0.375 * 1.0 / 5, rel=0.1)
            assert turn[:2] == pytest.approx([0, 0], abs=1e-5)


@pytest.mark.serial
@pytest.mark.nightly
def test_an_action_of_one_arrives_within_its_step(server: ArmServer, arm: PointArm) -> None:
    for scale, wanted in (((0.004, 0.02), 0.004), (None, 0.75 * 0.25 / 5)):
        with RobotEnv(server.url, hz=5, scale=scale) as world:
            world.reset(seed=0, options={"start": 0})
            before = world.observe()["state"][:7].astype(np.float64)  # from where it will go; it may still be settling
            world.step(np.array([1, 0, 0, 0, 0, 1, 0], np.float32))
            assert arm.pose[0] - before[0] == pytest.approx(wanted, rel=0.2)
            turn = between(before[3:], arm.pose[3:])
            assert turn[2] == pytest.approx(scale[1] if scale else 0.375 * 1.0 / 5, rel=0.2)
            assert turn[:2] == pytest.approx([0, 0], abs=1e-5)


def test_the_fingers_close_below_minus_a_half_and_open_above_a_half(server: ArmServer, arm: PointArm) -> None:
    with RobotEnv(server.url, hz=50) as world:
        world.reset(seed=0)
        openings = []
        for grip in (0.4, -0.4, -0.5, 0.0, 0.5):
            world.step(np.array([0, 0, 0, 0, 0, 0, grip], np.float32))
            openings.append(arm.opening)
        assert openings == [1.0, 1.0, 0.0, 0.0, 1.0]


def test_what_is_refreshed_is_of_now(server: ArmServer, arm: PointArm) -> None:
    with RobotEnv(server.url, hz=5) as world:
        before = world.reset(seed=0, options={"start": 0})[0]["state"]
        arm.opening = 0.4  # somebody moves it by hand
        assert np.array_equal(world.observe()["state"], before)
        time.sleep(0.5)
        began = time.monotonic()
        world.refresh()
        assert world.observe()["state"][STATE_NAMES.index("gripper")] == pytest.approx(0.4)
        world.step(np.zeros(7, np.float32))
        assert time.monotonic() - began >= 0.2  # the first step takes its time, too


@pytest.mark.serial
@pytest.mark.nightly
def test_a_long_step_is_one_motion(server: ArmServer, arm: PointArm) -> None:
    """At 4 Hz a step is longer than the arm waits for a sign of life; the world gives them."""
    with RobotEnv(server.url, hz=4) as world:
        world.reset(seed=0, options={"start": 0})
        expired = server.control.health.num_expired
        before = arm.pose.copy()
        world.step(np.array([1, 0, 0, 0, 0, 0, 0], np.float32))
        assert arm.pose[0] - before[0] > 0.8 * 0.25 / 4 * 0.9
        assert server.control.health.num_expired == expired


def test_cameras_are_addresses_or_objects_with_read(server: ArmServer, images: str) -> None:
    class Grey:
        def read(self) -> np.ndarray:
            return np.full((2, 3, 3), 128, np.uint8)

    with RobotEnv(server.url, hz=50, cameras={"http": f"{images}/good", "own": Grey()}) as world:
        observation, _ = world.reset(seed=0)
        assert np.array_equal(observation["http"], PICTURE)
        assert observation["own"].shape == (2, 3, 3)
        world.step_spec.observation.check(observation)
        observation["http"][:] = 0
        assert np.array_equal(world.observe()["http"], PICTURE)  # the caller's is the caller's own


def test_each_step_has_the_times_at_which_it_was_captured(server: ArmServer) -> None:
    class Slow:
        """A camera at 4 Hz, whose driver says when it captured."""

        captured_ns = 0

        def read(self) -> np.ndarray:
            self.captured_ns = time.monotonic_ns() // 250_000_000 * 250_000_000
            return np.zeros((2, 3, 3), np.uint8)

    camera = Slow()
    with RobotEnv(server.url, hz=20, cameras={"slow": camera}) as world:
        world.reset(seed=0)
        before = time.monotonic_ns()
        rows = []
        for _ in range(12):
            observation, *_ = world.step(np.zeros(7, np.float32))
            extras = world.extras()
            world.step_spec.extras.check(extras)
            assert world.extras() is extras  # also if it is observed again
            assert np.array_equal(world.observe()["state"], observation["state"])
            assert extras["monotonic"]["observation"]["slow"] == camera.captured_ns
            rows.append(extras)
        after = time.monotonic_ns()
        states = [int(row["monotonic"]["observation"]["state"]) for row in rows]
        assert before - 1e9 < states[0]
        assert all(a < b for a, b in pairwise(states))
        assert states[-1] < after
        ages = [us.ages(row, "monotonic") for row in rows]
        assert all(0 <= age["observation/state"] < 1e9 for age in ages)
        assert max(age["observation/slow"] for age in ages) > 50e6  # some rows have the image of the row before
        counts = counts_of(world.labels())
        assert counts["observation/state"].received == 12
        assert counts["observation/slow"].received < 12
    with RobotEnv(server.url, hz=50, times=False) as world:
        world.reset(seed=0)
        assert (world.extras(), world.labels(), world.step_spec.extras.flat) == ({}, {}, {})


def test_every_state_of_the_control_loop_is_kept_if_asked(server: ArmServer, arm: PointArm) -> None:
    with RobotEnv(server.url, hz=10, samples=True) as world:
        world.reset(seed=0)
        first = world._tick
        rows = []
        for number in range(5):
            arm.opening = number / 8  # the arm moves by itself
            ticks = server.control.measured.tick
            wait_for(lambda ticks=ticks: server.control.measured.tick > ticks + 1)  # type: ignore[misc]
            observation, *_ = world.step(np.zeros(7, np.float32))
            rows.append(world.extras())
        last = world._tick
        world.step_spec.extras.check(rows[0])
        samples = np.concatenate([row["samples"]["observation"]["state"] for row in rows])
        times_ns = np.concatenate([row["samples_monotonic"]["observation"]["state"] for row in rows])
        assert first is not None
        assert last is not None
        assert len(samples) == last - first > 5
        assert np.all(np.diff(times_ns) > 0)
        assert set(samples[:, STATE_NAMES.index("gripper")].round(3).tolist()) >= {0.0, 0.125, 0.25, 0.375, 0.5}
        assert np.array_equal(samples[-1], observation["state"])
        assert counts_of(world.labels())["observation/state"].received == len(samples)


def test_a_server_that_is_started_again_counts_from_the_beginning(arm: PointArm) -> None:
    with ArmServer(arm, port=0) as server, RobotEnv(server.url, hz=50, samples=True) as world:
        world.reset(seed=0)
        world._tick = 10**9  # the server before had run for long
        arm.opening = 0.25
        time.sleep(0.1)
        world.refresh()
        assert world.observe()["state"][STATE_NAMES.index("gripper")] == 0.25
        time.sleep(0.1)
        world.refresh()
        assert world._tick < 10**9


class HilSerl(http.server.BaseHTTPRequestHandler):
    """A server that has HIL-SERL's fields only."""

    def do_POST(self) -> None:
        state = {"pose": [0.5, 0, 0.3, 1, 0, 0, 0], "vel": [0] * 6, "force": [0] * 3, "torque": [0] * 3}
        limits = {**asdict(PointArm.limits), "home": PointArm.home.tolist(), "scene": None}
        body = json.dumps(limits if self.path == "/limits" else {**state, "gripper_pos": 1.0}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        pass


def test_a_server_that_says_no_age_measured_when_it_was_asked() -> None:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), HilSerl)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    url = f"http://127.0.0.1:{server.server_port}"
    try:
        with RobotEnv(url, hz=50) as world:
            before = time.monotonic_ns()
            world.refresh()
            world.refresh()
            assert before <= world.extras()["monotonic"]["observation"]["state"] <= time.monotonic_ns()
        with pytest.raises(WorldError, match=r"samples: expected an arm's server that numbers its states"):
            RobotEnv(url, samples=True)
        with pytest.raises(WorldError, match=r"samples: expected times=true with samples=true, got false"):
            RobotEnv(url, samples=True, times=False)
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_what_is_no_picture_is_named(images: str) -> None:
    camera = HttpCamera(f"{images}/bad")
    with pytest.raises(WorldError, match=r"/bad: expected a PPM image with 8 bits a colour, got"):
        camera.read()
    camera.close()


def test_a_token_from_a_file(arm: PointArm, tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("0123456789abcdef\n")
    with ArmServer(arm, port=0, token="0123456789abcdef") as server:
        with pytest.raises(WorldError, match=r"/limits: 401: the token is missing or wrong"):
            RobotEnv(server.url)
        with RobotEnv(server.url, token_file=str(token)) as world:
            assert world.limits["scene"] is None
        with pytest.raises(AccessError, match=r"cannot be read .*; pass a file that holds the token"):
            RobotEnv(server.url, token_file=str(tmp_path / "none"))


def test_nobody_there() -> None:
    with pytest.raises(WorldError, match=r"no answer .*; is `understudy robot` running there\?"):
        RobotEnv("http://127.0.0.1:9")
    with pytest.raises(WorldError, match=r"url: expected http://HOST:PORT, got 'localhost:5000'"):
        RobotEnv("localhost:5000")


def test_an_arm_that_is_stopped_in_mid_episode_says_so(server: ArmServer) -> None:
    with RobotEnv(server.url, hz=50) as world:
        world.reset(seed=0)
        server.control.disengage()
        with pytest.raises(WorldError, match=r"/pose: 409: the arm is stopped; POST /startimp first"):
            world.step(np.zeros(7, np.float32))
        world.reset(seed=0)  # a new episode starts it again
        world.step(np.zeros(7, np.float32))


def test_noise_bends_the_way_and_needs_a_generator(server: ArmServer) -> None:
    with RobotEnv(server.url, hz=50) as world:
        world.reset(seed=0)
        straight = world.expert_action()
        bent = world.expert_action(noise=0.3, rng=np.random.default_rng(0))
        assert not np.allclose(straight.action[:3], bent.action[:3])
        assert np.allclose(straight.action[3:], bent.action[3:])
        with pytest.raises(WorldError, match=r"rng: noise needs a random generator, got None"):
            world.expert_action(noise=0.3)


def test_starts_are_inside_and_differ() -> None:
    limits = {"low": [0.4, -0.2, 0.013], "high": [0.65, 0.2, 0.4]}
    for task in ("reach", "lift"):
        found = [np.concatenate(start_of(task, start, limits)) for start in range(50)]
        assert len({tuple(numbers) for numbers in found}) == 50
        assert all(np.all(n[:3] > limits["low"]) and np.all(n[:3] < limits["high"]) for n in found)
        assert np.array_equal(found[7], np.concatenate(start_of(task, 7, limits)))


def test_quaternions() -> None:
    q = turned(np.array([1.0, 0.0, 0.0, 0.0]), np.array([0.1, -0.2, 0.3]))
    assert between(np.array([1.0, 0.0, 0.0, 0.0]), q) == pytest.approx([0.1, -0.2, 0.3])


@pytest.mark.parametrize("high", [(0.55, 0.05, 0.35), (0.46, -0.04, 0.4)])
def test_a_box_without_space_for_the_task_is_refused(high: tuple[float, float, float]) -> None:
    limits = {"low": (0.45, -0.05, 0.25), "high": high}
    with pytest.raises(WorldError, match=r"limits: expected a box with space for the task 'reach', got \[0.45, -0.05"):
        start_of("reach", 0, limits)
    start_of("reach", 0, {"low": (0.45, -0.05, 0.25), "high": (0.65, 0.15, 0.45)})


def test_an_arm_is_real_unless_its_server_says_otherwise(server: ArmServer, arm: PointArm) -> None:
    with RobotEnv(server.url) as world:
        assert not world.simulated
        with pytest.raises(WorldError, match="RobotEnv: the check sends extreme and random actions"):
            check_env(world)
    arm.simulated = True
    with RobotEnv(server.url) as world:
        assert world.simulated
    assert SimulatedFranka.simulated
