"""Scene: an HTTP server for the surroundings of the simulated arm: its cameras, the cube and the target.

| loop | takes from | blocks on | woken by |
|---|---|---|---|
| `scene_cameras`, one thread | requests for images | its queue | the event loop |

It has its own port: images never pass through the arm's server.
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
TABLE = ((0.25, 0.8), (-0.45, 0.45))  # range of x and y on the table

Number = Annotated[float, Field(strict=True, allow_inf_nan=False)]


class Placement(BaseModel):
    """Where to put the cube and the target; what is not given stays where it is."""

    cube: Annotated[list[Number], Field(min_length=2, max_length=2)] | None = None  # x, y on the table
    target: Annotated[list[Number], Field(min_length=3, max_length=3)] | None = None  # the green ball


class SceneCameras:
    """Renders the simulated scene in one thread, since a graphics context belongs to one thread."""

    def __init__(self, arm: SimulatedFranka, *, size: int = 128):
        if not 16 <= size <= 480:
            raise ArmError(f"size: expected 16 to 480 pixels, got {size}; 128 is usual")
        self.size = size
        self._arm = arm
        self._renderer: Any = None
        self._data: Any = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="scene_cameras")

    async def render(self, camera: str) -> Array:
        """The current image of a camera: uint8 [size, size, 3]."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._render, camera)

    def render_now(self, camera: str) -> Array:
        """As `render`, for callers without an event loop."""
        return self._thread.submit(self._render, camera).result()

    def close(self) -> None:
        self._thread.submit(self._close_renderer).result()
        self._thread.shutdown()

    def _render(self, camera: str) -> Array:
        arm = self._arm
        if self._renderer is None:
            os.environ.setdefault("LP_NUM_THREADS", "1")  # software rendering must leave a core to the control loop
            mujoco = importlib.import_module("mujoco")
            try:
                self._renderer = mujoco.Renderer(arm.model, self.size, self.size)
            except Exception as error:  # any error of a graphics library
                raise ArmError(
                    f"cannot render ({error!r}); install libegl1 and libgl1-mesa-dri, and set MUJOCO_GL=egl"
                ) from error
            self._renderer.scene.flags[mujoco.mjtRndFlag.mjRND_SHADOW] = 0  # shadows cost more than everything else
            self._data = mujoco.MjData(arm.model)
            self._forward = mujoco.mj_kinematics, mujoco.mj_camlight
        with arm.lock:
            self._data.qpos[:] = arm.data.qpos
            self._data.mocap_pos[:] = arm.data.mocap_pos
        for forward in self._forward:
            forward(arm.model, self._data)
        self._renderer.update_scene(self._data, camera)
        return np.array(self._renderer.render())

    def _close_renderer(self) -> None:
        if self._renderer is not None:
            self._renderer.close()


def make_scene_app(arm: SimulatedFranka, scene_cameras: SceneCameras) -> FastAPI:
    """The app: GET /cameras, GET /camera/NAME (a PPM image), POST /place."""
    app = FastAPI(title="understudy scene", docs_url=None, redoc_url=None, openapi_url=None)

    @app.get("/cameras")
    async def cameras() -> JSONResponse:
        return JSONResponse({"cameras": list(CAMERAS), "size": scene_cameras.size})

    @app.get("/camera/{name}")
    async def camera(name: str) -> Response:
        if name not in CAMERAS:
            return JSONResponse({"detail": f"no camera {name[:40]!r}; there are {', '.join(CAMERAS)}"}, 404)
        try:
            image = await scene_cameras.render(name)
        except ArmError as error:
            return JSONResponse({"detail": str(error)}, 503)
        header = f"P6\n{scene_cameras.size} {scene_cameras.size}\n255\n".encode()
        return Response(header + image.tobytes(), media_type="image/x-portable-pixmap")

    @app.post("/place")
    async def place(placement: Placement) -> PlainTextResponse:
        if placement.cube is not None:
            x, y = (min(high, max(low, value)) for value, (low, high) in zip(placement.cube, TABLE, strict=True))
            arm.place_cube(x, y)
        if placement.target is not None:
            x, y, z = placement.target
            arm.show_target((x, y, z))
        return PlainTextResponse("Placed")

    async def invalid_body(request: Any, error: Exception) -> JSONResponse:
        return JSONResponse({"detail": validation_text(error)}, 422)

    app.add_exception_handler(RequestValidationError, invalid_body)
    return app
