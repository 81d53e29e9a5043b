"""Retention: how much of each kind of episode is kept. Each kind has its own budget, so no kind evicts another."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from understudy.core import KINDS, StoreError
from understudy.replay.format.catalog import Catalog


@dataclass(frozen=True, kw_only=True)
class Budget:
    """How much of a kind is kept at most, the newest first; None is no limit."""

    max_steps: int | None = None
    max_bytes: int | None = None

    def __post_init__(self) -> None:
        for name in ("max_steps", "max_bytes"):
            value = getattr(self, name)
            if value is not None and value < 0:
                raise StoreError(f"{name}: expected None or a number from 0, got {value}")


@dataclass(frozen=True, kw_only=True)
class Retention:
    """Budgets by kind. A kind without a limit is never deleted."""

    demonstration: Budget = Budget()
    practice: Budget = Budget()
    correction: Budget = Budget()


def expired(catalog: Catalog, retention: Retention) -> list[int]:
    """The episodes beyond their kind's budget: the newest are kept, the ones still open always."""
    ids: list[int] = []
    for kind in KINDS:
        budget: Budget = getattr(retention, kind)
        if budget.max_steps is None and budget.max_bytes is None:
            continue
        rows = catalog.newest_first(kind)  # [n, 4]: id, open, steps, bytes
        over = np.zeros(len(rows), bool)
        if budget.max_steps is not None:
            over |= np.cumsum(rows[:, 2]) > budget.max_steps
        if budget.max_bytes is not None:
            over |= np.cumsum(rows[:, 3]) > budget.max_bytes
        ids.extend(rows[over & (rows[:, 1] == 0), 0].tolist())
    return sorted(ids)
