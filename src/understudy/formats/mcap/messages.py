"""The JSON messages of an MCAP file and their JSON schemas."""

from __future__ import annotations

import base64
import io
import json
import math
from typing import Any

import numpy as np

from understudy.core import ArraySpec
from understudy.formats.format import FormatError

IMAGE = "foxglove.CompressedImage"
STEP = "step"  # topic of what is not a field
EPISODE = "understudy"  # metadata record before the messages of an episode: its key and attributes
SPEC = "understudy.spec"  # metadata record of a file: the spec of its episodes
LEAST_PIXELS = 8  # per side; smaller arrays are stored as numbers
QUALITY = 90

_TIME = {"type": "object", "properties": {"sec": {"type": "integer"}, "nsec": {"type": "integer"}}}
IMAGE_SCHEMA = {
    "title": IMAGE,
    "type": "object",
    "properties": {
        "timestamp": _TIME,
        "frame_id": {"type": "string"},
        "data": {"type": "string", "contentEncoding": "base64"},
        "format": {"type": "string"},
    },
}
STEP_SCHEMA = {
    "title": "understudy.Step",
    "type": "object",
    "properties": {
        "index": {"type": "integer"},
        "reward": {},
        "terminated": {"type": "boolean"},
        "truncated": {"type": "boolean"},
        "source": {"type": "string"},
        "policy_version": {"type": "integer"},
    },
}


def value_schema(leaf: ArraySpec) -> dict[str, Any]:
    """The schema of a field: its value, in nested lists if it has dimensions."""
    kind: dict[str, Any] = {"type": _KINDS.get(leaf.numpy_dtype.kind, "number") if leaf.dtype != "str" else "string"}
    for _ in leaf.shape:
        kind = {"type": "array", "items": kind}
    return {"title": f"understudy.{leaf}", "type": "object", "properties": {"value": kind}}


_KINDS = {"b": "boolean", "i": "integer", "u": "integer"}


def is_camera(leaf: ArraySpec) -> bool:
    """uint8 [..., height, width, 1 or 3]; frames may be stacked, and then the newest is shown."""
    if leaf.ragged or leaf.dtype != "uint8" or len(leaf.shape) not in (3, 4):
        return False
    *_, height, width, channels = leaf.fixed_shape
    return channels in (1, 3) and min(height, width) >= LEAST_PIXELS and 0 not in leaf.fixed_shape


def image_message(frame: np.ndarray[Any, Any], name: str, encoding: str, time_ns: int) -> bytes:
    try:
        from PIL import Image
    except ImportError:
        raise FormatError("mcap: pip install 'understudy-robotics[mcap]' to write images") from None
    while frame.ndim > 3:
        frame = frame[-1]
    image = Image.fromarray(frame[..., 0] if frame.shape[-1] == 1 else frame)
    out = io.BytesIO()
    image.save(out, encoding, **({"quality": QUALITY} if encoding == "jpeg" else {}))
    seconds, rest = divmod(time_ns, 10**9)
    message = {
        "timestamp": {"sec": seconds, "nsec": rest},
        "frame_id": name,
        "data": base64.b64encode(out.getvalue()).decode(),
        "format": encoding,
    }
    return json.dumps(message).encode()


def value_message(value: Any) -> bytes:
    return json.dumps({"value": finite(value)}, allow_nan=False).encode()


def finite(value: Any) -> Any:
    """The value as JSON numbers and lists; NaN and infinity become None."""
    if isinstance(value, str):
        return value
    array = np.asarray(value)
    plain = array.tolist()
    if array.dtype.kind != "f" or np.isfinite(array).all():
        return plain

    def walk(node: Any) -> Any:
        return [walk(child) for child in node] if isinstance(node, list) else node if math.isfinite(node) else None

    return walk(plain)
