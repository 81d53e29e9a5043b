import time

import pytest

from understudy.envs.pace import Pace
from understudy.envs.world import WorldError


def test_it_keeps_the_rate_and_does_not_drift() -> None:
    pace = Pace(100)
    began = time.monotonic()
    pace.begin()
    for number in range(30):
        time.sleep(0.004 if number % 2 else 0.0)  # work of different lengths
        pace.wait()
    took = time.monotonic() - began
    report = pace.report
    assert report.num_ticks == 30
    assert took >= 0.30 - 1e-3  # never early: each tick stands 10 ms after the one before
    if report.num_missed == 0:  # a busy machine may miss some, and says so
        assert report.rate >= 30 / (0.30 + report.late_max_s + 1e-3)
    assert 30 / took <= report.rate <= 30 / 0.299
    assert 0 <= report.late_p50_s <= report.late_p99_s <= report.late_max_s


def test_a_missed_deadline_is_counted_and_the_clock_starts_anew() -> None:
    pace = Pace(2)
    pace.begin()
    time.sleep(1.1)
    before = time.monotonic()
    pace.wait()
    assert time.monotonic() - before < 0.4  # at once
    assert pace.report.num_missed == 1
    assert pace.report.late_max_s >= 0.6 - 1e-3
    assert 0.0 < pace.remaining_s <= 0.5  # a whole period again, not two ticks in a row
    assert "1 deadlines missed" in str(pace.report)


def test_begin_leaves_a_pause_out() -> None:
    pace = Pace(1.0)
    time.sleep(1.1)
    began_s = time.monotonic()
    pace.begin()
    pace.wait()
    assert pace.report.num_missed == 0  # the pause does not count
    assert pace.report.rate >= 1 / (time.monotonic() - began_s)


@pytest.mark.parametrize("hz", [0.0, -1.0, 20_000.0, float("nan")])
def test_a_rate_that_cannot_be_is_refused(hz: float) -> None:
    with pytest.raises(WorldError, match=r"hz: expected a rate above 0 and up to 10000, got"):
        Pace(hz)
