"""Stores columns of an episode as HDF5 datasets: numbers as they are, text and ragged fields as values and lengths."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from understudy.core import ArraySpec
from understudy.core.episode import Column
from understudy.formats.format import FormatError

VALUES, LENGTHS = "values", "lengths"


def datasets_of(leaf: ArraySpec, column: Column) -> dict[str, np.ndarray[Any, Any]]:
    """The datasets of a column by name; "" is the field itself."""
    if not leaf.ragged:
        return {"": np.asarray(column)}
    rows = [
        np.frombuffer(value.encode(), np.uint8) if isinstance(value, str) else np.asarray(value) for value in column
    ]
    dtype = np.dtype(np.uint8) if leaf.dtype == "str" else leaf.numpy_dtype
    empty = np.empty((0, *(size or 0 for size in leaf.shape[1:])), dtype)
    return {VALUES: np.concatenate([empty, *rows]), LENGTHS: np.array([len(row) for row in rows], np.int64)}


def column_from(leaf: ArraySpec, read: Callable[[str], Any], num_rows: int) -> Column:
    """The column whose datasets `read` returns by name; FormatError if they do not fit the leaf."""
    if not leaf.ragged:
        return checked(leaf, read(""), num_rows)
    values, lengths = np.asarray(read(VALUES)), np.asarray(read(LENGTHS))
    if lengths.dtype != np.int64 or lengths.shape != (num_rows,) or (lengths < 0).any() or lengths.sum() != len(values):
        raise FormatError(f"{num_rows} lengths of {len(values)} values do not fit together; the file is damaged")
    rows = np.split(values, np.cumsum(lengths)[:-1]) if num_rows else []
    if leaf.dtype == "str":
        try:
            return [row.astype(np.uint8).tobytes().decode() for row in rows]
        except UnicodeDecodeError:
            raise FormatError("text that is not UTF-8; the file is damaged") from None
    return [leaf.check(row, "value") for row in rows]


def checked(leaf: ArraySpec, column: Any, num_rows: int) -> Column:
    """The column, after a check that each row fits the leaf."""
    if leaf.dtype == "str":
        if not isinstance(column, Sequence) or len(column) != num_rows or not all(isinstance(x, str) for x in column):
            raise FormatError(f"expected {num_rows} texts")
        return [leaf.check(value, "text") for value in column]
    if (
        not isinstance(column, np.ndarray)
        or column.shape != (num_rows, *leaf.fixed_shape)
        or column.dtype != leaf.dtype
    ):
        got = f"{column.dtype} {list(column.shape)}" if isinstance(column, np.ndarray) else "text"
        raise FormatError(f"expected {num_rows} rows of {leaf}, got {got}")
    if leaf.bounded:
        for row in column:
            leaf.check(row, "value")
    return column
