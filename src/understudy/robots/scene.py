"""The simulated arm's surroundings, on a port of their own: cameras, and where the cube and the target are.

| loop | takes from | blocks on | woken by |
|---|---|---|---|
| `eyes`, one thread | requests for pictures | its queue | the event loop |

Pictures never pass through the arm's server.
"""

from __future__ import annotations

import asyncio
import importlib
import os
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated, Any

import numpy as np
from fastapi import FastAPI, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, PlainTextResponse
from pydantic import BaseModel, Field

from understudy.robots.arm import ArmError, Array
from understudy.robots.franka import SimulatedFranka
from understudy.web.replies import validation_text

CAMERAS = ("front", "wrist")
TABLE = ((0.25, 0.8), (-0.45, 0.45))  # x and y of what can be put on it

Number = Annotated[float, Field(strict=True, allow_inf_nan=False)]


class Things(BaseModel):
    """Where to put what; what is not named stays."""

    cube: Annotated[list[Number], Field(min_length=2, max_length=2)] | None = None  # x, y on the table
    target: Annotated[list[Number], Field(min_length=3, max_length=3)] | None = None  # the green ball


class Eyes:
    """Pictures of the simulated arm, drawn in one thread, since a graphics context belongs to one."""

    def __init__(self, arm: SimulatedFranka, *, size: int = 128):
        if not 16 <= size <= 480:
            raise ArmError(f"size: expected 16 to 480 pixels, got {size}; 128 is usual")
        self.size = size
        self._arm = arm
        self._renderer: Any = None
        self._data: Any = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="eyes")

    async def look(self, camera: str) -> Array:
        """What a camera sees now: uint8 [size, size, 3]."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._draw, camera)

    def look_now(self, camera: str) -> Array:
        """The same, for those without an event loop."""
        return self._thread.submit(self._draw, camera).result()

    def close(self) -> None:
        self._thread.submit(self._put_away).result()
        self._thread.shutdown()

    def _draw(self, camera: str) -> Array:
        arm = self._arm
        if self._renderer is None:
            os.environ.setdefault("LP_NUM_THREADS", "1")  # software drawing leaves a core to the control loop
            mujoco = importlib.import_module("mujoco")
            try:
                self._renderer = mujoco.Renderer(arm.model, self.size, self.size)
            except Exception as error:  # of whatever graphics library
                raise ArmError(
                    f"cannot draw ({error!r}); install libegl1 and libgl1-mesa-dri, and set MUJOCO_GL=egl"
                ) from error
            self._renderer.scene.flags[mujoco.mjtRndFlag.mjRND_SHADOW] = 0  # shadows cost more than all the rest
            self._data = mujoco.MjData(arm.model)
            self._forward = mujoco.mj_kinematics, mujoco.mj_camlight
        with arm.lock:
            self._data.qpos[:] = arm.data.qpos
            self._data.mocap_pos[:] = arm.data.mocap_pos
        for forward in self._forward:
            forward(arm.model, self._data)
        self._renderer.update_scene(self._data, camera)
        return np.array(self._renderer.render())

    def _put_away(self) -> None:
        if self._renderer is not None:
            self._renderer.close()


def make_scene_app(arm: SimulatedFranka, eyes: Eyes) -> FastAPI:
    """The app: GET /cameras, GET /camera/NAME (a PPM picture), POST /place."""
    app = FastAPI(title="understudy scene", docs_url=None, redoc_url=None, openapi_url=None)

    @app.get("/cameras")
    async def cameras() -> JSONResponse:
        return JSONResponse({"cameras": list(CAMERAS), "size": eyes.size})

    @app.get("/camera/{name}")
    async def camera(name: str) -> Response:
        if name not in CAMERAS:
            return JSONResponse({"detail": f"no camera {name[:40]!r}; there are {', '.join(CAMERAS)}"}, 404)
        try:
            picture = await eyes.look(name)
        except ArmError as error:
            return JSONResponse({"detail": str(error)}, 503)
        header = f"P6\n{eyes.size} {eyes.size}\n255\n".encode()
        return Response(header + picture.tobytes(), media_type="image/x-portable-pixmap")

    @app.post("/place")
    async def place(things: Things) -> PlainTextResponse:
        if things.cube is not None:
            x, y = (min(high, max(low, value)) for value, (low, high) in zip(things.cube, TABLE, strict=True))
            arm.place_cube(x, y)
        if things.target is not None:
            x, y, z = things.target
            arm.show_target((x, y, z))
        return PlainTextResponse("Placed")

    async def wrong_body(request: Any, error: Exception) -> JSONResponse:
        return JSONResponse({"detail": validation_text(error)}, 422)

    app.add_exception_handler(RequestValidationError, wrong_body)
    return app
