"""Options of other projects: those without an effect here are accepted with a line in the log that says why."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from typing import Any

from understudy.core import StoreError
from understudy.core.suggestion import did_you_mean

logger = logging.getLogger(__name__)


def refuse_options(owner: str, given: Mapping[str, Any], advice: Mapping[str, str], ours: Collection[str]) -> None:
    """Raise for the first given option. `advice` says for each option of the other project what to do instead."""
    for name in given:
        if name in advice:
            raise StoreError(f"{owner}: {name}: {advice[name]}")
        raise unknown_option(owner, name, [*ours, *advice], ours)


def accept_options(owner: str, given: Mapping[str, Any], reasons: Mapping[str, str], ours: Collection[str]) -> None:
    """Log one line for each given option of the other project, with the reason why it changes nothing here.

    An option that neither project has raises a TypeError, as it does there.
    """
    for name in given:
        if name not in reasons:
            raise unknown_option(owner, name, [*ours, *reasons], ours)
    for name, value in given.items():
        logger.info("%s: %s=%r changes nothing here: %s", owner, name, value, reasons[name])


def unknown_option(owner: str, name: str, known: Collection[str], ours: Collection[str]) -> TypeError:
    advice = did_you_mean(name, known, f"it has {', '.join(ours)}")
    return TypeError(f"{owner}: there is no option {name!r}; {advice}")
