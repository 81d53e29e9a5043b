"""Which cameras are stored by which codec."""

import pytest

from understudy.core import H264, ArraySpec, Jpeg, Png, Spec, SpecError, StepSpec
from understudy.core.cameras import CodecName, encode_cameras

SPEC = StepSpec(
    observation=Spec(
        {
            "wide": ArraySpec(shape=(480, 640, 3), dtype="uint8"),
            "wrist": ArraySpec(shape=(128, 128, 3), dtype="uint8"),
            "odd": ArraySpec(shape=(481, 640, 3), dtype="uint8"),
            "mask": ArraySpec(shape=(480, 640, 1), dtype="uint8"),
            "depth": ArraySpec(shape=(480, 640), dtype="uint16"),
            "table": ArraySpec(shape=(480, 640), dtype="float32"),
            "state": ArraySpec(shape=(14,), dtype="float32"),
        }
    ),
    action=Spec(ArraySpec(shape=(2,), dtype="float32")),
)


@pytest.mark.parametrize(
    ("name", "chosen"),
    [
        ("auto", {"wide": H264(), "odd": Png(), "mask": Png(), "depth": Png()}),
        ("raw", {}),
        ("jpeg", {"wide": Jpeg(), "wrist": Jpeg(), "odd": Jpeg(), "mask": Png(), "depth": Png()}),
        ("h264", {"wide": H264(), "wrist": H264(), "odd": Png(), "mask": Png(), "depth": Png()}),
        ("png", dict.fromkeys(("wide", "wrist", "odd", "mask", "depth"), Png())),
    ],
)
def test_the_codec_of_each_camera(name: CodecName, chosen: dict[str, object]) -> None:
    spec = encode_cameras(SPEC, name)
    assert spec.encoded == {f"observation/{field}": codec for field, codec in chosen.items()}
    assert spec.decoded == SPEC
    assert encode_cameras(spec, "raw") == SPEC


def test_an_unknown_name_is_refused() -> None:
    with pytest.raises(SpecError, match="codec: expected auto, raw, jpeg, h264, png, got 'mp4'"):
        encode_cameras(SPEC, "mp4")  # type: ignore[arg-type]
