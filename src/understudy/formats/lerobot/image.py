"""Images inside tables: writes PNG, reads PNG and JPEG."""

from __future__ import annotations

import io
import struct
import zlib
from typing import Any

import numpy as np
from PIL import Image

from understudy.formats.format import FormatError

Array = np.ndarray[Any, Any]

_DAMAGE = (  # what Pillow raises for damaged files
    OSError,
    ValueError,
    SyntaxError,
    ArithmeticError,
    LookupError,
    TypeError,
    MemoryError,
    RuntimeError,
    Warning,
    struct.error,
    zlib.error,
    Image.DecompressionBombError,
)
_MODES = {1: ("L",), 3: ("RGB",), 4: ("RGBA",)}


def decode_image(data: bytes, shape: tuple[int, ...], where: str) -> Array:
    """Decode an image, which must have this shape: [height, width, channels]."""
    height, width, channels = shape
    try:
        with Image.open(io.BytesIO(data), formats=("PNG", "JPEG")) as image:
            if image.size != (width, height) or image.mode not in _MODES[channels]:
                raise FormatError(
                    f"{where}: expected images of {height} x {width} in {_MODES[channels][0]}, got "
                    f"{image.size[1]} x {image.size[0]} in {image.mode}; correct the shape in meta/info.json"
                )
            return np.asarray(image, np.uint8).reshape(shape)
    except FormatError:
        raise
    except _DAMAGE as error:
        raise FormatError(f"{where}: an image is damaged ({type(error).__name__}); fetch the dataset again") from None


def encode_image(pixels: Array) -> bytes:
    """A PNG of [height, width, 3]."""
    data = io.BytesIO()
    Image.fromarray(pixels).save(data, "PNG", compress_level=1)
    return data.getvalue()
