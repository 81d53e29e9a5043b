"""Spec: the shapes, dtypes and bounds of a tree of arrays, and checks that name the first wrong field."""

from __future__ import annotations

import json
import math
import operator
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NoReturn, TypeAlias

import numpy as np

from understudy.core import tree as trees
from understudy.core.codec import Codec, check_codec, codec_from_json, codec_to_json
from understudy.core.errors import SpecError
from understudy.core.tree import Nested, Tree

Bound: TypeAlias = float | tuple[float, ...] | None

DTYPES = (
    "bool",
    "uint8",
    "int8",
    "uint16",
    "int16",
    "uint32",
    "int32",
    "uint64",
    "int64",
    "float16",
    "float32",
    "float64",
    "str",
)


_SCALARS = {"f": "a number", "b": "True or False"}  # by kind of dtype; others are whole numbers

MAX_DIMENSIONS = 15  # of a field; its rows have one more


@dataclass(frozen=True, kw_only=True)
class ArraySpec:
    """One leaf. A first dimension of None is ragged (a different length in each row); dtype 'str' is text.

    `low` and `high` are inclusive, one number or one per element of the last dimension. A float leaf with a bound
    refuses NaN; without bounds it takes any float. `codec` says how the frames of a camera are stored: `Jpeg()`,
    `H264()` or `Png()`; without one, the pixels as they are.
    """

    shape: tuple[int | None, ...]
    dtype: str
    low: Bound = None
    high: Bound = None
    codec: Codec | None = None

    def __post_init__(self) -> None:
        shape = tuple(None if size is None else operator.index(size) for size in self.shape)
        object.__setattr__(self, "shape", shape)
        object.__setattr__(self, "dtype", _dtype_name(self.dtype))
        for name in ("low", "high"):
            bound = getattr(self, name)
            if bound is not None:  # floats throughout, so that equal specs have equal texts
                object.__setattr__(self, name, tuple(map(float, bound)) if np.ndim(bound) else float(bound))
        if self.dtype not in DTYPES:
            raise SpecError(f"dtype: expected one of {', '.join(DTYPES)}, got {self.dtype!r}; convert the field")
        if self.dtype == "str" and (self.shape or self.bounded):
            raise SpecError(f"shape: text has shape () and no bounds, got {list(self.shape)}; use text()")
        if len(self.shape) > MAX_DIMENSIONS:
            raise SpecError(f"shape: expected up to {MAX_DIMENSIONS} dimensions, got {len(self.shape)}; reshape it")
        for axis, size in enumerate(self.shape):
            if size is None and axis > 0:
                raise SpecError(f"shape: only the first dimension may be None (ragged), got {list(self.shape)}")
            if size is not None and size < 0:
                raise SpecError(f"shape: dimensions are not negative, got {list(self.shape)}")
            if size == 0 and self.shape[0] is None:
                raise SpecError(f"shape: a ragged field has elements of some size, got {list(self.shape)}")
        for name in ("low", "high"):
            bound = getattr(self, name)
            if isinstance(bound, tuple) and (not self.shape or len(bound) != self.shape[-1]):
                raise SpecError(
                    f"{name}: expected one number or one per element of the last dimension of {list(self.shape)}, "
                    f"got {len(bound)} numbers"
                )
        if self.bounded and not np.all(self.limits[0] <= self.limits[1]):
            raise SpecError(f"low: expected no more than high, got {self.low} and {self.high}; correct the bounds")
        if self.codec is not None:
            check_codec(self.codec, self.shape, self.dtype)
            if self.bounded:
                raise SpecError("codec: an encoded field has no bounds; drop low and high, or the codec")

    @cached_property
    def ragged(self) -> bool:
        """Whether rows differ in size: text, or a first dimension of None."""
        return self.dtype == "str" or None in self.shape

    @cached_property
    def bounded(self) -> bool:
        return self.low is not None or self.high is not None

    @cached_property
    def numpy_dtype(self) -> np.dtype[Any]:
        """The dtype of a leaf that is not text."""
        return np.dtype(self.dtype)

    @cached_property
    def limits(self) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        """The bounds as arrays, infinite where there is none; those of a float leaf are rounded as its values are."""
        dtype = self.dtype if self.dtype.startswith("float") else "float64"
        with np.errstate(over="ignore"):
            return (
                np.asarray(-np.inf if self.low is None else self.low, dtype),
                np.asarray(np.inf if self.high is None else self.high, dtype),
            )

    @property
    def fixed_shape(self) -> tuple[int, ...]:
        """The shape of a leaf that is not ragged."""
        assert not self.ragged
        return tuple(size for size in self.shape if size is not None)

    @cached_property
    def row_bytes(self) -> int:
        """Bytes of one value; 0 for a ragged leaf."""
        return 0 if self.ragged else np.dtype(self.dtype).itemsize * math.prod(self.fixed_shape)

    def __str__(self) -> str:
        if self.dtype == "str":
            return "text"
        return f"{self.dtype} [{', '.join('?' if size is None else str(size) for size in self.shape)}]"

    def check(self, value: Any, path: str) -> Any:
        """The value as an array (or str) that fits, or a SpecError that begins with `path`.

        Arrays must have the right dtype already; Python numbers and lists are converted if nothing is lost in kind.
        """
        if self.dtype == "str":
            if not isinstance(value, str):
                raise SpecError(f"{path}: expected text, got {describe(value)}; pass a str")
            if not value.isascii():
                refuse_lone_surrogates(value, path)
            return value
        if self.fits(value):
            return value
        array: np.ndarray[Any, Any]
        if type(value) is float and abs(value) <= self._largest_float:
            array = np.asarray(value, self.numpy_dtype)
        elif isinstance(value, np.ndarray | np.generic):
            array = np.asarray(value)
        else:
            array = self._converted(value, path)
        if array.dtype != self.numpy_dtype or not self._fits_shape(array.shape):
            raise SpecError(f"{path}: expected {self}, got {describe(array)}; convert it first")
        if not self._within(array):
            self._refuse_bounds(array, path)
        return array

    def fits(self, value: Any) -> bool:
        """Whether a value is an array that `check` gives back as it is."""
        return (
            type(value) is np.ndarray
            and value.dtype == self.numpy_dtype
            and (value.shape == self.shape or self._fits_shape(value.shape))
            and (not self.bounded or self._within(value))
        )

    @cached_property
    def _largest_float(self) -> float:
        """Up to here a Python float needs no more care to become a value of this leaf; negative if it never can."""
        return float(np.finfo(self.numpy_dtype).max) if self.numpy_dtype.kind == "f" else -1.0

    def _fits_shape(self, shape: tuple[int, ...]) -> bool:
        if not self.ragged:
            return shape == self.shape
        return len(shape) == len(self.shape) and shape[1:] == self.shape[1:]

    def _within(self, array: np.ndarray[Any, Any]) -> bool:
        if not self.bounded:
            return True
        if self._range is not None and array.size:  # a third of the time of the general case; a NaN is both extremes
            low, high = self._range
            return bool(low <= array.item(array.argmin()) and array.item(array.argmax()) <= high)
        return bool(((array >= self.limits[0]) & (array <= self.limits[1])).all())

    @cached_property
    def _range(self) -> tuple[float, float] | None:
        """The limits, if they are the same for all elements."""
        low, high = self.limits
        return None if low.ndim or high.ndim else (low.item(), high.item())

    def _converted(self, value: Any, path: str) -> np.ndarray[Any, Any]:
        try:
            array = np.asarray(value)
            if array.size == 0:
                return array.astype(self.dtype)
            wanted = self.numpy_dtype
            if array.dtype.kind in "iu" and wanted.kind in "iu":
                limits = np.iinfo(wanted)
                if array.min() < limits.min or array.max() > limits.max:
                    raise OverflowError
                return array.astype(wanted)
            if array.dtype.kind == "b" and wanted.kind != "b":
                raise SpecError(f"{path}: expected {self}, got {describe(array)}; convert it first")
            with np.errstate(over="raise"):
                return array.astype(wanted, casting="same_kind")
        except SpecError:
            raise
        except (OverflowError, FloatingPointError):
            raise SpecError(
                f"{path}: expected {self}, got {describe(value)}, which does not fit; choose a wider dtype"
            ) from None
        except (TypeError, ValueError):
            advice = "a numpy array" if self.shape else _SCALARS.get(self.numpy_dtype.kind, "a whole number")
            raise SpecError(f"{path}: expected {self}, got {describe(value)}; pass {advice}") from None

    def _refuse_bounds(self, array: np.ndarray[Any, Any], path: str) -> NoReturn:
        low, high = self.limits
        good = (array >= low) & (array <= high)
        index = np.unravel_index(int(np.argmin(good)), array.shape) if array.shape else ()
        where = f"{path}[{', '.join(map(str, index))}]" if index else path
        advice = "fix what computed it" if np.isnan(array[index]) else "clip it, or widen the bounds of the spec"
        lowest, highest = (np.broadcast_to(b, array.shape)[index] for b in (low, high))
        raise SpecError(
            f"{where}: expected a value from {_exact(lowest)} to {_exact(highest)}, got {_exact(array[index])}; "
            f"{advice}"
        )

    def zero(self) -> Any:
        """The value that stands where there is none: zeros, no elements, or the empty text."""
        if self.dtype == "str":
            return ""
        return np.zeros([0 if size is None else size for size in self.shape], self.dtype)

    def to_json(self) -> dict[str, Any]:
        fields: dict[str, Any] = {"shape": list(self.shape), "dtype": self.dtype}
        for name in ("low", "high"):
            bound = getattr(self, name)
            if bound is not None:
                fields[name] = list(bound) if isinstance(bound, tuple) else bound
        if self.codec is not None:
            fields["codec"] = codec_to_json(self.codec)
        return fields

    @staticmethod
    def from_json(fields: Mapping[str, Any]) -> ArraySpec:
        codec = fields.get("codec")
        return ArraySpec(**{**fields, "codec": None if codec is None else codec_from_json(codec)})


def _dtype_name(dtype: Any) -> str:
    """What numpy calls a dtype; what it does not know stays as it is."""
    try:
        return str(dtype) if dtype is None or dtype == "str" else str(np.dtype(dtype))
    except TypeError:
        return str(dtype)


def _exact(number: Any) -> str:
    """The shortest digits that are this number and no other of its dtype, so 1.0000001 is not shown as 1."""
    return np.format_float_positional(number, trim="-")


def refuse_lone_surrogates(value: str, path: str) -> None:
    """Refuse lone surrogates (halves of characters), which UTF-8 cannot encode."""
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise SpecError(
            f"{path}: expected text, got {ascii(value)[:40]}, whose character {error.start} is half of one; "
            f"decode it with errors='replace'"
        ) from None


def text() -> ArraySpec:
    """A leaf that holds a str."""
    return ArraySpec(shape=(), dtype="str")


_LEAF_KEY = "$array"


@dataclass(frozen=True)
class Spec:
    """A tree of ArraySpecs. An empty dict is a tree with no leaves."""

    tree: Nested[ArraySpec]

    def __post_init__(self) -> None:
        for path, leaf in self.leaves():
            refuse_lone_surrogates(path, "spec")
            if not isinstance(leaf, ArraySpec):
                raise SpecError(f"{path or 'spec'}: expected an ArraySpec, got {describe(leaf)}; wrap it")
            if _LEAF_KEY in path.split(trees.SEPARATOR):
                raise SpecError(f"{path}: expected another name than {_LEAF_KEY!r}, which marks leaves; rename it")

    def leaves(self, prefix: str = "") -> Iterator[tuple[str, ArraySpec]]:
        return trees.leaves(self.tree, prefix)

    @cached_property
    def flat(self) -> dict[str, ArraySpec]:
        return dict(self.leaves())

    def check(self, value: Tree, path: str = "") -> dict[str, Any]:
        """The flat value with paths below `path`, each leaf checked; a SpecError names the first that is wrong."""
        checked: dict[str, Any] = {}
        self.check_into(checked, value, path)
        return checked

    def check_into(self, checked: dict[str, Any], value: Tree, path: str) -> None:
        """As `check`, into a flat dict that may hold other fields already."""
        if _fits_into(checked, value, self._below(path)):
            return
        found = trees.flatten(value, path)
        wanted = dict(self.leaves(path))
        if found.keys() != wanted.keys():
            self._refuse_paths(found, wanted, path)
        for name, leaf in wanted.items():
            checked[name] = leaf.check(found[name], name or "value")

    def _below(self, path: str) -> Nested[tuple[str, ArraySpec]]:
        """The tree with each leaf beside its path below `path`; made once, since every step asks for it."""
        if path not in self._trees_below:
            self._trees_below[path] = trees.map_with_paths(lambda name, leaf: (name, leaf), self.tree, path)
        return self._trees_below[path]

    @cached_property
    def _trees_below(self) -> dict[str, Nested[tuple[str, ArraySpec]]]:
        return {}

    def _refuse_paths(self, found: Mapping[str, Any], wanted: Mapping[str, ArraySpec], path: str) -> None:
        if set(found) == {path} and path not in wanted:
            raise SpecError(
                f"{path or 'value'}: expected a dict with {', '.join(sorted(self.flat)) or 'no fields'}, "
                f"got {describe(found[path])}; pass the whole tree"
            )
        missing = sorted(wanted.keys() - found.keys())
        surplus = sorted(found.keys() - wanted.keys())
        if missing:
            also = f" (got {', '.join(surplus)} instead)" if surplus else ""
            raise SpecError(f"{missing[0]}: expected {wanted[missing[0]]}, got nothing{also}; add the field")
        raise SpecError(
            f"{surplus[0]}: expected no such field, got {describe(found[surplus[0]])}; "
            f"drop it, or add it to the spec (it has {', '.join(sorted(wanted)) or 'no fields'})"
        )

    def zero(self) -> Tree:
        return trees.map_leaves(lambda leaf: leaf.zero(), self.tree)

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values; the leaves are told from dicts by their key '$array'."""
        found: Any = trees.map_leaves(lambda leaf: {_LEAF_KEY: leaf.to_json()}, self.tree)
        return dict(found)

    @staticmethod
    def from_json(value: Mapping[str, Any]) -> Spec:
        def build(node: Mapping[str, Any]) -> Nested[ArraySpec]:
            if not isinstance(node, Mapping):  # what a damaged file may say
                raise SpecError(f"spec: expected a dict of fields or of {_LEAF_KEY!r}, got {describe(node)}")
            if _LEAF_KEY in node:
                return ArraySpec.from_json(node[_LEAF_KEY])
            return {name: build(child) for name, child in node.items()}

        return Spec(build(value))


def _fits_into(checked: dict[str, Any], value: Any, wanted: Nested[tuple[str, ArraySpec]]) -> bool:
    """Collect the leaves of a value in which nothing needs to be converted or refused; False as soon as one does."""
    if isinstance(wanted, tuple):
        path, leaf = wanted
        checked[path] = value
        return leaf.fits(value)
    good = type(value) is dict and len(value) == len(wanted)
    for name, child in wanted.items():
        good = good and name in value and _fits_into(checked, value[name], child)
    return good


def describe(value: Any) -> str:
    """What a value is, in the words of an error message."""
    if isinstance(value, np.ndarray):
        return f"{value.dtype} [{', '.join(map(str, value.shape))}]"
    if isinstance(value, np.generic):
        return f"{value.dtype} []"
    if isinstance(value, Mapping):
        return f"a dict with {', '.join(map(str, value)) or 'no fields'}"
    if value is None:
        return "None"
    shown = " ".join(repr(value).split())
    return f"{type(value).__name__} {shown if len(shown) <= 40 else shown[:37] + '...'}"


def canonical_json(value: Any) -> str:
    """One text per value: sorted keys, no spaces. What digests are taken of."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
