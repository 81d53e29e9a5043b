"""Closes: what is closed at the end of a `with`, however that ends."""

from __future__ import annotations

import abc
from types import TracebackType
from typing import TypeVar

Own = TypeVar("Own", bound="Closes")


class Closes(abc.ABC):
    @abc.abstractmethod
    def close(self) -> None: ...

    def __enter__(self: Own) -> Own:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
