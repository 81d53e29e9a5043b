import pytest

from understudy.core.closeable import Closeable


class Counter(Closeable):
    num_closed = 0

    def close(self) -> None:
        self.num_closed += 1


def test_it_is_closed_at_the_end_of_the_block_however_that_ends() -> None:
    counter = Counter()
    with counter as same:
        assert same is counter
        assert counter.num_closed == 0
    assert counter.num_closed == 1
    with pytest.raises(KeyError), counter:
        raise KeyError
    assert counter.num_closed == 2
