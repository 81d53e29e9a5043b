"""Parts of messages that parent and child share: numpy values and errors as JSON."""

from __future__ import annotations

import traceback
from typing import Any

import numpy as np


def plain(value: Any) -> Any:
    """A numpy value as a plain JSON value; pass it to an encoder as `default`."""
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"{type(value).__name__} is no JSON value")


def raised(error: BaseException) -> dict[str, Any]:
    """An error as a message: one line, and the traceback."""
    text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    return {"raised": f"{type(error).__name__}: {error}"[:2000], "traceback": text[-20_000:]}
