"""Frames that no client of ours would send: all are refused, and nobody else is disturbed."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from tests.faults import hostile


@pytest.mark.skipif(sys.platform != "linux", reason="the peak of a process's memory is read from /proc")
@pytest.mark.parametrize("frames", [2000, pytest.param(10_000, marks=pytest.mark.nightly)])
def test_thousands_of_hostile_frames(frames: int, tmp_path: Path) -> None:
    report = hostile.run(tmp_path, frames, seed=1)
    assert report.problems == {}
    assert report.frames >= frames
    assert report.refused + report.duplicates == report.frames
    assert report.kinds.keys() >= hostile.REFUSED.keys() | hostile.REPLAYED.keys() | hostile.HELLOS.keys()
    assert report.server_alive
    assert report.server_peak_bytes < 400 * 2**20
    assert report.good_steps_stored == report.good_steps_sent > frames / 100
    if frames > 2000:  # alone at night: beside other tests, a second is soon gone
        assert report.good_worst_append_s < 1.0
        assert report.good_worst_delivery_s < 10.0


def test_the_fuzzer_notices_what_it_looks_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Good frames in the place of hostile ones are stored, and that is a problem."""
    monkeypatch.setitem(hostile.REFUSED, "flipped bits", lambda attacker, rng: attacker.chunks[hostile.NUM_STORED])
    monkeypatch.setattr(hostile, "REPLAYS", 1)
    others = sorted((hostile.REFUSED.keys() | hostile.HELLOS.keys()) - {"flipped bits", "hello of random bytes"})
    report = hostile.run(tmp_path, 200, seed=2, without=others)
    assert report.problems.keys() == {"flipped bits", "rows of an attacker"}
