"""One process is all ranks: the same calls, and no group."""

from __future__ import annotations

import numpy as np
import pytest
import torch.distributed as dist

from understudy.training.distributed.errors import RanksError
from understudy.training.distributed.ranks import Ranks, join, single_rank


def test_says_to_itself_what_it_says() -> None:
    with single_rank() as ranks:
        assert (ranks.rank, ranks.size, ranks.first) == (0, 1, True)
        assert ranks.sum({"a": 0.1}) == {"a": 0.1}
        assert ranks.gather_json({"x": (1, None)}) == [{"x": [1, None]}]  # as it would come back from others
        ranks.barrier("here")
        assert ranks.claims()(1)
        assert ranks.broadcast_arrays({"w": np.ones(2)})["w"].tolist() == [1.0, 1.0]
        with pytest.raises(RanksError, match="rank 0 is the source and passed None"):
            ranks.broadcast_arrays(None)
        assert not dist.is_initialized()


def test_leaves_the_group_it_made() -> None:
    with single_rank() as ranks:
        ranks.group_of_one()
        assert dist.is_initialized()
    assert not dist.is_initialized()


def test_joins_nobody_where_nobody_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    assert join().size == 1
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    assert join().size == 1


def test_refuses_ranks_that_cannot_be() -> None:
    with pytest.raises(RanksError, match="rank: expected 0 to 1, got 2"):
        Ranks(2, 2)
    with pytest.raises(RanksError, match=r"size: 2 ranks need a process group; use join\(\)"):
        Ranks(0, 2)
