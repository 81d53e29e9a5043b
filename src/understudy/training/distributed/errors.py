"""The one error of this package, which every other file of it raises."""

from __future__ import annotations

from understudy.core import UnderstudyError


class RanksError(UnderstudyError):
    """Ranks that did not come together, a rank that is gone or late, or a module that cannot be trained as asked."""
