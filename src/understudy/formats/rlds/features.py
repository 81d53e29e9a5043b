"""Reads and writes features.json, TensorFlow Datasets' description of the fields."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal, TypeAlias

from understudy.core import ArraySpec
from understudy.core.spec import DTYPES
from understudy.core.tree import join
from understudy.formats.rlds.example import Malformed

_CLASSES = "tensorflow_datasets.core.features."
_DTYPES = {"bfloat16": "float32", "string": "str", "object": "str"}  # what a dtype becomes here


@dataclass(frozen=True, kw_only=True)
class Leaf:
    """One field, possibly inside sequences, whose lengths are listed from the outermost (None: any)."""

    kind: Literal["tensor", "image", "text"]
    shape: tuple[int | None, ...] = ()
    dtype: str = "str"  # in TensorFlow Datasets; may be bfloat16
    encoding: str = "none"  # of a tensor: none, bytes or zlib; of an image: png, jpeg, or "" if not declared
    sequences: tuple[int | None, ...] = ()

    @cached_property
    def array_spec(self) -> ArraySpec:
        """The spec of one row; Malformed if it cannot be represented."""
        dtype = _DTYPES.get(self.dtype, self.dtype)
        shape = self.sequences + self.shape
        if dtype not in DTYPES:
            raise Malformed(f"its dtype is {self.dtype}")
        if dtype == "str" and shape:
            raise Malformed("it is a list of texts")
        if len(self.sequences) > 1 or None in shape[1:]:
            raise Malformed("it has several dimensions of unknown length")
        try:
            return ArraySpec(shape=shape, dtype=dtype)
        except ValueError as error:
            raise Malformed(str(error)) from None


@dataclass(frozen=True)
class Unread:
    """A field that cannot be read, and why."""

    why: str


Found: TypeAlias = Leaf | Unread


def parse_features(content: Any) -> tuple[dict[str, Found], dict[str, Found]]:
    """The fields of a step, and those of an episode beside its steps, by path."""
    if isinstance(content, Mapping) and "type" in content and "content" in content:
        raise Malformed("was written by TensorFlow Datasets before 4.5; load and save it with a newer version")
    top = _features(content)
    if "steps" not in top:
        raise Malformed(f"has no 'steps', so this is not an RLDS dataset; it has {', '.join(sorted(top)) or 'nothing'}")
    steps = top["steps"]
    if not isinstance(steps, Mapping) or not isinstance(steps.get("sequence"), Mapping):
        raise Malformed("'steps' is not a sequence, so this is not an RLDS dataset")
    of_step = dict(_walk(steps["sequence"].get("feature"), "", ()))
    of_episode = {path: leaf for name, node in top.items() if name != "steps" for path, leaf in _walk(node, name, ())}
    return of_step, of_episode


def _features(node: Any) -> Mapping[str, Any]:
    try:
        features = node["featuresDict"]["features"]
    except (TypeError, KeyError):
        raise Malformed("is not a dict of features") from None
    if not isinstance(features, Mapping) or not all(name and "/" not in name for name in features):
        raise Malformed("has a field whose name is empty or has a '/'")
    return features


def _walk(node: Any, path: str, sequences: tuple[int | None, ...]) -> Iterator[tuple[str, Found]]:
    if not isinstance(node, Mapping):
        raise Malformed(f"{path or 'steps'}: is not a feature")
    if "featuresDict" in node:
        for name, child in _features(node).items():
            yield from _walk(child, join(path, name), sequences)
    elif "sequence" in node:
        inner = node["sequence"]
        if not isinstance(inner, Mapping):
            raise Malformed(f"{path}: is not a sequence")
        length = _parse_int(inner.get("length", -1), path)
        yield from _walk(inner.get("feature"), path, (*sequences, None if length < 0 else length))
    else:
        found = _leaf(node, path)
        yield path, replace(found, sequences=sequences) if isinstance(found, Leaf) else found


def _leaf(node: Mapping[str, Any], path: str) -> Found:
    if "text" in node:
        return Leaf(kind="text")
    if "classLabel" in node:
        return Leaf(kind="tensor", dtype="int64")
    for kind in ("tensor", "image", "boundingBox"):
        declared = node.get(kind)
        if isinstance(declared, Mapping):
            if kind == "image":
                shape = _shape(declared, path) or (None, None, 3)
                dtype = declared.get("dtype") or "uint8"
                if len(shape) != 3 or dtype not in ("uint8", "uint16", "float32"):
                    raise Malformed(f"{path}: {dtype} {list(shape)} is not an image")
                return Leaf(kind="image", shape=shape, dtype=dtype, encoding=str(declared.get("encodingFormat") or ""))
            encoding = declared.get("encoding") or "none"
            if encoding not in ("none", "bytes", "zlib"):
                raise Malformed(f"{path}: its encoding is {encoding!r}; none, bytes and zlib are known")
            return Leaf(
                kind="tensor", shape=_shape(declared, path), dtype=str(declared.get("dtype")), encoding=encoding
            )
    return Unread(f"features of the kind {str(node.get('pythonClassName', '?')).rpartition('.')[2]} are not read")


def _shape(declared: Mapping[str, Any], path: str) -> tuple[int | None, ...]:
    shape = declared.get("shape") or {}
    if not isinstance(shape, Mapping) or not isinstance(shape.get("dimensions", []), list):
        raise Malformed(f"{path}: its shape is not a list")
    sizes = [_parse_int(size, path) for size in shape.get("dimensions", [])]
    return tuple(None if size < 0 else size for size in sizes)


def _parse_int(value: Any, path: str) -> int:
    try:
        return int(value)
    except (TypeError, ValueError, OverflowError):
        raise Malformed(f"{path}: expected a whole number, got {value!r}") from None


# ---- writing


def features_json(of_step: Mapping[str, Any], of_episode: Mapping[str, Any]) -> dict[str, Any]:
    """The content of features.json; trees of `Leaf`."""
    steps = {
        "pythonClassName": f"{_CLASSES}dataset_feature.Dataset",
        "sequence": {"feature": _node(of_step), "length": "-1"},
    }
    top = _node(of_episode)
    top["featuresDict"]["features"]["steps"] = steps
    return top


def _node(tree: Any) -> dict[str, Any]:
    if isinstance(tree, Mapping):
        return {
            "pythonClassName": f"{_CLASSES}features_dict.FeaturesDict",
            "featuresDict": {"features": {name: _node(child) for name, child in tree.items()}},
        }
    assert isinstance(tree, Leaf)
    if tree.sequences:
        (length,) = tree.sequences
        return {
            "pythonClassName": f"{_CLASSES}sequence_feature.Sequence",
            "sequence": {
                "feature": _node(replace(tree, sequences=())),
                "length": "-1" if length is None else str(length),
            },
        }
    if tree.kind == "text":
        return {"pythonClassName": f"{_CLASSES}text_feature.Text", "text": {}}
    shape = {"dimensions": ["-1" if size is None else str(size) for size in tree.shape]} if tree.shape else {}
    if tree.kind == "image":
        return {
            "pythonClassName": f"{_CLASSES}image_feature.Image",
            "image": {"shape": shape, "dtype": tree.dtype, "encodingFormat": tree.encoding},
        }
    return {
        "pythonClassName": f"{_CLASSES}tensor_feature.Tensor",
        "tensor": {"shape": shape, "dtype": tree.dtype, "encoding": tree.encoding},
    }
