"""RateLimiter: one side may always continue, and the ratio is held."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from understudy.core import StoreError
from understudy.replay.sample.rate_limiter import RateLimiter


@given(
    st.floats(0.1, 20),
    st.integers(1, 50),
    st.integers(1, 20),
    st.integers(1, 300),
    st.floats(0, 100),
    st.lists(st.booleans(), max_size=200),
)
def test_one_side_may_always_go_on(
    ratio: float, min_size: int, insert: int, sample: int, slack: float, wishes: list[bool]
) -> None:
    limiter = RateLimiter(
        samples_per_insert=ratio,
        min_size=min_size,
        error_window=(sample + insert * ratio) / 2 + slack,
        max_insert=insert,
        max_sample=sample,
    )
    for wish in wishes:
        assert limiter.may_insert(insert) or limiter.may_sample(sample)
        if wish and limiter.may_insert(insert):
            limiter = limiter.inserted(insert)
        elif limiter.may_sample(sample):
            limiter = limiter.sampled(sample)
        if limiter.size >= min_size + insert:  # once begun, the ratio is held
            assert abs(limiter.diff - min_size * ratio) <= limiter.error_window + insert * ratio + sample


def test_the_formulas_in_figures() -> None:
    limiter = RateLimiter(samples_per_insert=2, min_size=10, error_window=6, max_sample=4)
    assert not limiter.may_sample(1)
    limiter = limiter.inserted(10)  # diff 20, window 14 to 26
    assert limiter.may_sample(4)
    assert limiter.may_insert(1)
    assert not limiter.sampled(3).may_sample(4)  # 17 - 4 < 14
    assert limiter.sampled(2).may_sample(4)  # 18 - 4 = 14
    assert not limiter.inserted(3).may_insert(1)  # 26 + 2 > 26
    assert limiter.inserted(3).removed(4).may_insert(1)  # below min_size
    assert RateLimiter.from_json(limiter.to_json()) == limiter
    with pytest.raises(StoreError, match=r"error_window: expected at least 3 .* both sides could wait for each other"):
        RateLimiter(samples_per_insert=2, min_size=10, error_window=2, max_sample=4)
    with pytest.raises(StoreError, match="asked about 5 at once, and max_sample is 4"):
        limiter.may_sample(5)
