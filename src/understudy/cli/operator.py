"""The human operator at a browser page or a SpaceMouse: device, page and control rate, which several commands share."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any, Literal, TypeAlias

from rich.console import Console

from understudy.cli.console import print_page, with_extra
from understudy.core import UnderstudyError
from understudy.envs.pace import Pace
from understudy.envs.teleop.takeover import Device
from understudy.envs.world import World
from understudy.web.access import is_loopback
from understudy.web.tokens import new_token

HumanDevice: TypeAlias = Literal["browser", "spacemouse"]

HUMAN_HZ = 10.0  # the control rate with a human operator, if the world has none of its own
PAGE = "127.0.0.1:7448"


def open_page(stack: ExitStack, console: Console, world: World, address: str | None, **options: Any) -> Any:
    """Serve the page with camera images and keys: a BrowserDevice. Off loopback its URL has a new token."""
    host, port = split_address(address or PAGE)
    token = None if is_loopback(host) else new_token()
    browser = with_extra("understudy.envs.teleop.browser", "web")
    page = browser.BrowserDevice(
        world.step_spec, host=host, port=port, or_any_free=address is None, token=token, **options
    )
    stack.callback(page.close)
    print_page(console, page.url, page.port, port)
    return page


def split_address(address: str) -> tuple[str, int]:
    """Host and port of a page."""
    host, colon, port = address.rpartition(":")
    if not (host and colon and port.isdigit()):
        raise UnderstudyError(f"page: expected host:port, such as {PAGE}, got {address!r}")
    return host.strip("[]"), int(port)


def open_operator_input(
    stack: ExitStack, console: Console, world: World, human: HumanDevice, page: str | None, *, to_the_end: bool
) -> tuple[Device, Any]:
    """The operator's device, and the page that shows observations, a BrowserDevice; None without a page.

    With `to_the_end` the operator acts from the first input to the end of the episode, as in a demonstration.
    """
    if human == "browser":
        browser = open_page(stack, console, world, page, to_the_end=to_the_end)
        return browser, browser
    shown = None if page is None else open_page(stack, console, world, page, watch_only=True)
    spacemouse = with_extra("understudy.envs.teleop.spacemouse", "spacemouse")
    device: Device = spacemouse.SpaceMouseDevice(world.step_spec, to_the_end=to_the_end)
    stack.callback(device.close)
    return device, shown


def open_pace(world: World, hz: float | None, *, human: bool) -> Pace | None:
    """The control rate: `hz`, or HUMAN_HZ with a human; None if the world has its own rate, or there is no limit."""
    if world.hz is not None:
        if hz is not None:
            raise UnderstudyError(
                f"hz: this world has its own rate of {world.hz:g} Hz; set another in its name, as ?hz={hz:g}"
            )
        return None
    if hz is None and not human:
        return None
    return Pace(hz or HUMAN_HZ)
