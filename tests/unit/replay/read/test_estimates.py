"""Estimates: what is written is read again, what is damaged is refused, and the store stays as it is."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import understudy as us
from understudy.core import StoreError
from understudy.replay import Estimates, Store, verify

FOUND = Estimates(
    store_id="a-store",
    commit=7,
    model="0123",
    options={"advantage_steps": 6},
    episode=np.array([2, 5], np.int64),
    num_steps=np.array([3, 2], np.int64),
    value=np.array([-0.5, -0.4, -0.3, -0.9, -0.95], np.float32),
    advantage=np.array([0.1, 0.0, 0.2, -0.1, -0.2], np.float32),
    good=np.array([True, False, True, False, False]),
)


def test_each_episode_has_its_own_and_others_none() -> None:
    second = FOUND.of(5)
    assert second is not None
    assert second.value.tolist() == pytest.approx([-0.9, -0.95])
    assert second.advantage.tolist() == pytest.approx([-0.1, -0.2])
    assert FOUND.of(3) is None
    assert FOUND.of(9) is None


def test_steps_are_good_if_they_say_so_and_not_if_nothing_is_known() -> None:
    episode, index = np.array([2, 2, 2, 5, 2, 4, 9]), np.array([0, 1, 2, 0, 3, 0, 0])
    assert FOUND.is_good(episode, index).tolist() == [True, False, True, False, False, False, False]
    empty = Estimates(
        store_id="a-store",
        commit=1,
        model="0",
        **{name: np.zeros(0, np.int64) for name in ("episode", "num_steps", "value", "advantage")},
        good=np.zeros(0, bool),
    )
    assert empty.is_good(np.array([1]), np.array([0])).tolist() == [False]


def test_the_newest_file_is_read_and_the_store_is_as_before(tmp_path: Path) -> None:
    path = tmp_path / "store"
    with Store.open(path):
        pass
    assert us.Estimates.newest(path) is None
    before = {one.name: one.read_bytes() for one in path.iterdir() if one.is_file()}
    first = FOUND.write(path)
    second = replace(FOUND, commit=8).write(path)
    os.utime(first, (1, 1))
    found = us.Estimates.newest(path)
    assert found is not None
    assert (found.commit, found.model, found.options) == (8, "0123", {"advantage_steps": 6})
    assert np.array_equal(found.value, FOUND.value)
    assert found.fingerprint == second.stem != first.stem == FOUND.fingerprint
    assert {one.name: one.read_bytes() for one in path.iterdir() if one.is_file()} == before
    assert verify(path).ok


def test_what_is_damaged_is_refused(tmp_path: Path) -> None:
    path = FOUND.write(tmp_path)
    content = bytearray(path.read_bytes())
    content[-3] ^= 1
    path.write_bytes(content)
    with pytest.raises(StoreError, match="expected estimates of steps, got another format or checksum; delete"):
        Estimates.read(path)
    changed = FOUND.write(tmp_path).read_bytes().replace(b"0123", b"0122")  # the name of the value model
    path.write_bytes(changed)
    with pytest.raises(StoreError, match="expected estimates of steps, got those with the fingerprint"):
        Estimates.read(path)
    path.write_bytes(b"nothing")
    with pytest.raises(StoreError, match="expected estimates of steps"):
        Estimates.read(path)
    with pytest.raises(StoreError, match="value: expected 5 numbers, one a step, got 4"):
        replace(FOUND, value=FOUND.value[:4])
