"""The HTTP endpoints of an arm: those that HIL-SERL's clients call, and heartbeats, limits and health.

Only /jointreset waits for the arm to move.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import asdict
from typing import Annotated, Any

import numpy as np
from fastapi import FastAPI, Header, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, PlainTextResponse
from pydantic import BaseModel, Field

from understudy.core.rotation import between, to_euler
from understudy.robots.arm import ArmError, ArmState
from understudy.robots.control import BusyError, Control, Measurement
from understudy.web.replies import printable, validation_text

COMMAND_S = 5.0  # for a command that does not move the arm
HOMING_S = 30.0
AT_HOME = (0.004, 0.02)  # metres, rad
MIN_QUATERNION, MAX_QUATERNION = 0.5, 2.0  # bounds of the length of a quaternion that is accepted and normalized

Number = Annotated[float, Field(strict=True, allow_inf_nan=False)]
Client = Annotated[str, Header(alias="X-Client", max_length=64)]


class Pose(BaseModel):
    """The target of the tool point: x, y, z in metres, and a quaternion x, y, z, w."""

    arr: Annotated[list[Number], Field(min_length=7, max_length=7)]


class GripperPosition(BaseModel):
    """0 closed to 255 open."""

    gripper_pos: Annotated[Number, Field(ge=-1e6, le=1e6)]


class AfterTick(BaseModel):
    """Asks for what was measured after a tick of the control loop."""

    after: Annotated[int, Field(strict=True)]


def make_app(control: Control, *, scene: str | None = None) -> FastAPI:
    """The app. `scene` is the URL of the simulated scene with its cameras, if there is one."""
    app = FastAPI(title="understudy robot", docs_url=None, redoc_url=None, openapi_url=None)
    _handle_errors(app)
    _add_readings(app, control, scene)
    _add_commands(app, control)
    return app


def _add_readings(app: FastAPI, control: Control, scene: str | None) -> None:
    readings: dict[str, Callable[[ArmState], dict[str, Any]]] = {
        "getpos": lambda state: {"pose": state.pose.tolist()},
        "getpos_euler": lambda state: {"pose": [*state.pose[:3].tolist(), *to_euler(state.pose[3:]).tolist()]},
        "getvel": lambda state: {"vel": state.vel.tolist()},
        "getforce": lambda state: {"force": state.force.tolist()},
        "gettorque": lambda state: {"torque": state.torque.tolist()},
        "getq": lambda state: {"q": state.q.tolist()},
        "getdq": lambda state: {"dq": state.dq.tolist()},
        "getjacobian": lambda state: {"jacobian": state.jacobian.tolist()},
        "get_gripper": lambda state: {"gripper": state.gripper},
    }

    def add(name: str, read: Callable[[ArmState], dict[str, Any]]) -> None:
        async def reading(client: Client = "") -> JSONResponse:
            if client:
                control.heartbeat(client, only_owner=True)
            return JSONResponse(read(control.state))

        app.post(f"/{name}")(reading)

    for name, read in readings.items():
        add(name, read)

    @app.post("/getstate")
    async def getstate(client: Client = "") -> JSONResponse:
        if client:
            control.heartbeat(client, only_owner=True)
        measured = control.measured
        return JSONResponse({**_state(measured), "jacobian": measured.state.jacobian.tolist()})

    @app.post("/getstates")
    async def getstates(body: AfterTick, client: Client = "") -> JSONResponse:
        if client:
            control.heartbeat(client, only_owner=True)
        return JSONResponse({"states": [_state(measured) for measured in control.measured_after(body.after)]})

    @app.post("/limits")
    async def limits() -> JSONResponse:
        arm = control.arm
        facts = {"home": arm.home.tolist(), "scene": scene, "simulated": arm.simulated}
        return JSONResponse({**asdict(arm.limits), **facts})

    @app.post("/health")
    async def health() -> JSONResponse:
        return JSONResponse(asdict(control.health))


def _state(measured: Measurement) -> dict[str, Any]:
    state = measured.state
    return {
        "pose": state.pose.tolist(),
        "vel": state.vel.tolist(),
        "force": state.force.tolist(),
        "torque": state.torque.tolist(),
        "q": state.q.tolist(),
        "dq": state.dq.tolist(),
        "gripper_pos": state.gripper,
        "tick": measured.tick,
        "age_s": measured.age_s,
    }


def _add_commands(app: FastAPI, control: Control) -> None:
    arm = control.arm

    @app.post("/pose")
    async def pose(body: Pose, client: Client = "") -> PlainTextResponse:
        target = np.array(body.arr)
        size = math.hypot(*body.arr[3:])
        if not MIN_QUATERNION <= size <= MAX_QUATERNION:
            raise ArmError(f"arr: expected a quaternion x, y, z, w of length 1 in arr[3:], got length {size:.3g}")
        target[3:] /= size
        control.set_target(target, client)
        return PlainTextResponse("Moved")

    @app.post("/heartbeat")
    async def heartbeat(client: Client = "") -> PlainTextResponse:
        control.heartbeat(client)
        return PlainTextResponse("Alive")

    def add_grip(name: str, opening: float, reply: str) -> None:
        async def grip(client: Client = "") -> PlainTextResponse:
            await _result(control.submit(lambda: arm.grip(opening), client))
            return PlainTextResponse(reply)

        app.post(f"/{name}")(grip)

    add_grip("open_gripper", 1.0, "Opened")
    add_grip("close_gripper", 0.0, "Closed")
    add_grip("activate_gripper", 1.0, "Activated")
    add_grip("reset_gripper", 1.0, "Reset")

    @app.post("/move_gripper")
    async def move_gripper(body: GripperPosition, client: Client = "") -> PlainTextResponse:
        opening = min(1.0, max(0.0, body.gripper_pos / 255))
        await _result(control.submit(lambda: arm.grip(opening), client))
        return PlainTextResponse("Moved Gripper")

    @app.post("/clearerr")
    async def clearerr() -> PlainTextResponse:
        await _result(control.clear())
        return PlainTextResponse("Clear")

    @app.post("/startimp")
    async def startimp() -> PlainTextResponse:
        control.engage()
        return PlainTextResponse("Started impedance")

    @app.post("/stopimp")
    async def stopimp() -> PlainTextResponse:
        control.disengage()
        return PlainTextResponse("Stopped impedance")

    @app.post("/update_param")
    async def update_param(values: dict[str, Number], client: Client = "") -> PlainTextResponse:
        unknown = await _result(control.submit(lambda: arm.tune(values), client))
        rest = f"; this arm has no {', '.join(sorted(unknown))[:500]}" if unknown else ""
        return PlainTextResponse(printable(f"Updated compliance parameters{rest}"))

    @app.post("/jointreset")
    async def jointreset(request: Request, client: Client = "") -> PlainTextResponse:
        """Go home in a straight line inside all limits. The open request counts as heartbeats."""
        until = time.monotonic() + HOMING_S
        while not _at_home(control):
            if await request.is_disconnected():
                raise ArmError("the client left; the arm stops")
            if time.monotonic() > until:
                raise ArmError(f"the arm did not get home within {HOMING_S:g} s; is something in its way?")
            control.set_target(arm.home, client)  # again: a server that was late for a moment has dropped it
            await asyncio.sleep(0.02)
        await _result(control.submit(arm.reset_joints, client), HOMING_S)
        return PlainTextResponse("Reset Joint")


def _at_home(control: Control) -> bool:
    pose, home = control.state.pose, control.arm.home
    return (
        math.dist(pose[:3], home[:3]) < AT_HOME[0] and float(np.linalg.norm(between(pose[3:], home[3:]))) < AT_HOME[1]
    )


async def _result(future: Future[Any], timeout_s: float = COMMAND_S) -> Any:
    try:
        return await asyncio.wait_for(asyncio.wrap_future(future), timeout_s)
    except TimeoutError:
        raise ArmError(f"the arm did not answer within {timeout_s:g} s; check the arm") from None


def _handle_errors(app: FastAPI) -> None:
    async def invalid_body(request: Request, error: Exception) -> JSONResponse:
        return JSONResponse({"detail": f"{validation_text(error)}; see docs/robots.md"}, 422)

    async def refused(request: Request, error: Exception) -> JSONResponse:
        return JSONResponse({"detail": printable(str(error))}, 409 if isinstance(error, BusyError) else 422)

    app.add_exception_handler(RequestValidationError, invalid_body)
    app.add_exception_handler(ArmError, refused)
