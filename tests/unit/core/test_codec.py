"""Codecs in specs: what they may be given to, and as JSON."""

from typing import Any

import pytest

from understudy.core import H264, ArraySpec, Codec, Jpeg, Png, Spec, SpecError, StepSpec
from understudy.core.codec import codec_from_json, codec_named


@pytest.mark.parametrize("codec", [None, Jpeg(quality=80), H264(crf=23, gop_size=4), Png()])
def test_a_spec_keeps_its_codec_as_json(codec: Codec | None) -> None:
    leaf = ArraySpec(shape=(48, 64, 3), dtype="uint8", codec=codec)
    assert ArraySpec.from_json(leaf.to_json()) == leaf
    assert ("codec" in leaf.to_json()) == (
        codec is not None
    )  # specs of stores before there were codecs stay as they are


def test_a_codec_that_this_version_does_not_know_is_refused() -> None:
    for value in ({"name": "av2"}, {"name": "jpeg", "depth": 10}, {}):
        with pytest.raises(SpecError, match=r"^codec: expected jpeg, h264, png with their options, got .*upgrade"):
            codec_from_json(value)


@pytest.mark.parametrize(
    ("shape", "dtype", "codec", "wanted"),
    [
        ((48, 64), "uint8", Jpeg(), "jpeg stores uint8 [height, width, 3], got uint8 [48, 64]; use 'png'"),
        ((48, 64, 3), "float32", H264(), "h264 stores uint8 [height, width, 3] with an even height and width, got fl"),
        ((47, 64, 3), "uint8", H264(), "with an even height and width, got uint8 [47, 64, 3]"),
        ((48, 64, 3), "uint16", Png(), "or uint16 [height, width], got uint16 [48, 64, 3]"),
        ((None, 64, 3), "uint8", Png(), "got uint8 [None, 64, 3]"),
        ((48, 0, 3), "uint8", Jpeg(), "got uint8 [48, 0, 3]"),
        ((48, 64, 3), "uint8", "h264", "expected Jpeg(), H264() or Png(), got 'h264'; import them from understudy"),
    ],
)
def test_a_field_that_a_codec_cannot_store_is_refused(
    shape: tuple[int | None, ...], dtype: str, codec: Any, wanted: str
) -> None:
    with pytest.raises(SpecError) as error:
        ArraySpec(shape=shape, dtype=dtype, codec=codec)
    assert str(error.value).startswith("codec: ")
    assert wanted in str(error.value)


def test_an_encoded_field_has_no_bounds() -> None:
    with pytest.raises(SpecError, match="an encoded field has no bounds"):
        ArraySpec(shape=(48, 64, 3), dtype="uint8", low=0, codec=Png())


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Jpeg(quality=0), "quality: expected a JPEG quality from 1 to 100, got 0; 90 is usual"),
        (lambda: H264(crf=52), "crf: expected x264's rate factor from 0 to 51, got 52; 18 to 23 is usual"),
        (lambda: H264(gop_size=101), "gop_size: expected 1 to 100 frames, got 101; 10 is usual"),
    ],
)
def test_options_are_checked(make: Any, message: str) -> None:
    with pytest.raises(SpecError) as error:
        make()
    assert str(error.value) == message


def test_codecs_by_name() -> None:
    assert [codec_named(name) for name in ("raw", "jpeg", "h264", "png")] == [None, Jpeg(), H264(), Png()]
    with pytest.raises(SpecError, match="expected raw, jpeg, h264, png, got 'mp4'; choose one of these"):
        codec_named("mp4")


def test_the_columns_of_an_encoded_field() -> None:
    spec = StepSpec(
        observation=Spec({"camera": ArraySpec(shape=(48, 64, 3), dtype="uint8", codec=H264())}),
        action=Spec(ArraySpec(shape=(2,), dtype="float32")),
    )
    assert spec.encoded == {"observation/camera": H264()}
    new = {path: leaf for path, leaf in spec.stored_columns.items() if spec.columns.get(path) != leaf}
    assert {path: str(leaf) for path, leaf in new.items()} == {
        "observation/camera": "uint8 [?]",
        "frame_number/observation/camera": "uint8 []",
        "decoded_checksum/observation/camera": "uint64 []",
    }
