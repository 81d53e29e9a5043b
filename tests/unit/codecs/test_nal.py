"""The units of H.264 streams: split, joined, told apart frame by frame, and never a crash on other bytes."""

from __future__ import annotations

import numpy as np
import pytest
from tests.moving_camera import moving_frames

from understudy.codecs import encode_frames
from understudy.codecs.nal import access_units, join_units, kind_of, split_sample, split_units
from understudy.core import H264


def test_packets_are_split_into_the_units_of_the_standard_and_joined_as_they_were() -> None:
    packets = encode_frames(H264(gop_size=5), moving_frames(5)).packets
    assert [[kind_of(unit) for unit in split_units(packet)] for packet in packets] == [[7, 8, 6, 5], *[[1]] * 4]
    assert [join_units(split_units(packet)) for packet in packets] == packets


def test_frames_that_were_joined_are_found_again() -> None:
    packets = encode_frames(H264(gop_size=5), moving_frames(5)).packets
    for count in range(1, 6):
        assert access_units(b"".join(packets[:count])) == packets[:count]
    assert access_units(packets[0] + packets[0]) == [packets[0]] * 2  # the next begins with its parameter sets


def test_a_frame_of_several_slices_is_one_frame() -> None:
    first, second = b"\x65\x88slice", b"\x65\x08slice"  # the second does not begin with macroblock 0
    frame = join_units([first, second])
    assert access_units(frame) == [frame]
    assert access_units(frame + frame) == [frame, frame]


def test_samples_of_mp4_files() -> None:
    units = [b"\x67abc", b"\x65" + bytes(300)]
    for size in (2, 4):
        sample = b"".join(len(unit).to_bytes(size) + unit for unit in units)
        assert split_sample(sample, size) == units
        for wrong in (sample[:-1], sample + b"\0" * size, sample + b"\1"):
            with pytest.raises(ValueError, match="longer than the frame, or empty"):
                split_sample(wrong, size)


def test_other_bytes_are_no_units_and_nothing_is_lost() -> None:
    random = np.random.default_rng(0)
    for _ in range(200):
        data = random.integers(0, 3, random.integers(0, 40), np.uint8).tobytes()
        assert b"".join(access_units(data)) == data
        assert all(split_units(data))  # none is empty
    assert access_units(b"") == [b""]
