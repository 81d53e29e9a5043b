"""Cameras: renders images of a compiled MuJoCo model cheaply on a CPU, without changing its physics.

Multisampling, shadows, reflections and the number of faces dominate the cost on a CPU. The first three are turned off,
and a mesh is reduced to as many faces as a small image can show. The model itself is not changed.

Needs mujoco and, on a machine without a display, MUJOCO_GL=egl in the process's variables before mujoco is imported.
"""

from __future__ import annotations

import copy
import importlib
import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from understudy.core.spec import describe
from understudy.core.suggestion import did_you_mean
from understudy.envs.world import WorldError

MAX_SIZE = 1024  # pixels
MAX_FACES = 1000  # of a rendered mesh
MAX_GEOMS = 2000  # of a scene; further ones are not rendered


class Cameras:
    """Renders square images from named cameras of the model.

    Each holds a graphics context of its own until `close`; close it before the process ends.
    """

    def __init__(
        self, model: Any, names: Sequence[str], size: int, *, geom_groups: Sequence[int] = (0, 1, 2), sites: bool = True
    ):
        """`model` is a mujoco.MjModel, `size` the side in pixels; renders `geom_groups`, and `sites` if set."""
        check_size(size)
        self._mujoco = importlib.import_module("mujoco")
        self._model = model
        self._views = {name: self._view(name) for name in names}
        self._size = size
        self._options = self._mujoco.MjvOption()
        self._options.geomgroup[:] = [group in geom_groups for group in range(len(self._options.geomgroup))]
        if not sites:
            self._options.sitegroup[:] = 0
        self._scene = self._mujoco.MjvScene(model, maxgeom=MAX_GEOMS)
        for flag in ("mjRND_SHADOW", "mjRND_REFLECTION"):
            self._scene.flags[getattr(self._mujoco.mjtRndFlag, flag)] = 0
        self._rectangle = self._mujoco.MjrRect(0, 0, size, size)
        self._gl = _graphics_context(self._mujoco, size)
        self._gl.make_current()
        self._context: Any = _rendering_context(self._mujoco, model, size)

    def render(self, data: Any) -> dict[str, np.ndarray[Any, Any]]:  # each [size, size, 3] uint8
        """The image of each camera, first row on top, in new arrays. `data` is the model's mujoco.MjData."""
        if self._context is None:
            raise WorldError("cameras: render was called after close; create new ones")
        self._gl.make_current()  # another context of this process may be current
        images = {}
        for name, view in self._views.items():
            self._mujoco.mjv_updateScene(
                self._model, data, self._options, None, view, self._mujoco.mjtCatBit.mjCAT_ALL, self._scene
            )
            self._mujoco.mjr_render(self._rectangle, self._scene, self._context)
            image = np.empty((self._size, self._size, 3), np.uint8)
            self._mujoco.mjr_readPixels(image, None, self._rectangle, self._context)
            images[name] = np.ascontiguousarray(image[::-1])  # OpenGL's first row is the lowest
        return images

    def close(self) -> None:
        """Free the graphics context; may be called twice."""
        if self._context is not None:
            self._gl.make_current()  # otherwise the driver frees objects of another context
            self._context.free()
            self._context = None
            self._gl.free()

    def _view(self, name: str) -> Any:
        known = [self._model.camera(index).name for index in range(self._model.ncam)]
        if name not in known:
            advice = did_you_mean(name, known, f"it has {', '.join(known) or 'none'}")
            raise WorldError(f"cameras: the model has no camera {name!r}; {advice}")
        view = self._mujoco.MjvCamera()
        view.type = self._mujoco.mjtCamera.mjCAMERA_FIXED
        view.fixedcamid = known.index(name)
        return view


def check_size(size: Any) -> None:
    """Refuse an invalid image size."""
    if type(size) is not int or not 8 <= size <= MAX_SIZE:
        raise WorldError(f"size: expected 8 to {MAX_SIZE} pixels, got {describe(size)}; 64 and 128 are usual")


def _graphics_context(mujoco: Any, size: int) -> Any:
    """A graphics context, not yet current."""
    chosen = os.environ.get("MUJOCO_GL", "")
    if chosen.lower() == "osmesa":
        raise WorldError(
            "MUJOCO_GL: osmesa gives garbage once one of several renderers was freed; set MUJOCO_GL=egl instead"
        )
    try:
        return mujoco.GLContext(size, size)
    except (AttributeError, ImportError, RuntimeError) as error:
        raise WorldError(
            f"MUJOCO_GL: no images with {chosen or 'no value'!r} ({error}); set MUJOCO_GL=egl before Python starts, "
            f"and on Debian install libegl1 libgl1 libgl1-mesa-dri"
        ) from error


def _rendering_context(mujoco: Any, model: Any, size: int) -> Any:
    """The rendering context. It reads settings and meshes when it is created, so it gets a changed copy."""
    drawn = copy.copy(model)
    drawn.vis.quality.offsamples = drawn.vis.quality.shadowsize = 0
    drawn.vis.global_.offwidth = drawn.vis.global_.offheight = size
    for mesh in np.flatnonzero(model.mesh_facenum > MAX_FACES):
        vertices = slice(model.mesh_vertadr[mesh], model.mesh_vertadr[mesh] + model.mesh_vertnum[mesh])
        faces = slice(model.mesh_faceadr[mesh], model.mesh_faceadr[mesh] + model.mesh_facenum[mesh])
        fewer, came_from = fewer_faces(model.mesh_vert[vertices], model.mesh_face[faces], MAX_FACES)
        front = slice(faces.start, faces.start + len(fewer))
        drawn.mesh_face[front] = fewer
        for name in ("mesh_facenormal", "mesh_facetexcoord"):
            getattr(drawn, name)[front] = getattr(model, name)[faces][came_from]
        drawn.mesh_facenum[mesh] = len(fewer)
    context = mujoco.MjrContext(drawn, mujoco.mjtFontScale.mjFONTSCALE_50)
    mujoco.mjr_setBuffer(mujoco.mjtFramebuffer.mjFB_OFFSCREEN, context)
    return context


def fewer_faces(
    points: np.ndarray[Any, Any],  # [P, 3]
    faces: np.ndarray[Any, Any],  # [F, 3] of points
    most: int,
) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:  # [N, 3] of points, [N] of faces
    """Reduce a mesh to at most `most` faces over the same points; also returns the original face of each.

    All points in a cell of a grid are merged into the most central one; the grid is coarsened until this suffices.
    """
    low, side = points.min(axis=0), np.ptp(points, axis=0).max()
    cells = int(most**0.5) + 2
    while True:
        cells -= 2
        cell = np.minimum((points - low) / side * cells, cells - 1).astype(np.int64)
        middle = _middles(points, cell @ [1, cells, cells**2])[faces]
        flat = (middle == np.roll(middle, 1, axis=1)).any(axis=1)  # two corners were merged
        key = np.sort(middle, axis=1) @ [1, len(points), len(points) ** 2]
        came_from = np.unique(key, return_index=True)[1]
        came_from = came_from[~flat[came_from]]
        if len(came_from) <= most or cells <= 2:
            return middle[came_from][:most], came_from[:most]


def _middles(points: np.ndarray[Any, Any], group: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:  # [P] of points
    """For each point, the point of its group that is nearest to the mean of all in it."""
    _, group = np.unique(group, return_inverse=True)
    counts = np.bincount(group)
    means = np.stack([np.bincount(group, column) for column in points.T], axis=1) / counts[:, None]
    order = np.lexsort((np.linalg.norm(points - means[group], axis=1), group))
    nearest: np.ndarray[Any, Any] = order[np.cumsum(counts) - counts]
    return nearest[group]
