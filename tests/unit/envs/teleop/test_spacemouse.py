"""SpaceMouseDevice: the mapping as pure functions, and the device down to the library that reads the USB.

There is no SpaceMouse here, and no kernel that would make a virtual one: reports come through a pipe (hidapi_pipe.c).
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.unit.envs.teleop.pipe_mouse import Mouse, build_library

from understudy.core import ArraySpec, Spec, StepSpec
from understudy.envs.teleop.axes import Axes, DeviceError
from understudy.envs.teleop.spacemouse import CAP, SpaceMouseDevice, pushes


def spec(size: int) -> StepSpec:
    return StepSpec(
        observation=Spec({"state": ArraySpec(shape=(1,), dtype="float32")}),
        action=Spec(ArraySpec(shape=(size,), dtype="float32", low=-1, high=1)),
    )


def cap(**pushed: float) -> dict[str, float]:
    return {name: pushed.get(name, 0.0) for name in CAP}


def test_the_cap_pushes_the_axes_of_its_names() -> None:
    seven = Axes.of(spec(7).action)
    found = pushes(cap(x=1, yaw=-1, z=0.05), seven, dead_zone=0.1, speed=0.5)
    assert found == {"x": 0.5, "y": 0, "z": 0, "roll": 0, "pitch": 0, "yaw": -0.5}
    four = pushes(cap(y=0.55, roll=1), Axes.of(spec(4).action), dead_zone=0.1, speed=1.0)
    assert four == {"x": 0, "y": pytest.approx(0.5), "z": 0}
    assert pushes(cap(y=0.05), Axes.of(spec(4).action), dead_zone=0.0, speed=1.0)["y"] == 0.05


def test_what_makes_no_sense_is_refused() -> None:
    with pytest.raises(DeviceError, match="speed: expected more than 0 and up to 1, got int 0"):
        SpaceMouseDevice(spec(4), speed=0)
    with pytest.raises(DeviceError, match="dead_zone: expected 0 or more and less than 1, got int 1"):
        SpaceMouseDevice(spec(4), dead_zone=1)
    with pytest.raises(DeviceError, match="names: expected some of x, y, z, roll, pitch, yaw, got axis 1, axis 2"):
        SpaceMouseDevice(spec(5))


def test_the_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyspacemouse", None)
    with pytest.raises(DeviceError, match=r"pip install 'understudy-robotics\[spacemouse\]'"):
        SpaceMouseDevice(spec(4))


def test_the_missing_device_is_named() -> None:
    pytest.importorskip("pyspacemouse")
    if os.path.isdir("/sys/class/hidraw") and os.listdir("/sys/class/hidraw"):  # noqa: PTH112, PTH208
        pytest.skip("there are HID devices here, and one of them may be a SpaceMouse")
    with pytest.raises(DeviceError, match=r"no SpaceMouse can be opened .*udev rule is in docs/teleoperation.md"):
        SpaceMouseDevice(spec(4))


# ---- the device, from its reports on


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_library(tmp_path_factory.mktemp("hidapi"))


@pytest.fixture
def mouse(library: Path, tmp_path: Path) -> Iterator[Callable[..., Mouse]]:
    made: list[Mouse] = []

    def make(**options: Any) -> Mouse:
        made.append(Mouse(library, tmp_path, **options))
        return made[-1]

    yield make
    for one in made:
        one.close()


def test_the_cap_takes_over_and_gives_back(mouse: Callable[..., Mouse]) -> None:
    held = mouse(dead_zone=0.0, speed=1.0)
    assert held.read() == (None, True)
    held.push(x=350)  # right
    assert held.until(bool) == [1, 0, 0, 0, 0, 0, -1]
    held.push(y=-175)  # away from the person, which the device calls less
    assert held.until(lambda action: action is not None and not action[0]) == [0, 0.5, 0, 0, 0, 0, -1]
    held.push(z=-350)  # up
    assert held.until(lambda action: action is not None and not action[1]) == [0, 0, 1, 0, 0, 0, -1]
    held.push()
    assert held.until(lambda action: action is None) is None
    held.turn(z=-350)  # to the left, seen from above
    assert held.until(bool) == [0, 0, 0, 0, 0, 1, -1]
    held.turn(x=350)
    assert held.until(lambda action: action is not None and not action[5]) == [0, 0, 0, 1, 0, 0, -1]


def test_within_the_dead_zone_the_policy_acts(mouse: Callable[..., Mouse]) -> None:
    held = mouse(dead_zone=0.2)
    held.push(x=69)
    time.sleep(0.1)
    assert held.read()[0] is None
    held.push(x=350)
    assert held.until(bool) == [0.5, 0, 0, 0, 0, 0, -1]


def test_the_first_button_toggles_the_grip(mouse: Callable[..., Mouse]) -> None:
    held = mouse(size=4)
    held.press(left=True)
    assert held.until(bool) == [0, 0, 0, 1]
    held.press()
    held.until(lambda action: action is None)
    held.press(left=True)
    assert held.until(bool) == [0, 0, 0, -1]


@pytest.mark.serial
@pytest.mark.parametrize(("seconds", "verdict"), [(0.1, True), (2.0, False)])
def test_the_second_button_is_the_verdict(mouse: Callable[..., Mouse], seconds: float, verdict: bool) -> None:
    held = mouse()
    held.press(right=True)
    time.sleep(seconds)
    assert held.read("verdict") == (None, None)
    held.press()
    end_s = time.monotonic() + 5
    while (said := held.read("verdict"))[1] is None:
        assert time.monotonic() < end_s
    assert said == (None, verdict)


def test_without_a_grip_the_first_button_does_nothing(mouse: Callable[..., Mouse]) -> None:
    held = mouse(size=6)
    held.press(left=True)
    time.sleep(0.1)
    assert held.read()[0] is None


@pytest.mark.serial
def test_a_cap_that_falls_silent_loses_control(mouse: Callable[..., Mouse]) -> None:
    held = mouse(expiry_s=0.2)
    taken_s = []
    for _ in range(3):
        held.push(x=350)
        held.until(bool)
        start_s = time.monotonic()
        held.until(lambda action: action is None)
        taken_s.append(time.monotonic() - start_s)
    assert min(taken_s) > 0.1
    assert min(taken_s) < 0.3  # this process may be late itself


def test_a_pulled_cable_is_noticed(mouse: Callable[..., Mouse]) -> None:
    held = mouse(to_the_end=True, high_closes=False)
    held.push(x=350)
    assert held.until(bool) == [0.5, 0, 0, 0, 0, 0, 1]
    held.pull_the_cable()
    assert held.until(lambda action: action is not None and not action[0]) == [0, 0, 0, 0, 0, 0, 1]  # it rests
    assert not held.read()[1]
    assert held.read("begin")[0] is None
