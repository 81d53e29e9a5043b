"""TrainerClient without a server: it refuses what cannot work, keeps what is queued, and stops."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import pytest

from understudy.compat import QueuedDataStore, TrainerClient, TrainerConfig
from understudy.core import StoreError

CONFIG = TrainerConfig(port_number=1, broadcast_port=2)  # nobody listens there


def a_transition() -> dict[str, Any]:
    return {"observations": {"x": np.zeros(1)}, "next_observations": {"x": np.ones(1)}, "actions": np.zeros(1)}


def test_a_client_needs_queues_of_its_own_kind() -> None:
    with pytest.raises(StoreError, match=r"client 'actor': pass data_stores=\{name: QueuedDataStore\(capacity\)\}"):
        TrainerClient("actor", "127.0.0.1", CONFIG)
    with pytest.raises(StoreError, match=r"data store 'a': expected a QueuedDataStore of understudy\.compat, got"):
        TrainerClient("actor", "127.0.0.1", CONFIG, data_stores={"a": [1]})  # type: ignore[dict-item]
    with pytest.raises(TypeError, match="TrainerClient: there is no option 'log_levl'; did you mean 'log_level'"):
        TrainerClient("actor", "127.0.0.1", CONFIG, QueuedDataStore(5), log_levl=1)


def test_without_a_server_nothing_is_lost_and_stop_says_so(caplog: pytest.LogCaptureFixture) -> None:
    queue = QueuedDataStore(5)
    client = TrainerClient("actor", "127.0.0.1", CONFIG, queue, timeout_ms=200)
    queue.insert(a_transition())
    assert client.update() is False
    assert client.num_waiting == 1
    assert client.request("send-stats", {"a": 1}) is None
    with caplog.at_level(logging.ERROR):
        assert client.stop() is False
    assert "stopped with 1 rows that the server does not have" in caplog.text
    assert client.stop() is False  # again
    with pytest.raises(StoreError, match="client 'actor' was stopped; make a new one"):
        client.update()
    TrainerClient("next", "127.0.0.1", CONFIG, queue).stop()  # the queue is free again


def test_one_callback_for_weights_is_enough() -> None:
    client = TrainerClient("actor", "127.0.0.1", CONFIG, QueuedDataStore(5))
    client.recv_network_callback(lambda weights: None)
    with pytest.raises(StoreError, match="recv_network_callback: there is a callback already; call it once"):
        client.recv_network_callback(lambda weights: None)
    assert client.stop() is True
