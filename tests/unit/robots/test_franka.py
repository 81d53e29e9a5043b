"""The model against the published parameters, and the simulated arm's promises. Stepped by hand, without a clock."""

import math
import os
from importlib.resources import files

import numpy as np
import pytest

os.environ.setdefault("MUJOCO_GL", "egl")  # read when mujoco is imported
pytest.importorskip("mujoco")

from understudy.core.rotation import turned
from understudy.robots import ArmError
from understudy.robots.franka import HOME_JOINTS, LIMITS, SimulatedFranka
from understudy.robots.guard import Guard
from understudy.robots.kinematics import JOINT_SPEEDS

A = (0.0, 0.0, 0.0, 0.0825, -0.0825, 0.0, 0.088, 0.0)
D = (0.333, 0.0, 0.316, 0.0, 0.384, 0.0, 0.0, 0.107)
ALPHA = (0.0, -math.pi / 2, math.pi / 2, math.pi / 2, -math.pi / 2, math.pi / 2, math.pi / 2, 0.0)


@pytest.fixture
def arm() -> SimulatedFranka:
    """An arm whose clock was stopped; the tests step it."""
    found = SimulatedFranka()
    found.close()
    return found


def chain(q: np.ndarray) -> np.ndarray:
    """The tool's frame from the Denavit-Hartenberg parameters alone."""
    frame = np.eye(4)
    for a, d, alpha, theta in zip(A, D, ALPHA, [*q, 0.0], strict=True):
        ca, sa, ct, st = math.cos(alpha), math.sin(alpha), math.cos(theta), math.sin(theta)
        frame = frame @ np.array(
            [
                [ct, -st, 0, a],
                [st * ca, ct * ca, -sa, -d * sa],
                [st * sa, ct * sa, ca, d * ca],
                [0, 0, 0, 1],
            ]
        )
    c, s = math.cos(-math.pi / 4), math.sin(-math.pi / 4)
    return frame @ np.array([[c, -s, 0, 0], [s, c, 0, 0], [0, 0, 1, 0.1034], [0, 0, 0, 1]])


def test_its_frames_are_the_published_ones(arm: SimulatedFranka) -> None:
    rng = np.random.default_rng(0)
    for _ in range(20):
        q = rng.uniform(arm._arm.ranges[:, 0], arm._arm.ranges[:, 1])
        arm._arm.place(q)
        wanted = chain(q)
        assert arm._arm.pose()[:3] == pytest.approx(wanted[:3, 3], abs=1e-6)
        assert arm._arm.rotation() == pytest.approx(wanted[:3, :3], abs=1e-6)


def test_the_model_is_in_the_package() -> None:
    assert (files("understudy.robots") / "franka.xml").is_file()


def drive(arm: SimulatedFranka, wish: np.ndarray, seconds: float, commanded: np.ndarray) -> tuple[np.ndarray, list]:
    guard = Guard(arm.limits, arm.home)
    wish, states = guard.clamp(wish), []
    for _ in range(int(seconds / 0.004)):
        commanded = guard.next(commanded, wish, arm._arm.pose(), 0.004)
        arm._target = commanded
        for _ in range(2):
            arm._step(0.002)
        states.append(arm._state())
    return commanded, states


def test_it_gets_where_it_is_told_and_keeps_its_limits(arm: SimulatedFranka) -> None:
    rng = np.random.default_rng(1)
    arm.place_cube(0.3, 0.4)
    commanded = arm.home
    for _ in range(3):
        position = rng.uniform(np.array(LIMITS.low) + 0.01, np.array(LIMITS.high) - 0.01)
        wish = np.concatenate([position, turned(arm.home[3:], rng.uniform(-0.2, 0.2, 3))])
        commanded, states = drive(arm, wish, 2.5, commanded)
        assert states[-1].pose[:3] == pytest.approx(position, abs=2e-3)
        for state in states:
            assert np.linalg.norm(state.vel[:3]) <= LIMITS.max_speed
            assert np.linalg.norm(state.vel[3:]) <= LIMITS.max_turn_speed
            assert np.all(np.abs(state.dq) <= JOINT_SPEEDS)
            assert np.all((state.q > arm._arm.ranges[:, 0]) & (state.q < arm._arm.ranges[:, 1]))


def test_it_feels_the_table(arm: SimulatedFranka) -> None:
    arm.place_cube(arm.home[0], arm.home[1])
    arm.grip(0.0)
    below = np.array([*arm.home[:2], 0.018, *arm.home[3:]])
    _, states = drive(arm, below, 1.5, arm.home)  # closed fingers on the cube, which stands on the table
    last = states[-1]
    assert last.pose[2] > 0.03  # it is held up
    assert 5 < np.linalg.norm(last.force) < 100  # and pushes with a bounded force
    assert last.force[2] < 0  # from below: the tool's z axis points down


def test_what_held_it_back_lets_go_and_it_keeps_its_speed(arm: SimulatedFranka) -> None:
    """20 N is what its springs push with, 10 mm behind the commanded pose. Without its brakes it comes to 0.253 m/s."""
    hand = arm.model.body("hand").id
    commanded, _ = drive(arm, np.array([0.5, -0.19, *arm.home[2:]]), 3.0, arm.home)
    seen = []
    for seconds, force in (0.3, 0.0), (0.25, -20.0), (0.6, 0.0):  # on its way to the other side
        arm.data.xfrc_applied[hand, 1] = force
        commanded, states = drive(arm, np.array([0.5, 0.19, *arm.home[2:]]), seconds, commanded)
        seen.append(max(float(np.linalg.norm(state.vel[:3])) for state in states))
    assert seen[0] == pytest.approx(0.2, abs=0.01)  # what is commanded at most
    assert seen[0] < seen[2] < 0.93 * LIMITS.max_speed


def test_softer_springs_push_less(arm: SimulatedFranka) -> None:
    forces = []
    for stiffness in (2000.0, 300.0):
        assert arm.tune({"translational_stiffness": stiffness, "translational_Ki": 1.0}) == ["translational_Ki"]
        arm.place_cube(arm.home[0], arm.home[1])
        arm.grip(0.0)
        commanded, states = drive(arm, np.array([*arm.home[:2], 0.018, *arm.home[3:]]), 1.5, arm._arm.pose())
        forces.append(np.linalg.norm(states[-1].force))
        drive(arm, arm.home, 1.5, commanded)
    assert forces[1] < 0.6 * forces[0]
    with pytest.raises(ArmError, match=r"translational_stiffness: expected 100 to 3000 N/m, got 1e\+06"):
        arm.tune({"translational_stiffness": 1e6})


def test_home_is_where_its_joints_say(arm: SimulatedFranka) -> None:
    assert arm.home[:3] == pytest.approx(chain(np.array(HOME_JOINTS))[:3, 3], abs=1e-6)
    with pytest.raises(ArmError, match=r"the simulation has ended; start it again"):
        arm.state()


def test_pictures_have_the_size_that_was_asked_for(arm: SimulatedFranka) -> None:
    pytest.importorskip("fastapi")
    from understudy.robots.scene import SceneCameras

    cameras = SceneCameras(arm, size=32)
    image = cameras.render_now("wrist")
    cameras.close()
    assert image.shape == (32, 32, 3)
    with pytest.raises(ArmError, match=r"size: expected 16 to 480 pixels, got 5; 128 is usual"):
        SceneCameras(arm, size=5)
