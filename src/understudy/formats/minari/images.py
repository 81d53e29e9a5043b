"""Decodes images that Minari stores as JPEG, in rows of equal or varying length."""

from __future__ import annotations

import io
from typing import Any

import numpy as np

from understudy.core import ArraySpec
from understudy.formats.format import FormatError


def decode_images(rows: Any, leaf: ArraySpec, num_rows: int) -> np.ndarray[Any, Any]:
    """Images [num_rows, height, width, channels] (or without channels) from the bytes of each."""
    try:
        from PIL import Image, UnidentifiedImageError
    except ImportError:
        raise FormatError(
            "images are stored as JPEG; run pip install 'understudy-robotics[minari]' to decode them"
        ) from None
    if len(rows) != num_rows or any(np.asarray(row).dtype != np.uint8 for row in rows):
        raise FormatError(f"expected {num_rows} images, got {len(rows)} rows")
    height, width, *channels = leaf.fixed_shape
    images = np.empty((num_rows, *leaf.fixed_shape), np.uint8)
    for row, out in zip(rows, images, strict=True):
        try:
            with Image.open(io.BytesIO(row.tobytes()), formats=["JPEG"]) as image:
                if image.size != (width, height) or len(image.getbands()) != (channels[0] if channels else 1):
                    raise FormatError(f"an image has {image.size[1]}x{image.size[0]} pixels, expected {height}x{width}")
                out[...] = np.asarray(image).reshape(out.shape)
        except (UnidentifiedImageError, OSError, SyntaxError, ValueError) as error:
            if isinstance(error, FormatError):
                raise
            raise FormatError(f"an image is not a JPEG ({error}); the file is damaged") from None
    return images
