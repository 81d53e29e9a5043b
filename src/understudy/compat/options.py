"""Options that another project has and that would change nothing here: refused, with what to do instead."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping
from typing import Any

from understudy.core import StoreError


def refuse(owner: str, given: Mapping[str, Any], known: Mapping[str, str], ours: Collection[str]) -> None:
    """Raise for the first of the options that were given; `known` says for each of theirs what to do."""
    for name in given:
        if name in known:
            raise StoreError(f"{owner}: {name}: {known[name]}")
        near = difflib.get_close_matches(name, [*ours, *known], 1)
        raise TypeError(
            f"{owner}: there is no option {name!r}; "
            + (f"did you mean {near[0]!r}?" if near else f"it has {', '.join(ours)}")
        )
