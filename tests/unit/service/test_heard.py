"""Heard: what a server knows of its writers, of real ones and of many that left."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
from tests.waiting import wait_for
from tests.writing import write_episode

from understudy.core.examples import random_episode, small_spec
from understudy.service import Remote, Server
from understudy.service.server import writer_stats as hearing
from understudy.service.server.writer_stats import Heard


def test_a_writer_is_heard_and_its_end_too(serve: Callable[..., Server], remote_to: Callable[..., Remote]) -> None:
    server = serve()
    assert server.heard.to_json() == {"writers": [], "oldest_s": 0.0}
    episode = random_episode(small_spec(), 12, 1)
    began = time.time()
    with remote_to(server).writer("arm-1", small_spec(), commit_steps=5) as writer:
        write_episode(writer, episode)
        assert writer.wait_delivered(30)
        (said,) = server.heard.to_json()["writers"]
        assert (said["writer"], said["streams"], said["repeated"]) == ("arm-1", 1, 0)
        assert said["commit"] == server.store.last_commit
        assert said["chunks"] >= 3
        assert said["seq"] >= said["chunks"] - 1
        assert said["received_bytes"] > 0
        assert began <= said["since_s"] <= said["heard_s"] <= time.time()
    wait_for(lambda: not server.heard.to_json()["writers"][0]["streams"])


def test_a_chunk_that_comes_again_is_counted_apart() -> None:
    heard = Heard()
    with heard.writer("a", "1", "peer", 0) as writer:
        writer.came(10)
        assert heard.oldest_s >= 0.0
        assert heard.to_json()["writers"][0]["working_since_s"] is not None
        writer.stored(1, 7, again=False)
        writer.stored(1, 7, again=True)
    (said,) = heard.to_json()["writers"]
    assert (said["chunks"], said["repeated"], said["seq"], said["commit"]) == (1, 1, 1, 7)
    assert heard.oldest_s == 0.0  # nothing is at work


def test_the_end_of_an_old_stream_does_not_end_the_new_one() -> None:
    heard = Heard()
    with heard.writer("a", "1", "peer", 0) as old:
        with heard.writer("a", "1", "peer", 3) as new:
            assert new is old
            assert new.streams == 2
        assert new.streams == 1
    with heard.writer("a", "2", "peer", 0) as restarted:  # another process under the same name
        assert restarted is not old
        assert len(heard.to_json()["writers"]) == 1


def test_those_that_left_longest_ago_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hearing, "MOST_WRITERS", 3)
    heard = Heard()
    with heard.writer("stays", "1", "peer", 0):
        for number in range(5):
            with heard.writer(f"w{number}", "1", "peer", 0):
                pass
        assert [writer["writer"] for writer in heard.to_json()["writers"]] == ["stays", "w3", "w4"]


def test_the_event_loop_answers_until_it_is_stopped(serve: Callable[..., Server]) -> None:
    server = serve()
    assert server.answers(timeout_s=30)
    server.stop()
    assert not server.answers(timeout_s=0.1)
