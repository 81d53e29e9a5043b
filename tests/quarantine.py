"""Quarantine: a flaky test is left out until a date, with a reason; after that date the run fails.

    @pytest.mark.quarantine(reason="the port is sometimes taken", until="2026-12-01")

A run says how many tests are in quarantine. There may be at most MAX_QUARANTINED, each for at most MAX_DAYS.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Sequence

import pytest

MAX_QUARANTINED = 3
MAX_DAYS = 30


def problems(items: Sequence[pytest.Item], today: dt.date) -> list[str]:
    """What is wrong with the quarantine of these tests, a sentence each."""
    found: list[str] = []
    quarantined = [item for item in items if item.get_closest_marker("quarantine") is not None]
    tests = {item.nodeid.split("[")[0] for item in quarantined}
    if len(tests) > MAX_QUARANTINED:
        found.append(f"{len(tests)} tests are in quarantine, at most {MAX_QUARANTINED} may be: mend one first")
    for item in quarantined:
        marker = item.get_closest_marker("quarantine")
        assert marker is not None
        reason, until = marker.kwargs.get("reason"), marker.kwargs.get("until")
        try:
            last = dt.date.fromisoformat(until)
        except (TypeError, ValueError):
            found.append(f"{item.nodeid}: quarantine needs until='YYYY-MM-DD', got {until!r}")
            continue
        if not reason:
            found.append(f"{item.nodeid}: quarantine needs a reason")
        if last < today:
            found.append(f"{item.nodeid}: its quarantine ended on {last}; mend the test ({reason})")
        if last > today + dt.timedelta(days=MAX_DAYS):
            found.append(f"{item.nodeid}: quarantined until {last}, more than {MAX_DAYS} days ahead")
    return found


def skip_quarantined(items: Sequence[pytest.Item], today: dt.date) -> None:
    """Skip the tests in quarantine, or end the run if the quarantine itself is in disorder."""
    if wrong := problems(items, today):
        raise pytest.UsageError("\n".join(wrong))
    for item in items:
        if (marker := item.get_closest_marker("quarantine")) is not None:
            item.add_marker(
                pytest.mark.skip(reason=f"quarantine until {marker.kwargs['until']}: {marker.kwargs['reason']}")
            )
