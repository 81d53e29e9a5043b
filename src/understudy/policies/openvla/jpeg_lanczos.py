"""Images as OpenVLA's LIBERO and Bridge data and evaluations have them: compressed as JPEG, then resized by Lanczos.

TensorFlow did both. Here Pillow, simplejpeg and numpy do the same: the JPEG is equal to the bit, and of the resized
numbers at most one in a thousand differs, by 1, where a sum ends near a half.
"""

from __future__ import annotations

import importlib
import io
from functools import lru_cache
from typing import Any

import numpy as np
from PIL import Image

from understudy.policies.protocol import Array, PolicyError

_QUALITY = 95  # TensorFlow's default
_RADIUS = 3


def compress_and_resize(image: Array, size: int) -> Array:
    """An image uint8 [H, W, 3] as a square uint8 [size, size, 3]."""
    encoded = io.BytesIO()
    Image.fromarray(np.ascontiguousarray(image)).save(encoded, "JPEG", quality=_QUALITY, subsampling="4:2:0")
    whole = _decode(encoded.getvalue()).astype(np.float32)
    rows = np.tensordot(_weights(image.shape[0], size), whole, axes=(1, 0))  # [size, W, 3]
    both = np.tensordot(_weights(image.shape[1], size), rows, axes=(1, 1)).transpose(1, 0, 2)
    resized: Array = np.clip(np.round(both), 0, 255).astype(np.uint8)
    return resized


@lru_cache(maxsize=8)
def _weights(num: int, wanted: int) -> Array:  # [wanted, num] float32
    """What each pixel of a row weighs in each pixel of the resized one; wider where the row is made shorter."""
    scale = num / wanted
    middle = (np.arange(wanted) + 0.5) * scale
    distance = (np.arange(num)[None] + 0.5 - middle[:, None]) / max(scale, 1.0)
    kernel = np.where(np.abs(distance) < _RADIUS, np.sinc(distance) * np.sinc(distance / _RADIUS), 0.0)
    return np.asarray(kernel / kernel.sum(axis=1, keepdims=True), np.float32)


def _decode(data: bytes) -> Array:
    """TensorFlow encodes with the accurate DCT, as Pillow does, and decodes with the fast one, which Pillow cannot."""
    try:
        simplejpeg: Any = importlib.import_module("simplejpeg")
    except ModuleNotFoundError:
        raise PolicyError(
            "resize: 'jpeg_lanczos' needs simplejpeg, which is not installed; "
            "run `pip install 'understudy-robotics[vla]'`"
        ) from None
    image: Array = simplejpeg.decode_jpeg(data, "RGB", fastdct=True)
    return image
