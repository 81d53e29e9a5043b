"""Who acts besides a policy: a person at a browser page or a SpaceMouse; what several commands share."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any, Literal, TypeAlias

from rich.console import Console

from understudy.cli.console import with_extra
from understudy.core import UnderstudyError
from understudy.envs.pace import Pace
from understudy.envs.teleop.takeover import Device
from understudy.envs.world import World
from understudy.training.data.run_episode import Show
from understudy.web.access import is_loopback
from understudy.web.tokens import new_token

Person: TypeAlias = Literal["browser", "spacemouse"]

PERSON_HZ = 10.0  # the control rate of a world that has none of its own, when a person drives
PAGE = "127.0.0.1:7448"


def open_page(undo: ExitStack, console: Console, world: World, address: str | None, **options: Any) -> Any:
    """The page with live pictures and keys, at host:port: a BrowserDevice. Off loopback its url has a new token."""
    host, port = split_address(address or PAGE)
    token = None if is_loopback(host) else new_token()
    browser = with_extra("understudy.envs.teleop.browser", "web")
    page = browser.BrowserDevice(world.step_spec, host=host, port=port, token=token, **options)
    undo.callback(page.close)
    console.print(f"the page: {page.url}", style="bold", soft_wrap=True, markup=False)
    return page


def split_address(address: str) -> tuple[str, int]:
    """Host and port of a page."""
    host, colon, port = address.rpartition(":")
    if not (host and colon and port.isdigit()):
        raise UnderstudyError(f"page: expected host:port, such as {PAGE}, got {address!r}")
    return host.strip("[]"), int(port)


def open_operator_input(
    undo: ExitStack, console: Console, world: World, person: Person, page: str | None, *, to_the_end: bool
) -> tuple[Device, Show | None]:
    """A person's device, and the page that shows what is seen, if there is one; a browser needs one.

    With `to_the_end` the person acts from the first touch to the end of the episode, as in a demonstration.
    """
    if person == "browser":
        browser = open_page(undo, console, world, page, to_the_end=to_the_end)
        return browser, browser.show
    show: Show | None = None if page is None else open_page(undo, console, world, page, watch_only=True).show
    spacemouse = with_extra("understudy.envs.teleop.spacemouse", "spacemouse")
    device: Device = spacemouse.SpaceMouseDevice(world.step_spec, to_the_end=to_the_end)
    undo.callback(device.close)
    return device, show


def open_pace(world: World, hz: float | None, *, person: bool) -> Pace | None:
    """The rate of the loop: the one that is asked for, or a person's; None if the world keeps its own, or none is."""
    if world.hz is not None:
        if hz is not None:
            raise UnderstudyError(
                f"hz: this world keeps {world.hz:g} Hz itself; ask for another in its name, as ?hz={hz:g}"
            )
        return None
    if hz is None and not person:
        return None
    return Pace(hz or PERSON_HZ)
