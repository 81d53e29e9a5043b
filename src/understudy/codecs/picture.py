"""Picture: a decoded frame with its checksum, and the error of a frame that cannot be decoded."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Protocol, TypeAlias

import numpy as np
import xxhash

from understudy.core import DamageError, UnderstudyError

Array: TypeAlias = np.ndarray[Any, Any]


class FrameError(DamageError):
    """An encoded frame cannot be decoded, or decodes to other pixels than when it was written."""


class MissingCodecError(UnderstudyError, ImportError):
    """The library of a codec is not installed."""


class Picture(Protocol):
    """A decoded frame."""

    @property
    def checksum(self) -> int:
        """Of what the decoder gave."""
        ...

    def pixels(self) -> Array:
        """The frame with the shape and dtype of its field."""
        ...


@dataclass(frozen=True)
class PixelPicture:
    """A frame whose decoder gives the pixels themselves."""

    array: Array

    @property
    def checksum(self) -> int:
        return checksum_of(self.array)

    def pixels(self) -> Array:
        return self.array


def checksum_of(array: Array) -> int:
    """xxh3 of the bytes, 64 bits."""
    return xxhash.xxh3_64_intdigest(np.ascontiguousarray(array).data)


def library(name: str) -> ModuleType:
    """Import the library of a codec; an error that says how to install it."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise MissingCodecError(
            f"encoded camera frames need {error.name}, which is not installed; "
            f"run `pip install 'understudy-robotics[cameras]'`"
        ) from None
