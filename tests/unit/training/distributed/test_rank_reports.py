"""What ranks tell the first one, without a collective call."""

from __future__ import annotations

import threading

import pytest
from torch.distributed import HashStore  # type: ignore[attr-defined]

from understudy.training.distributed.errors import RanksError
from understudy.training.distributed.rank_reports import RankReports
from understudy.training.distributed.ranks import Ranks, single_rank


def test_the_first_waits_for_the_last() -> None:
    store = HashStore()
    first, second = (RankReports(rank, 2, store, 1) for rank in (0, 1))
    first.send({"number": 1})
    asked = threading.Event()

    def asks() -> bool:
        if not asked.is_set():
            asked.set()
            second.send("two")
        return False

    assert first.gather(asks) == [{"number": 1}, "two"]
    assert asked.is_set()
    RankReports(0, 2, store, 2).send("later")  # another thing
    first.send({"number": 3})
    with pytest.raises(RanksError, match="rank 1 had not reported when this rank ended"):  # the old ones are gone
        first.gather(lambda: True)


def test_a_rank_that_fails_is_not_waited_for() -> None:
    store = HashStore()
    ranks = [Ranks.__new__(Ranks) for _ in range(2)]
    for rank, one in enumerate(ranks):
        one.rank, one.size, one._store, one._num_reports, one._grouped = rank, 2, store, 0, False
    reports = ranks[0].reports()
    reports.send(None)
    ranks[1].close(ValueError("no more disk"))
    with pytest.raises(RanksError, match="rank 1 failed with ValueError: no more disk"):
        reports.gather()


def test_one_rank_has_only_its_own() -> None:
    reports = single_rank("cpu").reports()
    reports.send(5)
    assert reports.gather() == [5]
