"""Closeable: an object that is closed at the end of a `with` block, also when the block raises."""

from __future__ import annotations

import abc
from types import TracebackType
from typing import TypeVar

Own = TypeVar("Own", bound="Closeable")


class Closeable(abc.ABC):
    @abc.abstractmethod
    def close(self) -> None: ...

    def __enter__(self: Own) -> Own:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
