"""PageClock: the time of a page on our clock, as exact as the quickest answer."""

from __future__ import annotations

import random

import pytest

from understudy.envs.teleop.clock import PageClock


def ask(clock: PageClock, now_s: float, offset_s: float, way_s: float, back_s: float) -> None:
    clock.answered(asked_s=now_s, page_s=now_s + way_s + offset_s, heard_s=now_s + way_s + back_s)


def test_nothing_is_known_before_the_first_answer() -> None:
    clock = PageClock()
    assert not clock.known
    ask(clock, 5.0, 100.0, 0.01, 0.01)
    assert clock.known
    assert clock.here(107.0) == pytest.approx(7.0)
    assert clock.round_trip_s == pytest.approx(0.02)


def test_the_quickest_answer_is_believed() -> None:
    clock = PageClock()
    ask(clock, 1.0, 100.0, 0.4, 0.001)
    assert abs(clock.here(110.0) - 10.0) > 0.1
    ask(clock, 2.0, 100.0, 0.001, 0.001)
    ask(clock, 3.0, 100.0, 0.4, 0.001)
    assert clock.here(110.0) == pytest.approx(10.0, abs=1e-9)
    assert clock.error_s == pytest.approx(0.001)


def test_the_error_is_never_larger_than_told() -> None:
    rng = random.Random(1)
    for _ in range(200):
        clock, offset_s = PageClock(), rng.uniform(-1e6, 1e6)
        for second in range(rng.randrange(1, 40)):
            ask(clock, second, offset_s, rng.expovariate(50), rng.expovariate(50))
        assert abs(clock.here(50.0 + offset_s) - 50.0) <= clock.error_s + 1e-8


def test_a_clock_that_jumps_is_believed_at_once() -> None:
    clock = PageClock()
    ask(clock, 1.0, 100.0, 0.001, 0.001)
    ask(clock, 2.0, 40.0, 0.3, 0.1)  # it stood still while the laptop slept
    assert clock.here(50.0) == pytest.approx(10.0, abs=0.2)


def test_old_answers_are_forgotten() -> None:
    clock = PageClock()
    ask(clock, 0.0, 100.0, 0.001, 0.001)
    for second in range(1, 40):
        ask(clock, second, 100.0, 0.01, 0.01)
    assert clock.error_s == pytest.approx(0.01)
