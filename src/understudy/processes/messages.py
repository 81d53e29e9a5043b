"""What the two ends of a socket say in the same words, whatever else they say: numpy values, and errors."""

from __future__ import annotations

import traceback
from typing import Any

import numpy as np


def plain(value: Any) -> Any:
    """What JSON takes instead of a numpy value; the `default` of an encoder."""
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"{type(value).__name__} is no JSON value")


def raised(error: BaseException) -> dict[str, Any]:
    """An error as an answer: one line, and the traceback."""
    text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    return {"raised": f"{type(error).__name__}: {error}"[:2000], "traceback": text[-20_000:]}
