"""Images of a record: JPEG by libjpeg-turbo, PNG and the rest by Pillow. Sizes are checked before decoding."""

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
QUALITY = 95
_MODES = {("uint8", 1): "L", ("uint8", 2): "LA", ("uint8", 3): "RGB", ("uint8", 4): "RGBA", ("uint16", 1): "I;16"}
MAX_PIXELS = 2**26  # of an image without a declared size


def image_size(data: bytes) -> tuple[int, int]:
    """Height and width."""
    if data[:2] == _JPEG:
        try:
            height, width, _, _ = load("simplejpeg").decode_jpeg_header(data)
        except ValueError as error:
            raise Malformed(f"is not a JPEG ({error})") from None
        return height, width
    with _opened(data) as image:
        width, height = image.size
        return height, width


def decode_images(encoded: list[bytes], leaf: Leaf) -> Array:
    """Images [n, height, width, channels] of the leaf's shape and dtype."""
    height, width, channels = leaf.shape
    assert height is not None
    assert width is not None
    assert channels is not None
    if encoded and image_size(encoded[0]) != (height, width):  # before memory is allocated
        raise Malformed(f"an image has {_times(image_size(encoded[0]))} pixels and not {_times((height, width))}")
    if leaf.dtype == "float32":  # its bytes are stored in four channels
        return _decode(encoded, (height, width, 4), "uint8").view(np.float32)
    return _decode(encoded, (height, width, channels), leaf.dtype)


def _decode(encoded: list[bytes], shape: tuple[int, int, int], dtype: str) -> Array:
    images = np.empty((len(encoded), *shape), dtype)
    decode = load("simplejpeg").decode_jpeg if any(data[:2] == _JPEG for data in encoded) else None
    for data, out in zip(encoded, images, strict=True):
        if decode is not None and data[:2] == _JPEG and dtype == "uint8" and shape[2] in (1, 3):
            _decode_jpeg(decode, data, out)
        else:
            _decode_other(data, out)
    return images


def _decode_jpeg(decode: Callable[..., Array], data: bytes, out: Array) -> None:
    try:
        got = decode(data, "RGB" if out.shape[2] == 3 else "GRAY", buffer=out)
    except ValueError as error:
        raise Malformed(f"an image is not a JPEG of {_times(out.shape)} ({error})") from None
    if got.shape != out.shape:
        raise Malformed(f"an image is {_times(got.shape)} and not {_times(out.shape)}")


def _decode_other(data: bytes, out: Array) -> None:
    mode = _MODES.get((str(out.dtype), out.shape[2]))
    with _opened(data) as image:
        if image.size != (out.shape[1], out.shape[0]):
            raise Malformed(f"an image has {_times(image.size[::-1])} pixels and not {_times(out.shape[:2])}")
        if mode is None or (image.mode.startswith("I") != mode.startswith("I")):
            raise Malformed(f"an image has mode {image.mode}, which is not {out.dtype} of {out.shape[2]} channels")
        try:
            pixels = np.asarray(image if image.mode == mode else image.convert(mode))
        except _NO_IMAGE as error:
            raise Malformed(f"an image cannot be read ({error})") from None
    out[...] = pixels.reshape(out.shape)


_NO_IMAGE = (
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
    pillow = load("PIL.Image")
    try:
        image = pillow.open(io.BytesIO(data))
    except (*_NO_IMAGE, pillow.DecompressionBombError) as error:
        raise Malformed(f"is not an image ({str(error).partition('<')[0].strip()})") from None
    if image.size[0] * image.size[1] > MAX_PIXELS:
        raise Malformed(f"an image has {_times(image.size)} pixels")
    return image


def _times(sizes: tuple[int, ...]) -> str:
    return "x".join(map(str, sizes))


# ---- writing


def encode_image(image: Array, encoding: str) -> bytes:
    """One image [height, width, channels]."""
    if encoding == "jpeg":
        space = "RGB" if image.shape[2] == 3 else "GRAY"
        data: bytes = load("simplejpeg").encode_jpeg(np.ascontiguousarray(image), QUALITY, space, "444")
        return data
    out = io.BytesIO()
    flat = image[:, :, 0] if image.shape[2] == 1 else image
    load("PIL.Image").fromarray(np.ascontiguousarray(flat)).save(out, "PNG", compress_level=1)
    return out.getvalue()
