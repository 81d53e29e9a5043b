"""OperatorInput: who is in control, for how long, and what a reading says of it."""

from __future__ import annotations

import numpy as np
import pytest

from understudy.core import ArraySpec, Spec
from understudy.envs.teleop.axes import Axes, DeviceError
from understudy.envs.teleop.operator_input import InputEvent, OperatorInput

AXES = Axes.of(Spec(ArraySpec(shape=(4,), dtype="float32", low=-1, high=1)))


class Clock:
    """A clock that moves only when it is told to: how busy the machine is changes nothing."""

    def __init__(self) -> None:
        self._now_s = 1000.0

    def monotonic(self) -> float:
        return self._now_s

    def sleep(self, seconds: float) -> None:
        self._now_s += seconds


clock = Clock()


@pytest.fixture(autouse=True)
def same_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("understudy.envs.teleop.operator_input.time", clock)


def push(operator_input: OperatorInput, x: float, ago_s: float = 0.0, active: bool | None = None) -> None:
    made_s = clock.monotonic() - ago_s
    operator_input.put({"x": x}, active=bool(x) if active is None else active, made_s=made_s)


def tell(operator_input: OperatorInput, event: InputEvent, ago_s: float = 0.0) -> None:
    """A command, with all that is held."""
    held, active = operator_input._pushes, operator_input._active
    operator_input.put(held, active=active, made_s=clock.monotonic() - ago_s, events=[event])


def test_nobody_is_in_control_until_something_is_pushed() -> None:
    operator_input = OperatorInput(AXES)
    assert operator_input.read().action is None
    push(operator_input, 0.5)
    assert operator_input.read().action.tolist() == [0.5, 0, 0, -1]
    assert operator_input.driving
    push(operator_input, 0.0)
    assert operator_input.read().action is None
    assert not operator_input.driving


def test_holding_without_a_push_is_a_zero_action() -> None:
    operator_input = OperatorInput(AXES)
    push(operator_input, 0.0, active=True)
    assert operator_input.read().action.tolist() == [0, 0, 0, -1]


def test_what_is_not_repeated_expires() -> None:
    operator_input = OperatorInput(AXES, expiry_s=0.1)
    push(operator_input, 1.0)
    assert operator_input.read().action is not None
    for _ in range(4):
        clock.sleep(0.05)
        push(operator_input, 1.0)
        assert operator_input.read().action is not None
    clock.sleep(0.12)
    assert operator_input.read().action is None
    assert not operator_input.driving
    push(operator_input, 1.0)
    assert operator_input.read().action is not None  # it is still held


def test_what_was_long_on_its_way_counts_for_nothing() -> None:
    operator_input = OperatorInput(AXES, expiry_s=0.1)
    push(operator_input, 1.0, ago_s=0.2)
    assert operator_input.read().action is None
    push(operator_input, 1.0)
    push(operator_input, 1.0, ago_s=0.2)  # a report from before takes nothing for granted
    assert operator_input.read().action is None


def test_a_tap_between_two_readings_is_one_step() -> None:
    operator_input = OperatorInput(AXES)
    push(operator_input, 1.0, ago_s=0.02)
    push(operator_input, 0.0)
    assert operator_input.read().action.tolist() == [1, 0, 0, -1]
    assert operator_input.read().action is None


def test_a_tap_expires_too_and_one_that_was_read_is_not_repeated() -> None:
    operator_input = OperatorInput(AXES, expiry_s=0.1)
    push(operator_input, 1.0)
    push(operator_input, 0.0)
    clock.sleep(0.12)
    assert operator_input.read().action is None
    push(operator_input, 1.0)
    operator_input.read()
    push(operator_input, 0.0)
    assert operator_input.read().action is None


def test_letting_go_takes_everything_back() -> None:
    operator_input = OperatorInput(AXES, to_the_end=False)
    push(operator_input, 1.0)
    push(operator_input, 0.0)
    operator_input.release()
    assert operator_input.read().action is None


def test_the_moment_of_a_change_is_told_once() -> None:
    operator_input = OperatorInput(AXES)
    made_s = clock.monotonic() - 0.05
    operator_input.put({"x": 1.0}, active=True, made_s=made_s)
    push(operator_input, 0.5)  # the oldest change that nobody has seen is the one that waited longest
    assert operator_input.read().since_s == made_s
    assert operator_input.latency_s == pytest.approx(0.05)
    push(operator_input, 0.5)
    assert operator_input.read().since_s is None  # the same push, still held, is no older for that
    push(operator_input, 0.2)
    since_s = operator_input.read().since_s
    assert since_s is not None
    assert since_s == clock.monotonic()


def test_only_what_was_done_with_the_hands_has_a_moment() -> None:
    operator_input = OperatorInput(AXES)
    push(operator_input, 0.0, ago_s=0.29)  # a page that reports that nothing is held
    push(operator_input, 1.0, ago_s=0.28)
    push(operator_input, 0.0, ago_s=0.27)
    assert operator_input.read().action is not None
    push(operator_input, 1.0, ago_s=0.26)
    operator_input.read()
    push(operator_input, 0.0, ago_s=0.25)  # nobody reads this
    push(operator_input, 1.0)
    since_s = operator_input.read().since_s
    assert since_s is not None
    assert since_s == clock.monotonic()


def test_a_press_that_came_too_late_is_as_old_as_it_is() -> None:
    operator_input = OperatorInput(AXES, expiry_s=0.1)
    push(operator_input, 1.0, ago_s=0.5)
    assert operator_input.read().action is None
    push(operator_input, 1.0)  # the key is still held, and now it is heard in time
    since_s = operator_input.read().since_s
    assert since_s is not None
    assert clock.monotonic() - since_s == 0.5


def test_the_grip_stays_and_follows_whoever_acts() -> None:
    operator_input = OperatorInput(AXES)
    tell(operator_input, "grip")
    push(operator_input, 1.0)
    assert operator_input.read().action[3] == 1
    operator_input.begin()
    assert operator_input.read().action[3] == -1
    operator_input.follow_grip(np.float32([0, 0, 0, 0.7]))  # the policy has closed it
    assert operator_input.read().action[3] == 1


def test_a_grip_that_was_just_toggled_is_not_undone_by_whoever_acted_meanwhile() -> None:
    operator_input = OperatorInput(AXES)
    tell(operator_input, "grip")
    operator_input.follow_grip(np.float32([0, 0, 0, -1.0]))  # the policy's step was still being executed
    push(operator_input, 1.0)
    assert operator_input.read().action[3] == 1
    operator_input.follow_grip(np.float32([0, 0, 0, -1.0]))
    assert operator_input.read().action[3] == -1


def test_a_verdict_is_said_once_and_not_of_the_next_episode() -> None:
    operator_input = OperatorInput(AXES)
    tell(operator_input, "success", ago_s=0.31)  # too late to count
    assert operator_input.read().verdict is None
    tell(operator_input, "failure", ago_s=0.29)
    assert operator_input.read().verdict is False
    assert operator_input.read().verdict is None
    tell(operator_input, "success")
    push(operator_input, 1.0)
    assert operator_input.read().verdict is True
    tell(operator_input, "success")
    operator_input.begin()
    assert operator_input.read().verdict is None


@pytest.mark.parametrize("to_the_end", [True, False])
def test_a_demonstration_can_be_discarded_once_it_has_begun(to_the_end: bool) -> None:
    operator_input = OperatorInput(AXES, to_the_end=to_the_end)
    tell(operator_input, "discard")  # there is nothing yet
    push(operator_input, 1.0)
    assert not operator_input.read().discard
    tell(operator_input, "discard")
    assert operator_input.read().discard is to_the_end
    assert not operator_input.read().discard
    tell(operator_input, "discard")
    operator_input.begin()
    push(operator_input, 0.5)
    assert not operator_input.read().discard


def test_to_the_end_begins_with_the_first_act_and_then_rests() -> None:
    operator_input = OperatorInput(AXES, expiry_s=0.1, to_the_end=True)
    assert operator_input.read().action is None
    push(operator_input, 1.0)
    tell(operator_input, "grip")
    assert operator_input.read().action.tolist() == [1, 0, 0, 1]
    clock.sleep(0.12)
    assert operator_input.read().action.tolist() == [0, 0, 0, 1]  # it moves no more, and drops nothing
    assert operator_input.driving
    operator_input.begin()
    assert operator_input.read().action is None


def test_an_expiry_that_makes_no_sense_is_refused() -> None:
    with pytest.raises(DeviceError, match=r"expiry_s: expected 0.05 to 5 seconds, got int 0"):
        OperatorInput(AXES, expiry_s=0)
