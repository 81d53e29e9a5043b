"""Frames encoded and decoded: what comes back, what is refused, and the same pixels for ever."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash
from tests.moving_camera import moving_frames, psnr

from understudy.codecs import EncodedFrames, FrameError, decode_frames, encode_frames, join_frames
from understudy.core import H264, Codec, Jpeg, Png

GOLDEN = Path(__file__).parents[2] / "golden" / "frames"
LOSSY = [Jpeg(), H264()]


def decoded(codec: Codec, frames: np.ndarray[Any, Any], group: EncodedFrames, wanted: list[int]) -> list[Any]:
    packets = group.packets[: max(wanted) + 1]
    return decode_frames(codec, frames.shape[1:], frames.dtype, packets, group.checksums, wanted)


@pytest.mark.parametrize("codec", LOSSY, ids=lambda codec: codec.name)
def test_lossy_frames_are_near_what_they_were_and_small(codec: Codec) -> None:
    frames = moving_frames(10)
    group = encode_frames(codec, frames)
    found = decoded(codec, frames, group, list(range(10)))
    assert min(map(psnr, found, frames)) > 30
    assert sum(map(len, group.packets)) < frames.nbytes / 6
    assert all(frame.shape == (48, 64, 3) and frame.dtype == np.uint8 for frame in found)


@pytest.mark.parametrize("shape", [(48, 64), (48, 64, 1), (48, 64, 3), (47, 61, 4)])
def test_png_keeps_every_pixel(shape: tuple[int, ...]) -> None:
    frames = np.random.default_rng(0).integers(0, 256, (3, *shape), np.uint8)
    group = encode_frames(Png(), frames)
    assert np.array_equal(decoded(Png(), frames, group, [0, 1, 2]), frames)


def test_png_keeps_depth_of_16_bits() -> None:
    depth = np.random.default_rng(0).integers(0, 65536, (2, 48, 64)).astype(np.uint16)
    group = encode_frames(Png(), depth)
    found = decoded(Png(), depth, group, [0, 1])
    assert found[0].dtype == np.uint16
    assert np.array_equal(found, depth)


def test_a_frame_in_a_group_needs_only_those_before_it() -> None:
    frames = moving_frames(10)
    group = encode_frames(H264(), frames)
    whole = decoded(H264(), frames, group, list(range(10)))
    for number in range(10):
        assert np.array_equal(decoded(H264(), frames, group, [number])[0], whole[number])
    assert np.array_equal(decoded(H264(), frames, group, [2, 7])[1], whole[7])


@pytest.mark.parametrize("size", [1, 2, 7])
def test_a_short_group(size: int) -> None:
    frames = moving_frames(size)
    group = encode_frames(H264(), frames)
    assert len(group.packets) == len(group.checksums) == size
    assert len(decoded(H264(), frames, group, list(range(size)))) == size


def test_options_change_what_is_stored() -> None:
    frames = moving_frames(10)

    def size(codec: Codec) -> int:
        return sum(map(len, encode_frames(codec, frames).packets))

    assert size(H264(crf=30)) < size(H264()) < size(H264(crf=10))
    assert size(Jpeg(quality=50)) < size(Jpeg()) < size(Jpeg(quality=98))


@pytest.mark.parametrize("codec", [*LOSSY, Png()], ids=lambda codec: codec.name)
def test_a_flipped_bit_is_never_served(codec: Codec) -> None:
    frames = moving_frames(4)
    group = encode_frames(codec, frames)
    clean = decoded(codec, frames, group, [0, 1, 2, 3])
    served = 0
    for position in range(0, len(group.packets[1]), max(len(group.packets[1]) // 40, 1)):
        broken = bytearray(group.packets[1])
        broken[position] ^= 16
        packets = [group.packets[0], bytes(broken), *group.packets[2:]]
        try:
            found = decode_frames(codec, frames.shape[1:], frames.dtype, packets, group.checksums, [0, 1, 2, 3])
        except FrameError:
            continue
        served += 1  # a bit that no pixel depends on
        assert np.array_equal(found, clean)
    assert served < 20


def test_a_decoder_that_gives_other_pixels_is_named() -> None:
    frames = moving_frames(2)
    group = encode_frames(Jpeg(), frames)
    with pytest.raises(FrameError, match=r"frame 1 of a GOP decodes to other pixels .* this machine's jpeg decoder"):
        decode_frames(Jpeg(), (48, 64, 3), frames.dtype, group.packets, [group.checksums[0], 7], [0, 1])


def test_a_frame_of_another_size_is_refused() -> None:
    for codec in (*LOSSY, Png()):
        group = encode_frames(codec, moving_frames(1))
        with pytest.raises(FrameError, match="expected"):
            decode_frames(codec, (64, 48, 3), np.dtype("uint8"), group.packets, group.checksums, [0])


@pytest.mark.parametrize("name", ["h264", "jpeg", "png"])
def test_frames_that_were_stored_before_decode_to_the_same_pixels(name: str) -> None:
    """Made by `python -m tests.golden.frames.make`, once: a version that fails here would change users' batches."""
    kept = json.loads((GOLDEN / f"{name}.json").read_text())
    data = (GOLDEN / f"{name}.bin").read_bytes()
    ends = np.cumsum(kept["sizes"]).tolist()
    packets = [data[end - size : end] for end, size in zip(ends, kept["sizes"], strict=True)]
    codec: Codec = {"h264": H264(), "jpeg": Jpeg(), "png": Png()}[name]
    shape, wanted = tuple(kept["shape"]), list(range(len(packets)))
    found = decode_frames(codec, shape, np.dtype("uint8"), packets, kept["decoded_checksums"], wanted)
    assert [xxhash.xxh3_64_hexdigest(np.ascontiguousarray(frame).data) for frame in found] == kept["pixels"]
    for first in range(1, len(packets)):  # the same GOP, cut as `trim` does it
        cut = [join_frames(codec, packets[: first + 1]), *packets[first + 1 :]]
        checksums = kept["decoded_checksums"][first:]
        rest = decode_frames(codec, shape, np.dtype("uint8"), cut, checksums, list(range(len(cut))))
        assert np.array_equal(rest, found[first:])


@pytest.mark.parametrize(("library", "codec"), [("av", "H264"), ("av", "Png"), ("simplejpeg", "Jpeg")])
def test_without_its_library_a_codec_says_what_to_install(library: str, codec: str) -> None:
    program = (
        f"import sys; sys.modules[{library!r}] = None\n"
        f"import numpy as np; from understudy.codecs import encode_frames; from understudy.core import {codec}\n"
        f"encode_frames({codec}(), np.zeros((1, 16, 16, 3), np.uint8))"
    )
    ended = subprocess.run([sys.executable, "-c", program], check=False, capture_output=True, text=True)
    assert ended.returncode == 1
    assert f"encoded camera frames need {library}, which is not installed" in ended.stderr
    assert "pip install 'understudy-robotics[cameras]'" in ended.stderr
