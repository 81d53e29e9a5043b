"""Compactor: gives disk space back in the process that serves a store, on request of an operator and by a schedule.

Only the process that has a store open for writing can compact it, so a served store is compacted through its server.

| thread | takes from | blocks on | woken by |
|---|---|---|---|
| compactor, if there is a schedule | - | the time until the next turn | `close` |
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

from understudy.core import KINDS, UnderstudyError, WireError
from understudy.replay import Budget, Retention, Store, compact, summarize

logger = logging.getLogger(__name__)


class Compactor:
    """Deletes what is over budget and removes deleted episodes from the disk, while writers and samplers continue."""

    def __init__(
        self, store: Store, *, retention: Retention, every_s: float | None, on_error: Callable[[UnderstudyError], None]
    ):
        self._store = store
        self._retention = retention
        self._every_s = every_s
        self._on_error = on_error
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="compactor", daemon=True)

    def start(self) -> None:
        """Compact now and then from here on, if there is a schedule."""
        if self._every_s is not None:
            self._thread.start()

    def close(self) -> None:
        """Wait for a compaction that runs."""
        self._closing.set()
        if self._thread.is_alive():
            self._thread.join()

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """Compact as an operator asks for it, or only say what that would remove."""
        min_dead = request.get("min_dead")
        if not isinstance(min_dead, int | float) or isinstance(min_dead, bool):
            raise WireError(f"min_dead: expected a fraction from 0 to 1, got {str(min_dead)[:40]}")
        retention = self._with_budgets(request.get("max_steps", {}))
        if request.get("preview"):
            over = len(self._store.over_budget(retention))
            found = summarize(self._store.path)
            deleted = sum(group.episodes for group in found.totals if group.deleted) + over
            return {"rows": found.num_rows, "dead_rows": found.num_dead_rows, "deleted": deleted, "over_budget": over}
        return self._compact(retention, min_dead=float(min_dead))

    def _with_budgets(self, max_steps: Any) -> Retention:
        """The server's budgets, with those of a request instead where it has some."""
        if not isinstance(max_steps, dict) or not all(
            kind in KINDS and (number is None or type(number) is int) for kind, number in max_steps.items()
        ):
            raise WireError(f"max_steps: expected numbers by kind of episode, got {str(max_steps)[:80]}")
        budgets = {kind: Budget(max_steps=number) for kind, number in max_steps.items() if number is not None}
        return replace(self._retention, **budgets)

    def _compact(self, retention: Retention, *, min_dead: float) -> dict[str, Any]:
        self._store.retain(retention)
        report = compact(self._store, min_dead=min_dead)
        logger.info("compacted %s: %s", self._store.path, report)
        return {**asdict(report), "orphans_kept": [str(path) for path in report.orphans_kept]}

    def _run(self) -> None:
        while not self._closing.wait(self._every_s):
            try:
                self._compact(self._retention, min_dead=MIN_DEAD)
            except UnderstudyError as error:
                logger.warning("compaction of %s failed, and is tried again: %s", self._store.path, error)
                self._on_error(error)


MIN_DEAD = 0.3  # smallest share of deleted rows at which the schedule rewrites a segment
