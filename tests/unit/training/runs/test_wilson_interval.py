"""Success rates: Wilson's interval against published numbers."""

from __future__ import annotations

import pytest

from understudy.training.runs.wilson_interval import SuccessRate, wilson_interval


@pytest.mark.parametrize(
    ("successes", "trials", "low", "high"),
    [  # by the closed form in float64, by hand for 0 of 10: z2/(n+z2) = 3.8415/13.8415
        (0, 10, 0.0, 0.27754),
        (10, 10, 0.72246, 1.0),
        (5, 10, 0.23659, 0.76341),
        (90, 100, 0.82563, 0.94477),
        (81, 263, 0.25529, 0.36617),  # the example of Newcombe (1998), table I: 0.2553 to 0.3662
    ],
)
def test_the_interval_is_wilsons(successes: int, trials: int, low: float, high: float) -> None:
    found = wilson_interval(successes, trials)
    assert found == pytest.approx((low, high), abs=1e-4)


def test_the_rate_is_in_its_interval() -> None:
    """A plot draws the distances to both ends, and refuses one below 0."""
    for trials in range(1, 200):
        for successes in (0, 1, trials // 2, trials):
            low, high = wilson_interval(successes, trials)
            assert 0 <= low <= successes / trials <= high <= 1


def test_no_trials_say_nothing_and_nonsense_is_refused() -> None:
    assert wilson_interval(0, 0) == (0.0, 1.0)
    with pytest.raises(ValueError, match="expected 0 to 3"):
        wilson_interval(4, 3)


def test_a_score_reads_well() -> None:
    assert str(SuccessRate(num_successes=90, num_episodes=100)) == "90 % of 100 (95 %: 83 to 94)"
    assert SuccessRate(num_successes=0, num_episodes=0).rate == 0.0
