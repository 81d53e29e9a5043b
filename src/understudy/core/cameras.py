"""Cameras: which fields of a spec are camera frames, and how they are to be stored."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Literal, TypeAlias, get_args

from understudy.core import tree as trees
from understudy.core.codec import H264, Codec, codec_named
from understudy.core.errors import SpecError
from understudy.core.spec import ArraySpec, Spec
from understudy.core.step import StepSpec

CodecName: TypeAlias = Literal["auto", "raw", "jpeg", "h264", "png"]
RAW_PIXELS = 128 * 128  # a frame up to this size is stored as it is, unless a codec is asked for


def encode_cameras(spec: StepSpec, codec: CodecName = "auto") -> StepSpec:
    """The spec with a codec for each camera of the observation, and for each depth image PNG.

    With 'auto', frames of more than 128x128 pixels are stored as H.264 (and depth as PNG), smaller ones as they are.
    """
    if codec not in get_args(CodecName):
        raise SpecError(f"codec: expected {', '.join(get_args(CodecName))}, got {codec!r}; choose one of these")

    def with_codec(leaf: ArraySpec) -> ArraySpec:
        if not is_frame(leaf) or (codec == "auto" and leaf.fixed_shape[0] * leaf.fixed_shape[1] <= RAW_PIXELS):
            return replace(leaf, codec=None) if codec == "raw" else leaf
        chosen = H264() if codec == "auto" else codec_named(codec)
        fits = chosen is None or (leaf.dtype == "uint8" and leaf.shape[2:] == (3,))
        odd = isinstance(chosen, H264) and any(size % 2 for size in leaf.fixed_shape[:2])
        return replace(leaf, codec=chosen if fits and not odd else codec_named("png"))

    return replace(spec, observation=Spec(trees.map_leaves(with_codec, spec.observation.tree)))


def with_codecs(spec: StepSpec, codecs: Mapping[str, Codec]) -> StepSpec:
    """The spec with these codecs for fields of the observation, by their paths."""
    if not codecs:
        return spec
    flat = dict(spec.observation.leaves("observation"))
    flat |= {path: replace(flat[path], codec=codec) for path, codec in codecs.items()}
    return replace(spec, observation=Spec(trees.unflatten(trees.below(flat, "observation"))))


def is_frame(leaf: ArraySpec) -> bool:
    """Whether a field looks like frames of a camera: uint8 [height, width, 1, 3 or 4], or depth in uint16."""
    if leaf.ragged or leaf.bounded or 0 in leaf.shape:
        return False
    if leaf.dtype == "uint16":
        return len(leaf.shape) == 2 or (len(leaf.shape) == 3 and leaf.shape[2] == 1)
    return leaf.dtype == "uint8" and len(leaf.shape) == 3 and leaf.shape[2] in (1, 3, 4)
