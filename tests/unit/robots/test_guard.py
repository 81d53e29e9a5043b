"""The rules, worked out by hand and on random wishes."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from understudy.core.rotation import between, to_euler, turned
from understudy.robots import ArmError, ArmLimits, ArmState
from understudy.robots.guard import INSET_M, SHARE, TURN_SHARE, Guard

LIMITS = ArmLimits(low=(0.3, -0.2, 0.0), high=(0.7, 0.2, 0.4), max_turn_rad=0.5)
HOME = np.array([0.5, 0.0, 0.2, 1.0, 0.0, 0.0, 0.0])
GUARD = Guard(LIMITS, HOME)


def state(pose: np.ndarray, vel: np.ndarray) -> ArmState:
    return ArmState(
        pose=pose,
        vel=vel,
        force=np.zeros(3),
        torque=np.zeros(3),
        q=np.zeros(7),
        dq=np.zeros(7),
        jacobian=np.zeros((6, 7)),
        gripper=1.0,
    )


def test_a_wish_outside_is_clamped() -> None:
    wish = np.concatenate([[9.0, -9.0, 0.1], turned(HOME[3:], np.array([0.0, 0.0, 2.0]))])
    found = GUARD.clamp(wish)
    assert found[:3] == pytest.approx([0.7 - INSET_M, -0.2 + INSET_M, 0.1])
    assert between(HOME[3:], found[3:]) == pytest.approx([0.0, 0.0, SHARE * 0.5])


def test_a_step_is_no_longer_than_the_speed_allows() -> None:
    wish = np.concatenate([[0.6, 0.0, 0.2], turned(HOME[3:], np.array([0.4, 0.0, 0.0]))])
    found = GUARD.next(HOME, wish, HOME, 0.01)
    assert found[:3] - HOME[:3] == pytest.approx([SHARE * 0.25 * 0.01, 0.0, 0.0])
    assert between(HOME[3:], found[3:]) == pytest.approx([TURN_SHARE * 0.01, 0.0, 0.0])


def test_it_does_not_run_ahead_of_an_arm_that_is_held() -> None:
    wish = GUARD.clamp(np.array([0.65, 0.0, 0.2, 1.0, 0.0, 0.0, 0.0]))
    commanded = HOME
    for _ in range(200):
        commanded = GUARD.next(commanded, wish, HOME, 0.01)
    assert commanded[:3] - HOME[:3] == pytest.approx([LIMITS.max_lag_m, 0.0, 0.0])


def test_without_a_wish_it_stays() -> None:
    assert GUARD.next(HOME, None, HOME + 0.001, 0.01)[:3] == pytest.approx(HOME[:3])


numbers = st.floats(-1e9, 1e9)


@given(st.lists(st.tuples(numbers, numbers, numbers, st.floats(-3, 3), st.floats(-3, 3)), min_size=1, max_size=20))
def test_whatever_is_wished_the_commanded_pose_stays_inside_and_slow(wishes: list[tuple[float, ...]]) -> None:
    commanded = HOME
    for x, y, z, a, b in wishes:
        wish = GUARD.clamp(np.concatenate([[x, y, z], turned(HOME[3:], np.array([a, b, a]))]))
        for _ in range(5):
            before, commanded = commanded, GUARD.next(commanded, wish, commanded, 0.01)
            assert np.linalg.norm(commanded[:3] - before[:3]) <= 0.25 * 0.01 + 1e-12
            assert np.linalg.norm(between(before[3:], commanded[3:])) <= 0.01 + 1e-9
            assert np.all(commanded[:3] >= np.array(LIMITS.low) + INSET_M - 1e-12)
            assert np.all(commanded[:3] <= np.array(LIMITS.high) - INSET_M + 1e-12)
            assert np.linalg.norm(between(HOME[3:], commanded[3:])) <= LIMITS.max_turn_rad
            assert np.linalg.norm(commanded[3:]) == pytest.approx(1.0)


def test_it_objects_to_an_arm_that_does_not_do_what_it_is_told() -> None:
    assert GUARD.violation(state(HOME, np.zeros(6))) is None
    fast = np.array([0.5, 0.0, 0.0, 0.0, 0.0, 0.0])
    assert GUARD.violation(state(HOME, fast)) == "the arm moved at 0.50 m/s, and 0.25 is its limit"
    assert GUARD.violation(state(HOME * np.nan, np.zeros(6))) == "the arm reports numbers that are not finite"


def test_limits_that_make_no_sense_are_refused() -> None:
    with pytest.raises(ArmError, match=r"limits: expected low below high on each axis, got"):
        ArmLimits(low=(0.5, 0.0, 0.0), high=(0.4, 1.0, 1.0))
    with pytest.raises(ArmError, match=r"limits/max_speed: expected finite numbers, and .* above 0, got 0"):
        ArmLimits(low=(0, 0, 0), high=(1, 1, 1), max_speed=0)
    with pytest.raises(ArmError, match=r"home: expected a point inside"):
        Guard(LIMITS, np.array([0.9, 0.0, 0.2, 1.0, 0.0, 0.0, 0.0]))


def test_rotations() -> None:
    quarter = turned(np.array([0.0, 0.0, 0.0, 1.0]), np.array([0.0, 0.0, np.pi / 2]))
    assert quarter == pytest.approx([0.0, 0.0, np.sqrt(0.5), np.sqrt(0.5)])
    assert to_euler(quarter) == pytest.approx([0.0, 0.0, np.pi / 2])
    assert between(quarter, -quarter) == pytest.approx([0.0, 0.0, 0.0])  # the same orientation
