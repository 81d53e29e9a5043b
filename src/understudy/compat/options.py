"""Options of other projects that have no effect here are refused, with what to do instead."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping
from typing import Any

from understudy.core import StoreError


def refuse_options(owner: str, given: Mapping[str, Any], advice: Mapping[str, str], ours: Collection[str]) -> None:
    """Raise for the first given option. `advice` says for each option of the other project what to do instead."""
    for name in given:
        if name in advice:
            raise StoreError(f"{owner}: {name}: {advice[name]}")
        near = difflib.get_close_matches(name, [*ours, *advice], 1)
        raise TypeError(
            f"{owner}: there is no option {name!r}; "
            + (f"did you mean {near[0]!r}?" if near else f"it has {', '.join(ours)}")
        )
