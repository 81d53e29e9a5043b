"""JPEG: one frame at a time, with libjpeg-turbo's exact transforms, which give the same pixels on every CPU."""

from __future__ import annotations

import numpy as np

from understudy.codecs.picture import Array, FrameError, PixelPicture, library
from understudy.core.codec import Jpeg


def encode(frame: Array, codec: Jpeg) -> bytes:
    encoded: bytes = library("simplejpeg").encode_jpeg(
        np.ascontiguousarray(frame), codec.quality, "RGB", "420", fastdct=False
    )
    return encoded


def decode(packet: bytes, shape: tuple[int, ...]) -> PixelPicture:
    try:
        array: Array = library("simplejpeg").decode_jpeg(packet, "RGB", fastdct=False, fastupsample=False)
    except ValueError as error:
        raise FrameError(f"a JPEG frame cannot be decoded ({error}); run `understudy verify`") from None
    if array.shape != shape:
        raise FrameError(f"a JPEG frame: expected {list(shape)} pixels, got {list(array.shape)}; check the writer")
    return PixelPicture(array)
