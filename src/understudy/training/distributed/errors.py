"""The error that all files of this package raise."""

from __future__ import annotations

from understudy.core import UnderstudyError


class RanksError(UnderstudyError):
    """Ranks that did not join, a rank that is gone or late, or a module that cannot be trained as configured."""


class NonFiniteError(UnderstudyError):
    """A gradient that is not finite. All ranks raise it, and another attempt would compute the same."""
