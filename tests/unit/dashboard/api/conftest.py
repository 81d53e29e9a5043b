"""Answers are not cached, and the disk of this machine raises no alarm."""

import pytest

from understudy.dashboard.api import alarms, targets


@pytest.fixture(autouse=True)
def _no_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(targets, "CACHE_S", 0.0)
    monkeypatch.setattr(targets, "CACHE_COST_FACTOR", 0.0)
    monkeypatch.setattr(alarms, "LOW_DISK_BYTES", 0)  # this machine's disk may well be full
