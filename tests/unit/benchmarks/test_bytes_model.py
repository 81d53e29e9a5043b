"""The model of bytes: numbers worked out by hand, every size counts, and real ranks move what it says."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest
from benchmarks.bytes_model import (
    WAYS,
    Setup,
    checkpoint,
    durable,
    facts,
    gradients_ddp,
    gradients_fsdp,
    observations,
    peer_pixels,
    row_numbers,
    rows_between_ranks,
    weights_trained,
    weights_whole,
)
from benchmarks.scale_bytes import can_count, count

SMALL = Setup(
    ranks=4,
    nodes=2,
    workers=8,
    episodes=10,
    blocks=20.0,
    observation_bytes=1000,
    block_bytes=100,
    episode_bytes=50,
    epochs=1,
    mini_batch=50,
    micro_batch=5,
    parameters=1000.0,
    weight_bytes=2,
    trained=10.0,
)


def test_bytes_are_those_worked_out_by_hand() -> None:
    assert (SMALL.rows, SMALL.updates, SMALL.micro_batches) == (200, 4, 3)
    assert observations(SMALL) == 10 * 21 * 1000
    assert rows_between_ranks(SMALL) == pytest.approx(200 * 1000 * 3 / 4)
    assert facts(SMALL) == 3 * 10 * (50 + 20 * 100)
    assert row_numbers(SMALL) == pytest.approx(3 * (200 + 200) * 5)
    assert durable(SMALL) == 10 * 21 * 1100
    assert weights_whole(SMALL) == 2 * 2000
    assert weights_trained(SMALL) == 2 * 40
    assert weights_whole(SMALL, copies=SMALL.workers) == 8 * 2000
    assert gradients_ddp(SMALL) == 4 * 2 * 3 * 40
    assert gradients_fsdp(SMALL) == (2 * 4 * 3 + 1) * 3 * 2000 + 4 * 3 * 40
    assert checkpoint(SMALL) == 120


def test_a_second_pass_moves_the_rows_that_a_rank_does_not_have_yet() -> None:
    once, twice = rows_between_ranks(SMALL), rows_between_ranks(replace(SMALL, epochs=2))
    assert twice / once == pytest.approx(1 + 3 / 4)  # a row is on its rank in the second pass already, one time in four
    assert rows_between_ranks(replace(SMALL, ranks=1)) == 0
    assert gradients_ddp(replace(SMALL, ranks=1)) == 0


def test_at_the_size_of_simplevla_rl_its_pixels_are_the_published_ones() -> None:
    theirs = Setup(ranks=8, observation_bytes=224 * 224 * 3)
    assert peer_pixels(theirs) / 1e9 == pytest.approx(39.5, abs=0.05)
    assert observations(theirs) / 1e9 == pytest.approx(5.01, abs=0.005)
    assert rows_between_ranks(theirs) / 1e9 == pytest.approx(4.32, abs=0.005)


@pytest.mark.parametrize("name", [field.name for field in fields(Setup)])
def test_every_size_counts(name: str) -> None:
    changed = replace(SMALL, **{name: 2 * getattr(SMALL, name)})
    assert any(way(changed) != way(SMALL) for way in WAYS.values())


def test_sizes_that_make_no_sense_are_refused() -> None:
    with pytest.raises(ValueError, match="ranks: expected more than 0, got 0"):
        Setup(ranks=0)
    with pytest.raises(ValueError, match="trained: expected at most 10 parameters, got 11"):
        Setup(parameters=10, trained=11)


@pytest.mark.nightly  # a study
@pytest.mark.skipif(not can_count(), reason="users may not have a network of their own here (unshare --net)")
def test_two_real_ranks_move_what_the_model_says() -> None:
    for found in count(2, "ddp", "adapters", "rows"):
        assert 0.97 < found.ratio < 1.15, str(found)
