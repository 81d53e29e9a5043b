"""The toy table's cameras: a numpy painter's algorithm for convex polygons, into an image of colour indices.

An image is painted at twice its size, one byte per pixel; `_downsample` looks the colours up and averages 2 x 2 pixels,
which smooths the edges.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from understudy.envs.toy.physics import (
    BUTTON_PRESSED,
    BUTTON_RADIUS,
    BUTTON_TOP,
    FINGER,
    HALF_BLOCK,
    HALF_GAP,
    HALF_ZONE,
    PLATE_RADIUS,
    Box,
    Table,
)

Array: TypeAlias = np.ndarray[Any, Any]

FRONT_EYE, FRONT_LOOKS_AT, FRONT_ZOOM = (0.0, -0.62, 0.74), (0.0, -0.0, 0.06), 2.2
WRIST_BACK, WRIST_UP, WRIST_ZOOM = 0.045, 0.21, 1.55  # the camera is behind and above the finger tips and looks down

TABLE_HALF = (0.34, 0.29)
TILE = 0.1  # side of the table's squares, which show the motion of the wrist camera
LIGHT = (0.3, -0.2)  # offset of a shadow per height of the object

# --- colours: flat things have one number, boxes have three (top, front and back, sides) ---

_FLAT = {
    "floor": (176, 190, 202),
    "tile": (222, 209, 188),
    "other_tile": (214, 199, 175),
    "edge": (150, 124, 92),
    "zone": (247, 211, 88),
    "zone_rim": (214, 165, 32),
    "plate": (132, 200, 128),
    "plate_rim": (62, 142, 72),
    "button_rim": (92, 96, 104),
    "button": (245, 245, 245),
    "button_side": (190, 190, 194),
    "button_down": (255, 150, 60),
}
_SOLID = {
    "red": (222, 58, 50),
    "blue": (52, 104, 214),
    "purple": (150, 70, 180),
    "finger": (86, 92, 104),
    "palm": (58, 62, 72),
    "arm": (112, 120, 134),
}
_SHADES = (1.0, 0.8, 0.64)
_SHADOW = 64  # this bit makes a colour darker

_COLOURS = [*_FLAT.values(), *(tuple(shade * c for c in rgb) for rgb in _SOLID.values() for shade in _SHADES)]
_FLAT_ID = {name: number for number, name in enumerate(_FLAT)}
_SOLID_ID = {name: len(_FLAT) + len(_SHADES) * number for number, name in enumerate(_SOLID)}
BLOCK_COLOURS = ("red", "blue", "purple")


def _palette() -> Array:  # [128] uint32
    """Ten bits per colour channel, so that the sum of four pixels fits."""
    rgb = np.zeros((2, _SHADOW, 3))
    rgb[:, : len(_COLOURS)] = _COLOURS
    rgb[1] *= 0.7
    red, green, blue = np.moveaxis(rgb.reshape(-1, 3).round().astype(np.uint32), -1, 0)
    return red << 20 | green << 10 | blue


_PALETTE = _palette()


@dataclass(frozen=True, kw_only=True)
class Camera:
    """A pinhole camera: position, axes (right, down, ahead) as rows, and focal length over half the image's width."""

    eye: Array  # [3]
    axes: Array  # [3, 3]
    zoom: float

    def project(self, points: Array, size: int) -> Array:
        """Project points [..., 3] to pixel coordinates [..., 2] (right, down) in an image of twice `size` pixels."""
        seen = _times(points - self.eye, self.axes.T)
        pixels: Array = seen[..., :2] / seen[..., 2:] * (self.zoom * size) + size
        return pixels


@dataclass(frozen=True, kw_only=True)
class Solid:
    """A box and the first of its three colour indices."""

    low: tuple[float, float, float]
    high: tuple[float, float, float]
    colour: int


@dataclass(frozen=True, kw_only=True)
class Shapes:
    """Flat polygons with the same number of corners, in painting order."""

    corners: Array  # [n, k, 3]
    colours: tuple[int, ...]


class Renderer:
    """Renders a table from two cameras. Each image is a new array."""

    def __init__(self, size: int):
        self.size = size
        self._pixels = np.arange(2 * size, dtype=np.float32) + np.float32(0.5)
        self._front = _looking(FRONT_EYE, FRONT_LOOKS_AT, FRONT_ZOOM)
        self._front_empty = self._empty_front()

    def front(self, table: Table) -> Array:  # [size, size, 3] uint8
        ids = self._front_empty.copy()
        solids = [*_blocks(table), *_fingers(table), *_wrist(table)]
        self._paint(ids, self._front, table, solids)
        return _downsample(ids)

    def wrist(self, table: Table) -> Array:  # [size, size, 3] uint8
        x, y, z = table.gripper
        camera = Camera(eye=np.array([x, y - WRIST_BACK, z + WRIST_UP]), axes=_STRAIGHT_DOWN, zoom=WRIST_ZOOM)
        ids = self._tiles_below(camera)
        self._paint(ids, camera, table, [*_blocks(table), *_fingers(table)])
        return _downsample(ids)

    def _paint(self, ids: Array, camera: Camera, table: Table, solids: list[Solid]) -> None:
        """Paint flat shapes, then shadows, then boxes from far to near."""
        rounds, squares, shadows = _rounds(table), _squares(table), _shadows(table)
        self._fill(ids, camera.project(rounds.corners, self.size), rounds.colours)
        bounds = np.array([(solid.low, solid.high) for solid in solids])  # [n, 2, 3]
        order = _far_to_near(bounds, camera.eye)
        corners = camera.project(bounds[order][:, _CORNERS, (0, 1, 2)], self.size)  # [n, 8, 2]
        faces = corners[:, _FACES]  # [n, 5, 4, 2]
        facing = _area(faces) < 0.0
        colours = np.array([solids[index].colour for index in order])[:, None] + _FACE_SHADES
        flats = camera.project(np.concatenate([squares.corners, shadows.corners]), self.size)
        self._fill(
            ids,
            np.concatenate([flats, faces[facing]]),
            [*squares.colours, *shadows.colours, *colours[facing].tolist()],
        )

    def _fill(self, ids: Array, polygons: Array, colours: Sequence[int]) -> None:
        """Give the pixels inside each convex polygon [m, k, 2] its colour; _SHADOW darkens what is there."""
        polygons = polygons.astype(np.float32)
        x, y = polygons[..., 0], polygons[..., 1]  # [m, k]
        way_round = np.where(_area(polygons) < 0.0, np.float32(-1.0), np.float32(1.0))[:, None]
        nexts = np.arange(1, x.shape[1] + 1) % x.shape[1]
        a, b = (y - y[:, nexts]) * way_round, (x[:, nexts] - x) * way_round
        across = (a[..., None] * self._pixels)[:, :, None]  # [m, k, 1, 2 size]; inside is a x + b y + c >= 0
        down = ((a * x + b * y)[..., None] - b[..., None] * self._pixels)[..., None]  # [m, k, 2 size, 1]
        lows = np.maximum(polygons.min(axis=1).astype(int), 0).tolist()
        highs = np.minimum(polygons.max(axis=1).astype(int) + 1, 2 * self.size).tolist()
        for index, ((left, top), (right, bottom), colour) in enumerate(zip(lows, highs, colours, strict=True)):
            if left < right and top < bottom:
                inside = np.logical_and.reduce(across[index, ..., left:right] >= down[index, :, top:bottom], axis=0)
                region = ids[top:bottom, left:right]
                if colour == _SHADOW:
                    np.bitwise_or(region, _SHADOW, out=region, where=inside)
                else:
                    np.copyto(region, colour, where=inside)

    def _empty_front(self) -> Array:  # [2 size, 2 size] uint8
        """The front camera's image without moving objects."""
        offsets = (self._pixels - self.size) / (self._front.zoom * self.size)
        ahead = np.stack([*np.meshgrid(offsets, offsets), np.ones((len(offsets),) * 2)], axis=-1)
        rays = _times(ahead, self._front.axes)
        distance = -self._front.eye[2] / np.minimum(rays[..., 2], -1e-6)
        ids = _tiles(self._front.eye[0] + rays[..., 0] * distance, self._front.eye[1] + rays[..., 1] * distance)
        x, y = TABLE_HALF
        edge = np.array([(-x, -y, 0.0), (x, -y, 0.0), (x, -y, -0.035), (-x, -y, -0.035)])
        self._fill(ids, self._front.project(edge, self.size)[None], [_FLAT_ID["edge"]])
        return ids

    def _tiles_below(self, camera: Camera) -> Array:  # [2 size, 2 size] uint8
        offsets = (self._pixels - self.size) * (camera.eye[2] / (camera.zoom * self.size))
        return _tiles(camera.eye[0] + offsets[None, :], camera.eye[1] - offsets[:, None])


def _tiles(x: Array, y: Array) -> Array:  # uint8
    """Colour indices of the table's pattern, and of the floor around it, at points of the table's plane."""
    # 0 or 1, for "tile" and the colour after it
    tiles = np.floor(x / TILE).astype(np.int8) + np.floor(y / TILE).astype(np.int8) & 1
    on_table = (np.abs(x) < TABLE_HALF[0]) & (np.abs(y) < TABLE_HALF[1])
    ids: Array = np.where(on_table, tiles + _FLAT_ID["tile"], _FLAT_ID["floor"]).astype(np.uint8)
    return ids


def _downsample(ids: Array) -> Array:  # [size, size, 3] uint8
    """The colours of the indices, averaged over 2 x 2 pixels."""
    packed = _PALETTE.take(ids)
    rows = packed[0::2] + packed[1::2]
    mean = rows[:, 0::2] + rows[:, 1::2]
    image = np.empty((*mean.shape, 3), np.uint8)
    for channel, shift in enumerate((22, 12, 2)):
        image[..., channel] = mean >> shift  # the cast keeps the lowest eight bits
    return image


# --- shapes ---


def _rounds(table: Table) -> Shapes:
    """The plate and the button."""
    height = min(BUTTON_TOP, max(BUTTON_PRESSED, table.gripper[2])) if table.pressed else BUTTON_TOP
    plate, button, inner = (*table.plate, 0.0), (*table.button, 0.0), BUTTON_RADIUS - 0.01
    return _shapes(
        _CIRCLE,
        [
            (plate, PLATE_RADIUS, _FLAT_ID["plate_rim"]),
            (plate, PLATE_RADIUS - 0.01, _FLAT_ID["plate"]),
            (button, BUTTON_RADIUS, _FLAT_ID["button_rim"]),
            ((*table.button, height / 2), inner, _FLAT_ID["button_side"]),
            ((*table.button, height), inner, _FLAT_ID["button_down" if table.pressed else "button"]),
        ],
    )


def _squares(table: Table) -> Shapes:
    zone = (*table.zone, 0.0)
    return _shapes(_SQUARE, [(zone, HALF_ZONE, _FLAT_ID["zone_rim"]), (zone, HALF_ZONE - 0.008, _FLAT_ID["zone"])])


def _shadows(table: Table) -> Shapes:
    """A square on the table for each block, and one below the gripper."""
    casters = [*((at, HALF_BLOCK) for at in table.blocks), (table.gripper, 0.02)]
    return _shapes(_SQUARE, [((x + LIGHT[0] * z, y + LIGHT[1] * z, 0.0), half, _SHADOW) for (x, y, z), half in casters])


def _shapes(outline: Array, each: Sequence[tuple[tuple[float, float, float], float, int]]) -> Shapes:
    """One outline at several positions, in several sizes and colours."""
    positions, sizes, colours = zip(*each, strict=True)
    return Shapes(corners=np.array(positions)[:, None] + outline * np.array(sizes)[:, None, None], colours=colours)


def _blocks(table: Table) -> Iterable[Solid]:
    for at, name in zip(table.blocks, BLOCK_COLOURS, strict=True):
        yield _solid((at, (HALF_BLOCK,) * 3), name)


def _fingers(table: Table) -> Iterable[Solid]:
    return (_solid(finger, "finger") for finger in table.fingers())


def _wrist(table: Table) -> Iterable[Solid]:
    """The boxes that carry the fingers; the wrist camera is below them."""
    x, y, z = table.gripper
    top = z + 2 * FINGER[2]
    yield _solid(((x, y, top + 0.012), (HALF_GAP + 2 * FINGER[0], 0.02, 0.012)), "palm")
    yield _solid(((x, y, top + 0.274), (0.02, 0.018, 0.25)), "arm")


def _solid(box: Box, name: str) -> Solid:
    (x, y, z), (a, b, c) = box
    return Solid(low=(x - a, y - b, z - c), high=(x + a, y + b, z + c), colour=_SOLID_ID[name])


def _far_to_near(bounds: Array, eye: Array) -> list[int]:
    """An order of boxes [low or high, 3] from far to near."""
    low, high = bounds[:, None, 0], bounds[:, None, 1]
    other_low, other_high = bounds[None, :, 0], bounds[None, :, 1]
    # If a plane separates two boxes and the camera is on the first one's side, the second cannot cover the first.
    parted = (low >= other_high - 1e-6) & (eye > low) | (high <= other_low + 1e-6) & (eye < high)
    clear = np.logical_or.reduce(parted, axis=-1)  # [n, n]
    covers = clear & ~clear.T
    left = list(range(len(bounds)))
    ordered = []
    while left:
        # Intersecting boxes may have no order: take the first.
        index = next((one for one in left if not covers[one, left].any()), left[0])
        left.remove(index)
        ordered.append(index)
    return ordered


# --- geometry ---

_SQUARE = np.array([(-1.0, -1.0, 0.0), (1.0, -1.0, 0.0), (1.0, 1.0, 0.0), (-1.0, 1.0, 0.0)])
_ANGLES = np.arange(14) * (2 * np.pi / 14)
_CIRCLE = np.stack([np.cos(_ANGLES), np.sin(_ANGLES), np.zeros(14)], axis=-1)

# Corner 4 x + 2 y + z is the low or the high one along each axis; faces run anticlockwise seen from outside.
_CORNERS = np.array([(x, y, z) for x in (0, 1) for y in (0, 1) for z in (0, 1)])
_FACES = np.array([(1, 5, 7, 3), (0, 4, 5, 1), (2, 3, 7, 6), (0, 1, 3, 2), (4, 6, 7, 5)])  # top, front, back, sides
_FACE_SHADES = np.array([0, 1, 1, 2, 2])

_STRAIGHT_DOWN = np.array([(1.0, 0.0, 0.0), (0.0, -1.0, 0.0), (0.0, 0.0, -1.0)])


def _looking(eye: Sequence[float], at: Sequence[float], zoom: float) -> Camera:
    """A camera with level horizon that looks along y and down."""
    ahead = np.subtract(at, eye) / math.dist(at, eye)
    right = np.array([1.0, 0.0, 0.0])
    return Camera(eye=np.array(eye), axes=np.stack([right, np.cross(ahead, right), ahead]), zoom=zoom)


def _times(vectors: Array, matrix: Array) -> Array:  # [..., 3]
    """Vectors [..., 3] times a 3x3 matrix, in an order of sums that is the same on every machine, unlike BLAS's."""
    x, y, z = vectors[..., 0:1], vectors[..., 1:2], vectors[..., 2:3]
    product: Array = x * matrix[0] + y * matrix[1] + z * matrix[2]
    return product


def _area(polygons: Array) -> Array:  # [...]
    """Which way round convex polygons [..., k, 2] run: negative for anticlockwise on an image."""
    middle = polygons.shape[-2] // 2
    one, two = polygons[..., middle, :] - polygons[..., 0, :], polygons[..., -1, :] - polygons[..., middle - 1, :]
    area: Array = one[..., 0] * two[..., 1] - one[..., 1] * two[..., 0]
    return area
