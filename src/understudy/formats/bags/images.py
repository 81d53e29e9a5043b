"""Images of messages as arrays [height, width, channels]: compressed (JPEG, PNG) and raw in the usual encodings."""

from __future__ import annotations

import base64
import binascii
import io
from collections.abc import Mapping
from typing import Any

import numpy as np

from understudy.formats.format import FormatError

Array = np.ndarray[Any, Any]
MOST_PIXELS = 2**26

# encoding of sensor_msgs/msg/Image: dtype and channels
ENCODINGS = {
    "rgb8": ("u1", 3),
    "bgr8": ("u1", 3),
    "mono8": ("u1", 1),
    "8UC1": ("u1", 1),
    "16UC1": ("u2", 1),
    "mono16": ("u2", 1),
    "32FC1": ("f4", 1),
}
_MODES = {"RGB": (np.uint8, 3), "L": (np.uint8, 1), "I;16": (np.uint16, 1)}


def compressed_image(data: Any, named: str) -> Array:
    """The pixels of a JPEG or PNG; `data` is an array of bytes, or base64 text as JSON has it."""
    try:
        from PIL import Image
    except ImportError:
        raise FormatError("images need pillow; run `pip install 'understudy-robotics[mcap]'`") from None
    if "compressedDepth" in named:
        raise FormatError(f"its images are {named!r}, and JPEG and PNG are read; take the topic of the raw depth")
    try:
        encoded = base64.b64decode(data, validate=True) if isinstance(data, str) else np.asarray(data).tobytes()
        with Image.open(io.BytesIO(encoded), formats=["JPEG", "PNG"]) as image:
            if image.mode not in _MODES:
                raise FormatError(
                    f"an image has the mode {image.mode}; expected {', '.join(_MODES)}: convert the images"
                )
            if image.width * image.height > MOST_PIXELS:
                raise FormatError(f"an image has {image.width} x {image.height} pixels; scale them down")
            dtype, channels = _MODES[image.mode]
            return np.asarray(image).astype(dtype, copy=False).reshape(image.height, image.width, channels)
    except (OSError, SyntaxError, ValueError, TypeError, binascii.Error, Image.DecompressionBombError) as error:
        if isinstance(error, FormatError):
            raise
        raise FormatError(f"an image ({named!r:.40}) is neither a JPEG nor a PNG ({error!s:.200})") from None


def raw_image(message: Mapping[str, Any]) -> Array:
    """The pixels of a sensor_msgs/msg/Image, given by its fields, in the order red, green, blue."""
    try:
        encoding, big = str(message["encoding"]), bool(message["is_bigendian"])
        height, width, step = (int(message[name]) for name in ("height", "width", "step"))
        data = np.asarray(message["data"], np.uint8)
    except (LookupError, TypeError, ValueError, OverflowError) as error:
        raise FormatError(f"an image lacks a field ({type(error).__name__}: {error}); fetch the file again") from None
    if encoding not in ENCODINGS:
        raise FormatError(f"its images are {encoding!r:.40}, and {', '.join(ENCODINGS)} are read; convert them")
    kind, channels = ENCODINGS[encoding]
    dtype = np.dtype((">" if big else "<") + kind)
    row = width * channels * dtype.itemsize
    if data.size != height * step or step < row or not 0 < height * width <= MOST_PIXELS:
        raise FormatError(
            f"an image of {width} x {height} pixels ({encoding}) has {data.size:,} bytes in rows of {step}, "
            f"expected {height} rows of at least {row}"
        )
    pixels = np.ascontiguousarray(data.reshape(height, step)[:, :row]).view(dtype).reshape(height, width, channels)
    pixels = pixels.astype(dtype.newbyteorder("="), copy=False)
    return pixels[..., ::-1] if encoding == "bgr8" else pixels
