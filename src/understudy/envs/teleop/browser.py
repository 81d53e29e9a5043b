"""BrowserDevice: a page in a browser, on which people see the cameras and drive with keys, a gamepad or a finger.

    with BrowserDevice(world.step_spec, port=8100) as device:
        print(device.url)
        run_episode(world, writer, act=act, takeover=Takeover(device), show=device.show)

`read` and `show` never wait: the page's server lives in a thread of its own (`browser_server`).
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

MAX_SIDE = 512  # of an image; of a larger one, every second pixel is sent, or every third


class BrowserDevice(Closeable):
    """A page at `url`, served from the moment this is made until `close`.

    One person drives and others watch. Off loopback a `token` is needed, which `url` carries. `hosts` are further
    names under which the page is reached, as behind a proxy. `names` and `high_closes` say what the numbers of the
    action mean, `speed` (up to 1) how fast it begins, `to_the_end` that a person who has begun to act is in control
    to the end of the episode. Input that is older than `expiry_s` counts for nothing. With `watch_only` the page is a
    screen, whatever the action is, and nobody can drive.
    """

    source = Source.HUMAN

    def __init__(
        self,
        step_spec: StepSpec,
        *,
        port: int = 0,
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
        self._acted = False  # by the person, when last read
        self._num_frames = 0
        self._num_episodes = 0
        self._server = PageServer(
            KeyBindings.of(axes),
            self._operator_input,
            host=host,
            port=port,
            token=token,
            hosts=hosts,
            speed=speed,
            expiry_s=expiry_s,
        )

    @property
    def url(self) -> str:
        """What to open in a browser; with the token, if there is one, in the part that is sent to nobody."""
        return self._server.url

    @property
    def connected(self) -> bool:
        """Whether somebody has the page open and could drive."""
        return self._server.connected

    def begin(self) -> None:
        """An episode begins: the fingers are taken to be open, and no verdict stands."""
        self._num_episodes += 1
        self._operator_input.begin()

    def read(self) -> Reading:
        reading = self._operator_input.read()
        self._acted = reading.action is not None
        return reading

    def show(self, observation: Tree, info: Mapping[str, Any]) -> None:
        """Give the page something to show: the cameras of an observation, and what to say about it.

        Of `info`, the page knows task, instruction, episode, step, source, successes, reward and success, and lists
        what else is text or a number. `action`, the one that was executed, is not shown: while somebody else acts, the
        grip follows it, so that taking over drops nothing.
        """
        said = dict(info)
        action = said.pop("action", None)
        if action is not None and not self._acted:
            self._operator_input.follow(action)
        self._num_frames += 1
        flat = trees.flatten(observation)
        self._server.publish(
            Frame(
                number=self._num_frames,
                life=self._num_episodes,
                images=tuple(_image(path, flat[path]) for path in self._cameras),
                pushes=dict(self._operator_input.pushes),
                info={name: plain for name, value in said.items() if (plain := _plain(value)) is not None},
            )
        )

    def close(self) -> None:
        """End the page's server; open pages say so."""
        self._server.close()


def _image(path: str, pixels: np.ndarray[Any, Any]) -> Image:
    """A copy, since the caller may go on to write into the array."""
    stride = math.ceil(max(pixels.shape[:2]) / MAX_SIDE)
    seen = pixels[::stride, ::stride]
    return Image(name=path, height=seen.shape[0], width=seen.shape[1], pixels=seen.tobytes())


def _plain(value: Any) -> str | float | bool | None:
    """What JSON can carry of a value; None if that is nothing."""
    if isinstance(value, Source):
        return value.name.lower()
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value if isinstance(value, str | bool | int | float) else None
