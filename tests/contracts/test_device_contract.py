"""The contract of Device: a browser page over a real socket, a SpaceMouse read from a pipe, and the two scripts.

The SpaceMouse is read in a process of its own, because hidapi is loaded when a process starts; `PipedMouse` passes the
calls of the control loop to it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.unit.envs.teleop.pipe_mouse import Mouse, build_library
from tests.waiting import wait_for

from understudy.core import ArraySpec, Source, Spec, StepSpec
from understudy.envs.teleop import AlwaysScript, Device, Reading, ScriptedHuman, Takeover, TakeoverError
from understudy.envs.teleop.browser import BrowserDevice
from understudy.envs.teleop.spacemouse import SpaceMouseDevice

SPEC = StepSpec(
    observation=Spec({"state": ArraySpec(shape=(1,), dtype="float32")}),
    action=Spec(ArraySpec(shape=(4,), dtype="float32", low=-1, high=1)),
)
PROPOSAL = np.full(4, 0.25, np.float32)
EXPERT = np.array([0, 0.5, 0, -1], np.float32)
EXPIRY_S = 2.0


@dataclass(frozen=True, kw_only=True)
class Operated:
    """A device and what its operator does; `push` is repeated while something is held."""

    device: Device
    push: Callable[[], None]
    let_go: Callable[[], None]
    close: Callable[[], None]
    toggle_grip: Callable[[], None] | None = None
    mark_success: Callable[[], None] | None = None


class PipedMouse:
    """The device in the mouse's process, as a Device of this one."""

    source = SpaceMouseDevice.source

    def __init__(self, mouse: Mouse):
        self._mouse = mouse

    def begin(self) -> None:
        self._mouse.read("begin")

    def read(self) -> Reading:
        action, verdict = self._mouse.read("verdict")
        return Reading(action=None if action is None else np.array(action, np.float32), verdict=verdict)

    def close(self) -> None:
        """With the process."""


def operate_mouse(library: Path, directory: Path, **options: Any) -> Operated:
    mouse = Mouse(library, directory, size=4, speed=1.0, expiry_s=EXPIRY_S, **options)

    def press_and_release(**button: bool) -> None:
        mouse.press(**button)
        mouse.press()

    return Operated(
        device=PipedMouse(mouse),
        push=lambda: mouse.push(y=-350),
        let_go=mouse.push,
        close=mouse.close,
        toggle_grip=lambda: press_and_release(left=True),
        mark_success=lambda: press_and_release(right=True),
    )


def operate_browser(**options: Any) -> Operated:
    pytest.importorskip("websockets")
    from tests.unit.envs.teleop.page import Page

    undo = ExitStack()
    device = undo.enter_context(BrowserDevice(SPEC, speed=1.0, expiry_s=EXPIRY_S, **options))
    page = undo.enter_context(Page(device))

    def press_and_release(key: str) -> None:
        page.press(key)
        page.press()

    return Operated(
        device=device,
        push=lambda: page.press("KeyW"),
        let_go=page.press,
        close=undo.close,
        toggle_grip=lambda: press_and_release("KeyG"),
        mark_success=lambda: press_and_release("Enter"),
    )


def operate_human() -> Operated:
    """Its operator pushes when there is no progress."""
    progress = [0.0, 1.0]  # and how much it rises with each reading

    def rising() -> float:
        progress[0] += progress[1]
        return progress[0]

    def set_speed(speed: float) -> None:
        progress[1] = speed

    device = ScriptedHuman(lambda: EXPERT, rising, patience_steps=2, burst_steps=1)
    return Operated(
        device=device, push=lambda: set_speed(0.0), let_go=lambda: set_speed(1.0), close=lambda: device.close()
    )


def operate_script() -> Operated:
    device = AlwaysScript(lambda: EXPERT)
    return Operated(device=device, push=lambda: None, let_go=lambda: None, close=device.close)


SOURCES = {
    "BrowserDevice": Source.HUMAN,
    "SpaceMouseDevice": Source.HUMAN,
    "ScriptedHuman": Source.HUMAN,
    "AlwaysScript": Source.SCRIPT,
}
OPERATORS = ["BrowserDevice", "SpaceMouseDevice"]  # a human holds them
RELEASED = [*OPERATORS, "ScriptedHuman"]  # with these the policy acts, too


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_library(tmp_path_factory.mktemp("hidapi"))


@pytest.fixture(scope="module")
def make(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Operated]]:
    with ExitStack() as undo:

        def made(name: str, **options: Any) -> Operated:
            if name == "BrowserDevice":
                operated = operate_browser(**options)
            elif name == "SpaceMouseDevice":
                library = request.getfixturevalue("library")
                operated = operate_mouse(library, tmp_path_factory.mktemp("mouse"), **options)
            else:
                operated = {"ScriptedHuman": operate_human, "AlwaysScript": operate_script}[name]()
            undo.callback(operated.close)
            return operated

        yield made


@pytest.fixture(scope="module")
def opened(make: Callable[..., Operated]) -> dict[str, Operated]:
    """Devices that are made once, by name."""
    return {}


@pytest.fixture(params=SOURCES)
def operated(request: pytest.FixtureRequest, make: Callable[..., Operated], opened: dict[str, Operated]) -> Operated:
    """A device that nobody touches, at the beginning of an episode."""
    name = request.param
    if name not in opened:
        opened[name] = make(name)
    found = opened[name]
    found.let_go()
    if name in RELEASED:
        wait_for(lambda: found.device.read().action is None)
    found.device.begin()
    return found


def pushed(operated: Operated) -> Reading:
    """The first reading in which the operator, who keeps pushing, is in control."""

    def read() -> Reading | None:
        operated.push()
        reading = operated.device.read()
        return None if reading.action is None else reading

    found = wait_for(read)
    assert found is not None
    return found


def test_its_steps_have_its_source(operated: Operated, request: pytest.FixtureRequest) -> None:
    assert operated.device.source is SOURCES[request.node.callspec.params["operated"]]


def test_an_action_fits_the_spec(operated: Operated) -> None:
    reading = pushed(operated)
    SPEC.action.check(reading.action, "action")
    assert reading.action.tolist() == [0, pytest.approx(1.0), 0, -1] or reading.action is EXPERT
    assert reading.verdict is None
    assert reading.since_s is None or reading.since_s <= time.monotonic()


def test_takeovers_are_marked_with_its_source(operated: Operated) -> None:
    takeover = Takeover(operated.device, operator="ada")
    takeover.begin()

    def chosen() -> Any:
        operated.push()
        choice = takeover.choose(PROPOSAL)
        assert choice.proposal is PROPOSAL
        if choice.source is Source.POLICY:
            assert choice.action is PROPOSAL
            return None
        return choice

    choice = wait_for(chosen)
    assert choice.source is operated.device.source
    assert choice.action is not PROPOSAL
    assert choice.began
    assert takeover.summary.count == 1


@pytest.mark.parametrize("operated", RELEASED, indirect=True)
def test_untouched_it_leaves_the_action_to_the_policy(operated: Operated) -> None:
    for _ in range(20):
        assert operated.device.read() == Reading()
    takeover = Takeover(operated.device)
    assert takeover.choose(PROPOSAL).source is Source.POLICY
    with pytest.raises(TakeoverError, match="use a device that acts to the end"):
        takeover.choose(None)


@pytest.mark.parametrize("operated", RELEASED, indirect=True)
def test_let_go_it_gives_back(operated: Operated) -> None:
    for _ in range(2):
        pushed(operated)
        operated.let_go()
        wait_for(lambda: operated.device.read().action is None)


@pytest.mark.parametrize("operated", OPERATORS, indirect=True)
def test_silence_counts_as_letting_go(operated: Operated) -> None:
    pushed(operated)
    before_s = time.monotonic()
    wait_for(lambda: operated.device.read().action is None)  # the last push was never taken back
    assert time.monotonic() - before_s > EXPIRY_S / 4


@pytest.mark.parametrize("operated", OPERATORS, indirect=True)
def test_a_verdict_is_read_once(operated: Operated) -> None:
    assert operated.mark_success is not None
    operated.mark_success()
    assert wait_for(lambda: operated.device.read().verdict) is True
    assert operated.device.read().verdict is None


@pytest.mark.parametrize("operated", OPERATORS, indirect=True)
def test_an_episode_begins_with_an_open_grip(operated: Operated) -> None:
    assert operated.toggle_grip is not None
    operated.toggle_grip()
    wait_for(lambda: pushed(operated).action[3] == 1)
    operated.let_go()
    wait_for(lambda: operated.device.read().action is None)
    operated.device.begin()
    assert pushed(operated).action[3] == -1


def test_begin_may_be_called_at_any_time(operated: Operated) -> None:
    pushed(operated)
    operated.device.begin()
    operated.device.begin()
    pushed(operated)


@pytest.mark.parametrize("name", OPERATORS)
def test_to_the_end_of_the_episode_means_that(name: str, make: Callable[..., Operated]) -> None:
    operated = make(name, to_the_end=True)
    operated.device.begin()
    assert operated.device.read() == Reading()  # nobody has begun
    pushed(operated)
    operated.let_go()
    wait_for(lambda: not any(operated.device.read().action[:3]))  # it rests, and does not give back
    time.sleep(EXPIRY_S)
    assert operated.device.read().action.tolist() == [0, 0, 0, -1]
    operated.device.begin()
    assert operated.device.read() == Reading()


@pytest.mark.parametrize("name", [name for name in SOURCES if name != "SpaceMouseDevice"])
def test_close_may_be_called_twice(name: str, make: Callable[..., Operated]) -> None:
    """The other process does the same with the SpaceMouse, and `Mouse.close` checks its exit status."""
    operated = make(name)
    pushed(operated)
    operated.device.close()
    operated.device.close()
    if name == "BrowserDevice":
        wait_for(lambda: operated.device.read().action is None)
