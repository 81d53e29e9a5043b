"""Random shifts against loops in numpy, pixel for pixel."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from understudy.algorithms.offpolicy.augment import random_shift, shifted

IMAGES = np.random.default_rng(0).integers(0, 256, (6, 5, 7, 3), dtype=np.uint8)


@pytest.mark.parametrize("pixels", [1, 4])
def test_every_pixel_comes_from_where_the_generator_says(pixels: int) -> None:
    found = random_shift(torch.from_numpy(IMAGES), pixels, torch.Generator().manual_seed(3)).numpy()
    down, right = torch.randint(-pixels, pixels + 1, (2, 6), generator=torch.Generator().manual_seed(3)).tolist()
    assert len(set(down + right)) > 1
    for image in range(6):
        for y in range(5):
            for x in range(7):
                from_y = min(max(y + down[image], 0), 4)
                from_x = min(max(x + right[image], 0), 6)
                assert (found[image, y, x] == IMAGES[image, from_y, from_x]).all()


def test_all_shifts_happen_and_no_larger_one() -> None:
    ramp = np.broadcast_to(np.arange(64, dtype=np.uint8)[None, None, :, None], (500, 64, 64, 1)).copy()
    found = random_shift(torch.from_numpy(ramp), 4, torch.Generator().manual_seed(0))[:, 32, 32, 0]
    assert set(found.tolist()) == set(range(28, 37))


def test_a_view_of_every_second_picture_is_shifted_like_its_copy() -> None:
    strided = torch.from_numpy(IMAGES)[::2]
    first = random_shift(strided, 2, torch.Generator().manual_seed(1))
    assert torch.equal(first, random_shift(strided.clone(), 2, torch.Generator().manual_seed(1)))


def test_only_cameras_are_shifted_each_its_own_way_and_zero_draws_nothing() -> None:
    observation = {"a": torch.from_numpy(IMAGES), "b": torch.from_numpy(IMAGES), "state": torch.arange(6.0)}
    generator = torch.Generator().manual_seed(0)
    found = shifted(observation, ("a", "b"), 2, generator)
    assert torch.equal(found["state"], observation["state"])
    assert not torch.equal(found["a"], found["b"])
    before = generator.get_state()
    assert torch.equal(shifted(observation, ("a", "b"), 0, generator)["a"], observation["a"])
    assert torch.equal(generator.get_state(), before)
