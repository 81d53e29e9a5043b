"""Clients that mean harm: each attack is refused, and nobody else loses a row, the server or much of its speed."""

from __future__ import annotations

import statistics
import sys
from pathlib import Path

import pytest
from tests.faults import byzantine

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="memory and CPU time of a process are read from /proc")

# The server has ended or has no memory for it, or was ending when the call began.
NO_SERVER = {"UNAVAILABLE", "CANCELLED"}
REFUSED = {  # by attack: what may come of it
    "wrong_sizes": {"WireError", "RESOURCE_EXHAUSTED"},
    "reused_incarnation": {"CopiedError"},
    "endless_queries": {"StoreError", "accepted"},  # accepted: hidden in a text, which is no query
    "long_queries": {"accepted"},
    "huge_batches": {"StoreError", "accepted"},  # accepted: of another spec
}
BASE_BYTES = 400 * 2**20  # of a server that sends no batches


def check(report: byzantine.Report) -> None:
    for kind, allowed in REFUSED.items():
        assert report.outcomes[kind].keys() <= allowed | NO_SERVER, kind
        assert report.outcomes[kind].keys() & allowed, kind
    assert report.store_problems == []
    assert report.episodes_stored == report.episodes_written
    assert report.server_code == 0  # it ended when it was told to
    assert report.server_peak_bytes < byzantine.MEMORY_MB * 2**20 + BASE_BYTES


def test_attackers_are_refused_and_nothing_is_lost(tmp_path: Path) -> None:
    check(byzantine.run(tmp_path, rounds=1, episodes=2, batches=5, num_idle=50, seed=1))


@pytest.mark.serial
@pytest.mark.nightly
def test_an_honest_writer_and_learner_keep_their_speed(tmp_path: Path) -> None:
    report = byzantine.run(tmp_path, rounds=5, episodes=100, batches=200, num_idle=1000, seed=1)
    check(report)
    assert statistics.median(report.writing) >= 0.8
    assert statistics.median(report.sampling) >= 0.8
