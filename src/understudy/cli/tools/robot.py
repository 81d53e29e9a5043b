"""`understudy robot`: serves a robot arm over HTTP, simulated or real."""

from __future__ import annotations

import contextlib
import logging
import sys
import time
from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console

from understudy.cli.console import with_extra
from understudy.core.errors import UnderstudyError
from understudy.processes.python_path import import_object
from understudy.processes.stop import stop_on_signals
from understudy.robots import Arm, ArmError
from understudy.web.tokens import read_token


def simulate(
    *,
    host: str = "127.0.0.1",
    port: int = 5000,
    scene_port: int = 5001,
    token_file: Path | None = None,
    rate_hz: float = 200.0,
    image_size: int = 128,
) -> int:
    """Serve a simulated Franka arm at a table with a cube, in real time, with the interface of a real arm.

    Stop with Ctrl-C.

    Args:
        host: Address to listen on; all but loopback addresses need --token-file.
        port: TCP port of the arm; 0 takes any free port.
        scene_port: TCP port of the cameras and the cube; 0 takes any free port.
        token_file: File with the token that clients must send, of at least 16 characters.
        rate_hz: Rate of the control loop, which moves the arm and checks its limits, in Hz.
        image_size: Width and height of the camera images in pixels.
    """
    franka = with_extra("understudy.robots.franka", "robot")
    scenes = with_extra("understudy.robots.scene", "robot")
    server = with_extra("understudy.robots.server", "robot")
    with contextlib.ExitStack() as stack:
        try:
            arm = franka.SimulatedFranka()
        except ModuleNotFoundError:
            raise UnderstudyError("mujoco is not installed; run `pip install 'understudy-robotics[robot]'`") from None
        stack.callback(arm.close)
        cameras = scenes.SceneCameras(arm, size=image_size)
        stack.callback(cameras.close)
        app = scenes.make_scene_app(arm, cameras)
        listener = server.ProgramServer(
            app, host=host, port=scene_port, token=None if token_file is None else read_token(token_file)
        )
        stack.callback(listener.close)
        return _serve(
            arm,
            stack,
            lines=[f"cameras and cube at {listener.url}"],
            host=host,
            port=port,
            token_file=token_file,
            rate_hz=rate_hz,
            scene=listener.url,
        )


def serve(
    backend: Annotated[str, tyro.conf.Positional],
    *,
    host: str = "127.0.0.1",
    port: int = 5000,
    token_file: Path | None = None,
    rate_hz: float = 200.0,
) -> int:
    """Serve your own arm: a Python class with five methods, which docs/robots.md describes.

    Stop with Ctrl-C; the arm stands still when it is released.

    Args:
        backend: Class of the arm as module:Class, which is called without arguments.
        host: Address to listen on; all but loopback addresses need --token-file.
        port: TCP port to listen on; 0 takes any free port.
        token_file: File with the token that clients must send, of at least 16 characters.
        rate_hz: Rate of the control loop, which moves the arm and checks its limits, in Hz.
    """
    with_extra("understudy.robots.server", "robot")
    with contextlib.ExitStack() as stack:
        arm = _build(backend)
        stack.callback(arm.close)
        return _serve(arm, stack, lines=[], host=host, port=port, token_file=token_file, rate_hz=rate_hz, scene=None)


def _serve(
    arm: Arm,
    stack: contextlib.ExitStack,
    *,
    lines: list[str],
    host: str,
    port: int,
    token_file: Path | None,
    rate_hz: float,
    scene: str | None,
) -> int:
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(message)s")
    console = Console(highlight=False)
    # Threads share one interpreter: a request that is worked on gives way to the control loop after 1 ms, not 5.
    stack.callback(sys.setswitchinterval, sys.getswitchinterval())
    sys.setswitchinterval(0.001)
    server = stack.enter_context(
        with_extra("understudy.robots.server", "robot").ArmServer(
            arm,
            host=host,
            port=port,
            token=None if token_file is None else read_token(token_file),
            rate_hz=rate_hz,
            scene=scene,
        )
    )
    stop = stack.enter_context(stop_on_signals(ends_at_once=True))
    limits = arm.limits
    console.print(f"arm at {server.url}", *lines, sep="\n", soft_wrap=True)
    console.print(
        f"box {list(limits.low)} to {list(limits.high)} m, up to {limits.max_speed:g} m/s and "
        f"{limits.max_turn_speed:g} rad/s; stops {limits.heartbeat_s:g} s after its client's last sign of life",
        soft_wrap=True,
    )
    while not stop.requested:
        time.sleep(0.2)
    health = server.control.health
    console.print(
        f"stopped; control ran at {health.measured_hz:.0f} of {health.rate_hz:g} Hz, late p99 "
        f"{health.late_p99_s * 1e3:.1f} ms, {health.num_missed} of {health.num_ticks} deadlines missed",
        soft_wrap=True,
    )
    return 0


def _build(backend: str) -> Arm:
    module, colon, name = backend.partition(":")
    if not (module and colon and name):
        raise ArmError(f"backend: expected module:Class, got {backend!r}; docs/robots.md has an example")
    found = import_object(backend, ArmError)
    arm = found()
    if not isinstance(arm, Arm):
        raise ArmError(f"backend: expected {backend!r} to be a subclass of understudy.robots.Arm, got {type(arm)}")
    return arm
