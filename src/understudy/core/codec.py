"""Codec: how the frames of a camera field are stored. The values only; `understudy.codecs` encodes and decodes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, ClassVar, TypeAlias

from understudy.core.errors import SpecError


@dataclass(frozen=True, kw_only=True)
class Jpeg:
    """Every frame is a JPEG with 4:2:0 chroma. Lossy."""

    quality: int = 90

    name: ClassVar[str] = "jpeg"
    lossy: ClassVar[bool] = True
    gop_size: ClassVar[int] = 1

    def __post_init__(self) -> None:
        if not 1 <= self.quality <= 100:
            raise SpecError(f"quality: expected a JPEG quality from 1 to 100, got {self.quality}; 90 is usual")


@dataclass(frozen=True, kw_only=True)
class H264:
    """H.264 in GOPs (groups of pictures) of up to `gop_size` frames: a key frame and the changes after it. Lossy.

    `crf` is x264's constant rate factor: lower is better and larger. It is None where frames are kept as a data set has
    them: nobody knows how they were encoded. A longer GOP is smaller, and a random frame of it takes longer to decode.
    """

    crf: int | None = 19
    gop_size: int = 10

    name: ClassVar[str] = "h264"
    lossy: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.crf is not None and not 0 <= self.crf <= 51:
            raise SpecError(f"crf: expected x264's rate factor from 0 to 51, got {self.crf}; 18 to 23 is usual")
        if not 1 <= self.gop_size <= MAX_GOP_SIZE:
            raise SpecError(f"gop_size: expected 1 to {MAX_GOP_SIZE} frames, got {self.gop_size}; 10 is usual")


@dataclass(frozen=True, kw_only=True)
class Png:
    """Every frame is a PNG, so every pixel comes back as it was; for masks and depth, or where no loss is allowed."""

    name: ClassVar[str] = "png"
    lossy: ClassVar[bool] = False
    gop_size: ClassVar[int] = 1


Codec: TypeAlias = Jpeg | H264 | Png
MAX_GOP_SIZE = 100  # frames; the number of a frame in its GOP is stored in a byte
CODECS: dict[str, type[Codec]] = {kind.name: kind for kind in (Jpeg, H264, Png)}


def codec_named(name: str) -> Codec | None:
    """The codec of this name with its usual options; None for 'raw', which stores the pixels as they are."""
    if name == "raw":
        return None
    if name not in CODECS:
        raise SpecError(f"codec: expected raw, {', '.join(CODECS)}, got {name!r}; choose one of these")
    return CODECS[name]()


def codec_to_json(codec: Codec) -> dict[str, Any]:
    return {"name": codec.name, **asdict(codec)}


def codec_from_json(value: Mapping[str, Any]) -> Codec:
    options = dict(value)
    kind = CODECS.get(str(options.pop("name", None)))
    if kind is None or not options.keys() <= {field.name for field in fields(kind)}:
        raise SpecError(
            f"codec: expected {', '.join(CODECS)} with their options, got {dict(value)!r}; a newer version of "
            f"understudy may know it: run `pip install --upgrade understudy-robotics`"
        )
    return kind(**options)


def check_codec(codec: Codec, shape: tuple[int | None, ...], dtype: str) -> None:
    """Refuse a field that a codec has no place for."""
    if not isinstance(codec, Jpeg | H264 | Png):
        raise SpecError(f"codec: expected Jpeg(), H264() or Png(), got {codec!r}; import them from understudy")
    sizes = [size for size in shape if size is not None]
    is_picture = len(sizes) == len(shape) and len(sizes) in (2, 3) and min(sizes) > 0
    if isinstance(codec, Png):
        channels = sizes[2] if is_picture and len(sizes) == 3 else 1
        if is_picture and ((dtype == "uint8" and channels in (1, 3, 4)) or (dtype == "uint16" and channels == 1)):
            return
        wanted = "uint8 [height, width] or [height, width, 1, 3 or 4], or uint16 [height, width]"
    else:
        even = isinstance(codec, Jpeg) or (is_picture and sizes[0] % 2 == sizes[1] % 2 == 0)
        if is_picture and dtype == "uint8" and len(sizes) == 3 and sizes[2] == 3 and even:
            return
        wanted = "uint8 [height, width, 3]" + (" with an even height and width" if isinstance(codec, H264) else "")
    raise SpecError(
        f"codec: {codec.name} stores {wanted}, got {dtype} {list(shape)}; use 'png' where no pixel may change, "
        f"or no codec"
    )
