"""Pictures of a record: JPEG by libjpeg-turbo, PNG and the rest by Pillow. Sizes are checked before pixels are made."""

from __future__ import annotations

import io
import struct
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np

from understudy.formats.rlds.example import Malformed
from understudy.formats.rlds.features import Leaf
from understudy.formats.rlds.records import load

Array = np.ndarray[Any, Any]

_JPEG = b"\xff\xd8"
_QUALITY = 95
_MODES = {("uint8", 1): "L", ("uint8", 2): "LA", ("uint8", 3): "RGB", ("uint8", 4): "RGBA", ("uint16", 1): "I;16"}
MAX_PIXELS = 2**26  # of a picture whose size nothing but itself tells


def picture_size(data: bytes) -> tuple[int, int]:
    """Height and width."""
    if data[:2] == _JPEG:
        try:
            height, width, _, _ = load("simplejpeg").decode_jpeg_header(data)
        except ValueError as error:
            raise Malformed(f"is no JPEG ({error})") from None
        return height, width
    with _opened(data) as picture:
        width, height = picture.size
        return height, width


def decode_pictures(encoded: list[bytes], leaf: Leaf) -> Array:
    """Pictures [n, height, width, channels] of the leaf's shape and dtype."""
    height, width, channels = leaf.shape
    assert height is not None
    assert width is not None
    assert channels is not None
    if encoded and picture_size(encoded[0]) != (height, width):  # before memory is asked for
        raise Malformed(f"a picture has {_times(picture_size(encoded[0]))} pixels and not {_times((height, width))}")
    if leaf.dtype == "float32":  # its bytes stand in four channels
        return _decode(encoded, (height, width, 4), "uint8").view(np.float32)
    return _decode(encoded, (height, width, channels), leaf.dtype)


def _decode(encoded: list[bytes], shape: tuple[int, int, int], dtype: str) -> Array:
    pictures = np.empty((len(encoded), *shape), dtype)
    decode = load("simplejpeg").decode_jpeg if any(data[:2] == _JPEG for data in encoded) else None
    for data, out in zip(encoded, pictures, strict=True):
        if decode is not None and data[:2] == _JPEG and dtype == "uint8" and shape[2] in (1, 3):
            _decode_jpeg(decode, data, out)
        else:
            _decode_other(data, out)
    return pictures


def _decode_jpeg(decode: Callable[..., Array], data: bytes, out: Array) -> None:
    try:
        got = decode(data, "RGB" if out.shape[2] == 3 else "GRAY", buffer=out)
    except ValueError as error:
        raise Malformed(f"a picture is no JPEG of {_times(out.shape)} ({error})") from None
    if got.shape != out.shape:
        raise Malformed(f"a picture is {_times(got.shape)} and not {_times(out.shape)}")


def _decode_other(data: bytes, out: Array) -> None:
    mode = _MODES.get((str(out.dtype), out.shape[2]))
    with _opened(data) as picture:
        if picture.size != (out.shape[1], out.shape[0]):
            raise Malformed(f"a picture has {_times(picture.size[::-1])} pixels and not {_times(out.shape[:2])}")
        if mode is None or (picture.mode.startswith("I") != mode.startswith("I")):
            raise Malformed(
                f"a picture is of the kind {picture.mode}, which is no {out.dtype} of {out.shape[2]} channels"
            )
        try:
            pixels = np.asarray(picture if picture.mode == mode else picture.convert(mode))
        except _NO_PICTURE as error:
            raise Malformed(f"a picture cannot be read ({error})") from None
    out[...] = pixels.reshape(out.shape)


_NO_PICTURE = (
    OSError,
    ValueError,
    SyntaxError,
    EOFError,
    IndexError,
    TypeError,
    OverflowError,
    struct.error,
    zlib.error,
    Warning,
)


def _opened(data: bytes) -> Any:
    image = load("PIL.Image")
    try:
        picture = image.open(io.BytesIO(data))
    except (*_NO_PICTURE, image.DecompressionBombError) as error:
        raise Malformed(f"is no picture ({str(error).partition('<')[0].strip()})") from None
    if picture.size[0] * picture.size[1] > MAX_PIXELS:
        raise Malformed(f"a picture has {_times(picture.size)} pixels")
    return picture


def _times(sizes: tuple[int, ...]) -> str:
    return "x".join(map(str, sizes))


# ---- writing


def encode_picture(picture: Array, encoding: str) -> bytes:
    """One picture [height, width, channels]."""
    if encoding == "jpeg":
        space = "RGB" if picture.shape[2] == 3 else "GRAY"
        data: bytes = load("simplejpeg").encode_jpeg(np.ascontiguousarray(picture), _QUALITY, space, "444")
        return data
    out = io.BytesIO()
    flat = picture[:, :, 0] if picture.shape[2] == 1 else picture
    load("PIL.Image").fromarray(np.ascontiguousarray(flat)).save(out, "PNG", compress_level=1)
    return out.getvalue()
