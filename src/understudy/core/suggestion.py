"""Suggestion: what an error proposes for a name that is not known."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def did_you_mean(given: object, known: Iterable[str], otherwise: str, *, cutoff: float = 0.6) -> str:
    """`did you mean 'name'?` if a known name is like the given one, else `otherwise`."""
    near = difflib.get_close_matches(str(given), list(known), 1, cutoff)
    return f"did you mean {near[0]!r}?" if near else otherwise
