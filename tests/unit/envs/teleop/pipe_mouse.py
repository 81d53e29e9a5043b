"""A SpaceMouse whose reports come through a pipe (hidapi_pipe.c): all of the device but the USB is real."""

from __future__ import annotations

import json
import os
import shutil
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

PROGRAM = """
import json, sys
from understudy.core import ArraySpec, Spec, StepSpec
from understudy.envs.teleop.spacemouse import SpaceMouseDevice

options = json.loads(sys.argv[1])
spec = StepSpec(
    observation=Spec({"state": ArraySpec(shape=(1,), dtype="float32")}),
    action=Spec(ArraySpec(shape=(options.pop("size"),), dtype="float32", low=-1, high=1)),
)
with SpaceMouseDevice(spec, **options) as device:
    for line in sys.stdin:
        if line == "begin\\n":
            device.begin()
        reading = device.read()
        action = None if reading.action is None else reading.action.tolist()
        print(json.dumps([action, reading.verdict if line == "verdict\\n" else device.connected]), flush=True)
device.close()  # a second time: nothing happens
assert device.read().action is None or options.get("to_the_end")
"""


def build_library(place: Path) -> Path:
    """Compile the stand-in for hidapi into a directory, which it returns; skips the test if that cannot be done."""
    pytest.importorskip("pyspacemouse")
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("there is no C compiler")
    soname = "libhidapi-hidraw.so.0"
    source = Path(__file__).with_name("hidapi_pipe.c")
    subprocess.run(
        [compiler, "-shared", "-fPIC", "-Wall", "-Werror", f"-Wl,-soname,{soname}", "-o", place / soname, source],
        check=True,
    )
    (place / "libhidapi-hidraw.so").symlink_to(soname)
    return place


class Mouse:
    """A SpaceNavigator in somebody's hand, and a control loop in another process that reads it."""

    def __init__(self, library: Path, place: Path, **options: Any):
        pipe = place / "mouse"
        os.mkfifo(pipe)
        self._loop = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, json.dumps({"size": 7, **options})],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "LD_LIBRARY_PATH": str(library), "HIDAPI_PIPE": str(pipe)},
        )
        self._pipe = pipe.open("wb", buffering=0)  # waits until the other side has opened it
        assert self._loop.stdout is not None
        assert "found" in self._loop.stdout.readline()  # what pyspacemouse prints

    def push(self, x: int = 0, y: int = 0, z: int = 0) -> None:
        self._report(struct.pack("<Bhhh", 1, x, y, z))

    def turn(self, x: int = 0, y: int = 0, z: int = 0) -> None:
        self._report(struct.pack("<Bhhh", 2, x, y, z))

    def press(self, *, left: bool = False, right: bool = False) -> None:
        self._report(struct.pack("<BB", 3, left + 2 * right))

    def _report(self, report: bytes) -> None:
        self._pipe.write(bytes([len(report)]) + report)

    def pull_the_cable(self) -> None:
        self._pipe.close()

    def read(self, say: str = "read") -> tuple[list[float] | None, bool | None]:
        assert self._loop.stdin is not None
        assert self._loop.stdout is not None
        self._loop.stdin.write(f"{say}\n")
        self._loop.stdin.flush()
        action, flag = json.loads(self._loop.stdout.readline())
        return action, flag

    def until(self, wanted: Callable[[list[float] | None], bool]) -> list[float] | None:
        end_s = time.monotonic() + 5
        while not wanted(action := self.read()[0]):
            assert time.monotonic() < end_s, action
        return action

    def close(self) -> None:
        self._pipe.close()
        self._loop.communicate(timeout=10)
        assert self._loop.returncode == 0
