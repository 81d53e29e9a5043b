"""Images are prepared as TensorFlow does it in OpenVLA's published evaluations; make_openvla_images.py recorded it."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pytest
from tests.golden.make_openvla_images import CROP_AREA, FILE, TO, picture

pytest.importorskip("tokenizers")

from understudy.policies import PolicyError
from understudy.policies.openvla.inputs import crop_center
from understudy.policies.openvla.jpeg_lanczos import compress_and_resize

RECORDED = np.load(FILE)
SHARE = 1e-3  # of the numbers may differ by 1: the order of a sum decides on which side of a half it ends


def assert_nearly_equal(one: np.ndarray[Any, Any], two: np.ndarray[Any, Any]) -> None:
    assert one.dtype == two.dtype == np.uint8
    distance = np.abs(one.astype(int) - two)
    assert distance.max() <= 1
    assert (distance > 0).mean() <= SHARE


def test_jpeg_and_lanczos() -> None:
    np.testing.assert_array_equal(RECORDED["image"], picture())
    assert_nearly_equal(compress_and_resize(picture(), TO), RECORDED["resized"])


def test_the_center_crop() -> None:
    assert_nearly_equal(crop_center(RECORDED["resized"], CROP_AREA), RECORDED["cropped"])


def test_an_image_need_not_be_square() -> None:
    tall = np.concatenate([picture(), picture()])
    assert compress_and_resize(tall, TO).shape == (TO, TO, 3)


def test_without_simplejpeg_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "simplejpeg", None)
    with pytest.raises(PolicyError, match=r"resize: 'jpeg_lanczos' needs simplejpeg.*understudy-robotics\[vla\]"):
        compress_and_resize(picture(), TO)
