"""WriterStats: what a server counts for each writer, with a real one and with many that left."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
from tests.waiting import wait_for
from tests.writing import write_episode

from understudy.core.examples import random_episode, small_spec
from understudy.service import Remote, Server
from understudy.service.server import writer_stats
from understudy.service.server.writer_stats import WriterStats


def test_a_writer_is_counted_until_it_leaves(serve: Callable[..., Server], remote_to: Callable[..., Remote]) -> None:
    server = serve()
    assert server.writer_stats.to_json() == {"writers": [], "oldest_pending_s": 0.0}
    episode = random_episode(small_spec(), 12, 1)
    began = time.time()
    with remote_to(server).writer("arm-1", small_spec(), commit_steps=5) as writer:
        write_episode(writer, episode)
        assert writer.wait_delivered(30)
        (entry,) = server.writer_stats.to_json()["writers"]
        assert (entry["writer"], entry["streams"], entry["repeated"]) == ("arm-1", 1, 0)
        assert writer.incarnation not in str(entry)  # whoever knows it can write in this writer's place
        assert entry["commit"] == server.store.last_commit
        assert entry["chunks"] >= 3
        assert entry["seq"] >= entry["chunks"] - 1
        assert entry["received_bytes"] > 0
        assert began <= entry["first_seen_s"] <= entry["last_seen_s"] <= time.time()
    wait_for(lambda: not server.writer_stats.to_json()["writers"][0]["streams"])


def test_a_repeated_chunk_is_counted_separately() -> None:
    stats = WriterStats()
    with stats.writer("a", "1", "peer", 0) as writer:
        writer.received(10)
        assert stats.oldest_pending_s >= 0.0
        assert stats.to_json()["writers"][0]["pending_since_s"] is not None
        writer.committed(1, 7, repeated=False)
        writer.committed(1, 7, repeated=True)
    (entry,) = stats.to_json()["writers"]
    assert (entry["chunks"], entry["repeated"], entry["seq"], entry["commit"]) == (1, 1, 1, 7)
    assert stats.oldest_pending_s == 0.0  # no chunk is pending


def test_the_end_of_an_old_stream_does_not_end_the_new_one() -> None:
    stats = WriterStats()
    with stats.writer("a", "1", "peer", 0) as old:
        with stats.writer("a", "1", "peer", 3) as new:
            assert new is old
            assert new.streams == 2
        assert new.streams == 1
    with stats.writer("a", "2", "peer", 0) as restarted:  # another process under the same name
        assert restarted is not old
        assert len(stats.to_json()["writers"]) == 1


def test_those_that_left_longest_ago_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer_stats, "MAX_WRITERS", 3)
    stats = WriterStats()
    with stats.writer("stays", "1", "peer", 0):
        for number in range(5):
            with stats.writer(f"w{number}", "1", "peer", 0):
                pass
        assert [writer["writer"] for writer in stats.to_json()["writers"]] == ["stays", "w3", "w4"]


def test_the_event_loop_answers_until_it_is_stopped(serve: Callable[..., Server]) -> None:
    server = serve()
    assert server.is_responsive(timeout_s=30)
    server.stop()
    assert not server.is_responsive(timeout_s=0.1)
