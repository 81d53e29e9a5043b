"""The contract of Arm: the simulated Franka in real time, and the smallest arm there can be."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import fields

import numpy as np
import pytest
from tests.unit.robots.point_arm import PointArm
from tests.waiting import wait_for

from understudy.core.rotation import turned
from understudy.robots import Arm, ArmError, ArmState
from understudy.robots.control import Control
from understudy.robots.guard import Guard


def open_franka() -> Arm:
    pytest.importorskip("mujoco")
    from understudy.robots.franka import SimulatedFranka

    return SimulatedFranka()


ARMS: dict[str, Callable[[], Arm]] = {"PointArm": PointArm, "SimulatedFranka": open_franka}


@pytest.fixture(scope="module", params=ARMS)
def arm(request: pytest.FixtureRequest) -> Iterator[Arm]:
    """One arm for all tests of the module, wherever the last one has left it."""
    made = ARMS[request.param]()
    yield made
    made.close()


@pytest.fixture
def control(arm: Arm) -> Iterator[Control]:
    """The loop that drives an arm in front of its server."""
    made = Control(arm)
    made.start()
    yield made
    made.stop()


def drive(control: Control, pose: np.ndarray, until: Callable[[ArmState], bool]) -> list[ArmState]:
    """Drive towards a pose and return the states on the way; they keep the limits."""
    states: list[ArmState] = []

    def arrived() -> bool:
        control.set_target(pose, "test")
        states.append(control.state)
        return until(control.state)

    wait_for(arrived, 60)
    limits = control.arm.limits
    for state in states:
        assert np.all(state.pose[:3] >= limits.low)
        assert np.all(state.pose[:3] <= limits.high)
        assert control.guard.violation(state) is None
    assert control.health.fault is None
    return states


def near(pose: np.ndarray, distance: float = 0.004) -> Callable[[ArmState], bool]:
    return lambda state: bool(np.linalg.norm(state.pose[:3] - pose[:3]) < distance)


def test_home_is_an_allowed_pose(arm: Arm) -> None:
    assert arm.home.shape == (7,)
    assert np.linalg.norm(arm.home[3:]) == pytest.approx(1.0)
    assert Guard(arm.limits, arm.home).clamp(arm.home) == pytest.approx(arm.home, abs=1e-6)


def test_a_state_has_all_fields_in_new_arrays(arm: Arm) -> None:
    state = arm.state()
    joints = len(state.q)
    shapes = {"pose": (7,), "vel": (6,), "force": (3,), "torque": (3,), "q": (joints,), "dq": (joints,)}
    shapes["jacobian"] = (6, joints)
    assert {field.name for field in fields(ArmState)} == {*shapes, "gripper"}
    for name, shape in shapes.items():
        array = getattr(state, name)
        assert array.shape == shape, name
        assert np.isfinite(array).all(), name
    assert -0.01 <= state.gripper <= 1.01
    assert np.linalg.norm(state.pose[3:]) == pytest.approx(1.0)
    pose = state.pose.copy()
    state.pose[:] = np.nan
    state.q[:] = np.nan
    assert arm.state().pose == pytest.approx(pose, abs=0.02)
    assert np.isfinite(arm.state().q).all()


def test_it_moves_to_the_target_and_stays_there(arm: Arm, control: Control) -> None:
    target = np.concatenate(
        [arm.home[:3] + np.array([0.01, 0.03, -0.02]), turned(arm.home[3:], np.array([0.0, 0.0, 0.05]))]
    )
    drive(control, target, near(target))
    wait_for(lambda: control.health.client is None)  # nobody sends a heartbeat any more
    assert near(target, 0.01)(control.state)
    drive(control, arm.home, near(arm.home))


def test_the_array_of_a_move_remains_the_callers(arm: Arm) -> None:
    pose = arm.state().pose.copy()
    arm.move(pose)
    pose[:] = np.nan
    time.sleep(0.02)
    assert np.isfinite(arm.state().pose).all()


def test_targets_outside_the_box_end_at_its_border(arm: Arm, control: Control) -> None:
    outside = arm.home.copy()
    outside[1] = 5.0
    border = control.guard.clamp(outside)
    drive(control, outside, near(border, 0.006))
    drive(control, arm.home, near(arm.home))


def test_fingers_close_and_open(arm: Arm, control: Control) -> None:
    for opening in (0.0, 1.0):
        control.submit(lambda opening=opening: arm.grip(opening)).result(10)
        wait_for(lambda opening=opening: abs(control.state.gripper - opening) < 0.05, 60)


def test_recover_may_be_called_at_any_time(arm: Arm, control: Control) -> None:
    control.clear().result(10)
    arm_before = control.state.pose
    control.clear().result(10)
    assert control.state.pose == pytest.approx(arm_before, abs=0.02)
    assert control.health.fault is None


def test_tune_names_what_it_does_not_have_and_refuses_bad_values(arm: Arm) -> None:
    unknown = arm.tune({"no_such_parameter": 1.0})
    assert set(unknown) <= {"no_such_parameter"}
    with pytest.raises(ArmError, match="stiffness: expected"):
        arm.tune({"translational_stiffness": -1.0})
    assert Arm.tune(arm, {"a": 1.0, "b": 2.0}) == ["a", "b"]  # the default: it has none


def test_joints_are_reset_at_home(arm: Arm, control: Control) -> None:
    control.submit(arm.reset_joints).result(30)
    wait_for(lambda: near(arm.home, 0.01)(control.state), 60)


@pytest.mark.parametrize("make", ARMS.values(), ids=ARMS)
def test_close_stops_all_threads_and_may_be_called_twice(make: Callable[[], Arm]) -> None:
    before = set(threading.enumerate())
    arm = make()
    arm.state()
    arm.close()
    arm.close()
    assert set(threading.enumerate()) <= before
