"""Writes openvla_images.npz: an image, and what TensorFlow makes of it as OpenVLA's published evaluations call it.

Run it with a Python that has TensorFlow: python tests/golden/make_openvla_images.py
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

FILE = Path(__file__).with_name("openvla_images.npz")
FROM, TO = 64, 56  # as 256 and 224
CROP_AREA = 0.9


def picture() -> np.ndarray[Any, Any]:
    """Slopes, edges, stripes and noise, uint8 [FROM, FROM, 3]."""
    x = np.arange(FROM)
    image = np.stack([x[None] * 4 + 0 * x[:, None], x[:, None] * 4 + 0 * x[None], np.outer(x, x) // 16], -1)
    image[10:22, 15:35] = (200, 30, 60)
    image[37, 5:57] = 255
    image[45:60:2, 25:45] = 0
    image[25:35, 45:60] = np.random.default_rng(0).integers(0, 256, (10, 15, 3))
    return image.astype(np.uint8)


def main() -> None:
    import tensorflow as tf

    image = picture()
    decoded = tf.io.decode_image(tf.image.encode_jpeg(image), expand_animations=False, dtype=tf.uint8)
    resized = tf.image.resize(decoded, (TO, TO), method="lanczos3", antialias=True)
    resized = tf.cast(tf.clip_by_value(tf.round(resized), 0, 255), tf.uint8)
    side = tf.sqrt(CROP_AREA)
    box = tf.stack([(1 - side) / 2, (1 - side) / 2, (1 + side) / 2, (1 + side) / 2])[None]
    scaled = tf.image.convert_image_dtype(resized, tf.float32)[None]
    cropped = tf.clip_by_value(tf.image.crop_and_resize(scaled, box, [0], (TO, TO))[0], 0, 1)
    cropped = tf.image.convert_image_dtype(cropped, tf.uint8, saturate=True)
    np.savez_compressed(FILE, image=image, resized=resized.numpy(), cropped=cropped.numpy())


if __name__ == "__main__":
    main()
