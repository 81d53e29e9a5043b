"""Rows and images: what is shown is what was recorded, and damage is never shown."""

import io
import json
import struct
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from tests.unit.dashboard.stores import SPEC, live, make_store

from understudy.core import DamageError, StoreError
from understudy.dashboard.api.episode_rows import EpisodeImages, read_rows, steps_of
from understudy.dashboard.api.targets import Target
from understudy.replay import Store
from understudy.replay.format.paths import segment_files

CAMERA = "observation/front"


@pytest.mark.parametrize(("first", "count"), [(0, 7), (0, 1), (6, 1), (2, 3), (4, 100)])
def test_rows_are_those_that_were_recorded(first: int, count: int, tmp_path: Path) -> None:
    target = Target(make_store(tmp_path / "store", 13, segment_bytes=60_000), "s")
    try:
        with target.images().reader() as reader:
            assert len(reader.catalog.segments()) > 1
            for episode in (1, 9, 10, 13):
                whole = reader.rows(episode)[1]
                found = read_rows(reader, episode, [CAMERA, "action", "extras/value"], first, count)
                for path, column in found.items():
                    assert np.array_equal(column, whole[path][first : first + count])
    finally:
        target.close()


def test_a_picture_that_is_damaged_is_not_shown(target: Target, store: Path) -> None:
    with target.images().reader() as reader:
        segment = reader.segment(1)
        at = segment.layout.columns[CAMERA].at(0) + 100
    with segment_files(store)[0].open("r+b") as file:
        file.seek(at)
        (byte,) = file.read(1)
        file.seek(at)
        file.write(bytes([byte ^ 1]))
    with pytest.raises(DamageError, match="is not what was written"):
        EpisodeImages().thumbnail(target, 1, 0.0, "")
    assert EpisodeImages().thumbnail(target, 1, 1.0, "")


def colour(jpeg: bytes) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(jpeg)).convert("RGB"), np.int64).mean(axis=(0, 1))


@pytest.mark.parametrize(("at", "row"), [(0.0, 0), (0.5, 3), (1.0, 6)])
def test_a_thumb_is_the_picture_at_that_place(at: float, row: int, target: Target) -> None:
    found = colour(EpisodeImages().thumbnail(target, 4, at, ""))
    assert np.abs(found - [3 * 37 % 256, row * 11, 90]).max() < 5


def test_frames_come_one_behind_the_other(target: Target) -> None:
    data = EpisodeImages().frames(target, 4, CAMERA, 2, 64)
    found = []
    while data:
        (size,) = struct.unpack("<I", data[:4])
        found.append(colour(data[4 : 4 + size]))
        data = data[4 + size :]
    assert [round(image[1] / 11) for image in found] == [2, 3, 4, 5, 6]
    with pytest.raises(StoreError, match="has no camera 'observation/state'"):
        EpisodeImages().frames(target, 4, "observation/state", 0, 1)


def test_thumbs_are_kept_up_to_a_size(target: Target) -> None:
    images = EpisodeImages(cache_bytes=2500)
    for episode in range(1, 13):
        images.thumbnail(target, episode, 1.0, "v")
    assert 0 < len(images._cache) < 12
    assert sum(map(len, images._cache.values())) == images._bytes <= 2500


def test_curves_have_actions_proposals_rewards_and_extras(target: Target) -> None:
    found = steps_of(target, 2)  # number 1: a human from step 4 on
    assert found["source"] == [2, 2, 2, 2, 1, 1]
    assert found["curves"]["reward"]["values"] == [[0, 1, 2, 3, 4, 5]]
    assert found["curves"]["extras/value"]["values"] == [[0, -1, -2, -3, -4, -5]]
    action = found["curves"]["action"]
    assert action["size"] == 4
    assert action["values"][1] == pytest.approx([0, 0.1, 0.2, 0.3, 0.4, 0.5])
    assert action["proposal"][1] == [None, None, None, None, pytest.approx(0.9), pytest.approx(1.0)]
    assert found["cameras"] == {CAMERA: [48, 64]}
    assert found["policy_version"] == [1] * 6
    assert found["names"] == {}  # none are invented


def test_names_of_joints_are_those_of_the_data(target: Target, store: Path) -> None:
    joints = ["shoulder_pan.pos", "elbow_flex.pos", "wrist_roll.pos", "gripper.pos"]
    with Store.open(store) as opened:
        opened.label([2], {"names": json.dumps({"action": {"motors": joints}})})
    assert steps_of(target, 2)["names"] == {"action": joints}


def test_an_episode_that_is_being_recorded_is_shown_as_far_as_it_is(tmp_path: Path) -> None:
    with Store.open(tmp_path / "store") as store:
        writer = store.writer("w", SPEC, commit_steps=3, background=False)
        live(writer, 0, num_steps=4, end=False)
        target = Target(tmp_path / "store", "s")
        try:
            found = steps_of(target, 1)
            with target.catalog().reader() as reader:
                record = reader.record(1)
            assert record.state == "open"
            assert found["num_steps"] == record.num_steps == len(found["source"])
            assert found["num_rows"] == record.num_rows
        finally:
            target.close()
