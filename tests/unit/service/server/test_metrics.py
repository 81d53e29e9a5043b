"""Metrics: what a server has done is in the text that Prometheus reads."""

from __future__ import annotations

import urllib.request

from tests.writing import write_episode

from understudy.core import RefusedError
from understudy.core.examples import random_episode, small_spec
from understudy.service import Remote, Server


def test_rows_chunks_and_parameters_are_counted(remote: Remote, server: Server) -> None:
    with remote.writer("arm", small_spec(), commit_steps=5) as writer:
        write_episode(writer, random_episode(small_spec(), 12, 1))
        assert writer.wait_delivered(30)
        assert 'understudy_streams{kind="write"} 1.0' in server.metrics.text()
    remote.publish({"w": [1.0]})
    text = server.metrics.text()
    assert "understudy_rows_committed_total 13.0" in text
    assert "understudy_chunks_repeated_total 0.0" in text
    assert "understudy_parameters_version 1.0" in text
    assert f"understudy_store_commit {float(server.store.last_commit)}" in text


def test_an_error_is_counted_by_its_class(server: Server) -> None:
    server.metrics.refused(RefusedError("no"))
    assert 'understudy_errors_total{kind="RefusedError"} 1.0' in server.metrics.text()


def test_the_text_is_served_until_it_is_stopped(server: Server) -> None:
    port, stop = server.metrics.serve(0)
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as response:
        assert b"understudy_rows_committed_total 0.0" in response.read()
    stop()
