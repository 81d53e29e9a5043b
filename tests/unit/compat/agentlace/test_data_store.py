"""QueuedDataStore: a bounded queue that copies, counts what it drops, and belongs to one client."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import pytest

from understudy.compat import QueuedDataStore
from understudy.core import SpecError, StoreError
from understudy.core.step import NO_VERSION


def transition(n: int) -> dict[str, Any]:
    now, then = {"x": np.float32([n])}, {"x": np.float32([n + 1])}
    return {"observations": now, "actions": np.zeros(1), "next_observations": then, "infos": {"succeed": True, "y": 1}}


def test_the_oldest_is_dropped_counted_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    queue = QueuedDataStore(2)
    with caplog.at_level(logging.WARNING):
        queue.batch_insert(transition(n) for n in range(5))
    assert (len(queue), queue.num_dropped, queue.latest_data_id()) == (2, 3, 4)
    assert len(caplog.records) == 2  # the first and the second; the fourth would be the next
    assert [data["observations"]["x"].item() for data in queue.get_latest_data(3)] == [4.0]


def test_arrays_are_copied_and_a_shared_observation_is_kept_once() -> None:
    queue = QueuedDataStore(5)
    first = transition(0)
    queue.insert(first)
    first["actions"][0] = 9
    queue.insert(transition(1))
    one, two = queue.get_latest_data(-1)
    assert one["actions"].tolist() == [0.0]
    assert one["next_observations"] is two["observations"]
    assert one["infos"] == {"succeed": True}


def test_it_belongs_to_one_client_which_stamps_the_policy_version() -> None:
    queue = QueuedDataStore(5)
    queue.insert(transition(0))
    queue.attach(object(), lambda: 7)
    queue.insert(transition(1))
    with pytest.raises(StoreError, match="another client takes from this queue"):
        queue.attach(object(), lambda: 8)
    assert [queue.take()[1], queue.take()[1]] == [NO_VERSION, 7]  # type: ignore[index]
    assert queue.take() is None


def test_what_is_no_transition_or_fails_the_check_is_refused() -> None:
    queue = QueuedDataStore(5)

    def check(data: Any) -> None:
        raise SpecError("rewards: missing")

    with pytest.raises(SpecError, match="transition: expected a dict, got"):
        queue.insert([1, 2])  # type: ignore[arg-type]
    queue.check_with(check)
    with pytest.raises(SpecError, match="rewards: missing"):
        queue.insert(transition(0))
    assert len(queue) == 0
    with pytest.raises(StoreError, match="capacity: expected a number from 1, got 0"):
        QueuedDataStore(0)
