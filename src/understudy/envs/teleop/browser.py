"""BrowserDevice: a web page that shows the cameras and lets an operator drive with keys, a gamepad or touch.

    with BrowserDevice(world.step_spec, port=8100) as device:
        print(device.url)
        run_episode(world, writer, act=act, takeover=Takeover(device), show=device.show)

`read` and `show` never block: the page's server runs in a thread of its own (`browser_server`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from understudy.core import Source, StepSpec, Tree
from understudy.core import tree as trees
from understudy.core.closeable import Closeable
from understudy.core.spec import describe
from understudy.envs.teleop.axes import NO_AXES, Axes, DeviceError
from understudy.envs.teleop.browser_server import Frame, Image, PageServer
from understudy.envs.teleop.key_bindings import KeyBindings
from understudy.envs.teleop.operator_input import EXPIRY_S, OperatorInput
from understudy.envs.teleop.takeover import Reading

MAX_SIDE = 512  # pixels of an image; of a larger one, every second or third pixel is sent


class BrowserDevice(Closeable):
    """A page at `url`, served from construction to `close`.

    One operator drives and others watch. With `or_any_free`, a `port` that is taken is replaced by a free one. Any
    address other than loopback needs a `token`, which is part of `url`. `hosts` are further host names of the page, for
    example behind a proxy. `names` and `high_closes` say what the numbers of the action mean, and `speed` (up to 1) is
    the speed at the start. With `to_the_end`, an operator who has begun to act stays in control until the episode ends,
    and can discard it. Input older than `expiry_s` is ignored. With `watch_only` the page only shows the cameras, for
    any action, and nobody can drive.
    """

    source = Source.HUMAN

    def __init__(
        self,
        step_spec: StepSpec,
        *,
        port: int = 0,
        or_any_free: bool = False,
        host: str = "127.0.0.1",
        token: str | None = None,
        hosts: Sequence[str] = (),
        names: Sequence[str] | None = None,
        high_closes: bool = True,
        speed: float = 0.5,
        expiry_s: float = EXPIRY_S,
        to_the_end: bool = False,
        watch_only: bool = False,
    ):
        if not 0 < speed <= 1:
            raise DeviceError(f"speed: expected more than 0 and up to 1, got {describe(speed)}")
        axes = NO_AXES if watch_only else Axes.of(step_spec.action, names=names, high_closes=high_closes)
        self._operator_input = OperatorInput(axes, expiry_s=expiry_s, to_the_end=to_the_end)
        self._cameras = [
            path
            for path, leaf in step_spec.observation.leaves()
            if leaf.dtype == "uint8" and len(leaf.shape) == 3 and leaf.shape[-1] == 3
        ]
        self._farewell = ""
        self._acted = False  # whether the operator acted in the last reading
        self._num_frames = 0
        self._num_episodes = 0
        self._server = PageServer(
            KeyBindings.of(axes),
            self._operator_input,
            host=host,
            port=port,
            or_any_free=or_any_free,
            token=token,
            hosts=hosts,
            speed=speed,
            expiry_s=expiry_s,
        )

    @property
    def url(self) -> str:
        """The address to open in a browser. A token is in its fragment, which browsers do not send."""
        return self._server.url

    @property
    def port(self) -> int:
        """The TCP port that it listens on."""
        return self._server.port

    @property
    def connected(self) -> bool:
        """Whether a page is open that can drive."""
        return self._server.connected

    def begin(self) -> None:
        """An episode begins: the grip counts as open, and there is no verdict."""
        self._num_episodes += 1
        self._operator_input.begin()

    def read(self) -> Reading:
        reading = self._operator_input.read()
        self._acted = reading.action is not None
        return reading

    def show(self, observation: Tree, info: Mapping[str, Any]) -> None:
        """Show an observation's cameras and `info` on the page.

        The page has fields for task, instruction, episode, step, source, successes and reward, and lists every other
        text or number but `success`. `action`, the executed one, is not shown: while the policy acts, the grip follows
        it, so that a takeover does not drop the object.
        """
        shown = dict(info)
        action = shown.pop("action", None)
        if action is not None and not self._acted:
            self._operator_input.follow_grip(action)
        self._num_frames += 1
        flat = trees.flatten(observation)
        self._server.publish(
            Frame(
                number=self._num_frames,
                episode=self._num_episodes,
                images=tuple(_image(path, flat[path]) for path in self._cameras),
                pushes=dict(self._operator_input.pushes),
                info={name: plain for name, value in shown.items() if (plain := _plain(value)) is not None},
            )
        )

    def finish(self, farewell: str) -> None:
        """The work is done: open pages show `farewell` (up to 120 characters) when `close` has stopped the server."""
        self._farewell = farewell

    def close(self) -> None:
        """Stop the page's server; open pages show that it has ended."""
        self._server.close(self._farewell)


def _image(path: str, pixels: np.ndarray[Any, Any]) -> Image:
    """Copy the pixels, because the caller may overwrite the array."""
    stride = math.ceil(max(pixels.shape[:2]) / MAX_SIDE)
    seen = pixels[::stride, ::stride]
    return Image(name=path, height=seen.shape[0], width=seen.shape[1], pixels=seen.tobytes())


def _plain(value: Any) -> str | float | bool | None:
    """The value as JSON can hold it, or None."""
    if isinstance(value, Source):
        return value.name.lower()
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value if isinstance(value, str | bool | int | float) else None
