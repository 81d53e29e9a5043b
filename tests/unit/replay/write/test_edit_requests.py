"""Requests of other processes: applied by whoever holds the store, in order, once; a damaged one stops nobody."""

import json
import logging
import multiprocessing
import os
import shutil
import time
from pathlib import Path

import pytest

from understudy.core import StoreError, StoreFormatError, StoreLockedError
from understudy.core.examples import random_episode, small_spec
from understudy.replay import EpisodeRecord, Reader, Store, verify
from understudy.replay.write import edit_requests
from understudy.replay.write.edit_requests import EditRequest, pending_edits, submit_edit


def live(store: Store, number: int = 1) -> None:
    spec = small_spec()
    writer = store.writer("w", spec)
    for seed in range(number):
        episode = random_episode(spec, 3, seed=seed)
        writer.begin()
        for step in episode.steps():
            writer.append(step)
        writer.end(episode.last_observation)


def records(path: Path) -> list[EpisodeRecord]:
    with Reader(path) as reader:
        return list(reader.episodes("1"))


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("template") / "store"
    with Store.open(made) as store:
        live(store, 3)
    return made


@pytest.fixture
def path(template: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(template, tmp_path / "store"))


def test_requests_are_applied_when_the_store_is_opened(path: Path) -> None:
    submit_edit(path, EditRequest(action="delete", episodes=(1, 2), who="ada"))
    submit_edit(path, EditRequest(action="label", episodes=(2, 3), labels={"look": "again"}, who="ada"))
    submit_edit(path, EditRequest(action="restore", episodes=(2,), who="bob"))
    submit_edit(path, EditRequest(action="judge", episodes=(3,), success=False, who="bob"))
    assert [request.action for request in pending_edits(path)] == ["delete", "label", "restore", "judge"]
    assert [record.deleted for record in records(path)] == [None] * 3
    Store.open(path).close()
    first, second, third = records(path)
    assert first.deleted
    assert second.deleted is None
    assert [record.info.success for record in (first, second, third)] == [None, None, False]
    assert [record.info.labels for record in (first, second, third)] == [{}, {"look": "again"}, {"look": "again"}]
    assert pending_edits(path) == []
    assert list((path / "inbox").iterdir()) == []
    assert verify(path).ok
    Store.open(path).close()


def test_the_owner_applies_them_at_its_next_commit(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(edit_requests, "POLL_S", 0.0)
    with Store.open(path) as store:
        submit_edit(path, EditRequest(action="delete", episodes=(1,)))
        with pytest.raises(StoreLockedError):
            Store.open(path)
        assert records(path)[0].deleted is None
        live(store)
        assert records(path)[0].deleted
        submit_edit(path, EditRequest(action="restore", episodes=(1,)))  # within the same tick of the directory's clock
        live(store)
        assert records(path)[0].deleted is None
        assert pending_edits(path) == []


def test_a_commit_looks_at_most_once_in_a_while(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(edit_requests, "POLL_S", 3600.0)
    with Store.open(path) as store:
        submit_edit(path, EditRequest(action="delete", episodes=(1,)))
        live(store)
        assert records(path)[0].deleted is None
    Store.open(path).close()
    assert records(path)[0].deleted


def test_an_inbox_that_has_not_changed_is_not_listed(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(edit_requests, "POLL_S", 0.0)
    with Store.open(path) as store:
        submit_edit(path, EditRequest(action="delete", episodes=(1,)))
        live(store)
        time.sleep(edit_requests.CLOCK_TICK_S * 1.5)
        live(store)
        seen = []
        monkeypatch.setattr(edit_requests, "_request_files", lambda path: seen.append(path) or [])
        live(store, 3)
        assert seen == []
        os.utime(path / "inbox")
        live(store)
        assert seen


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"{", "not a request"),
        (b"[]", "not a request"),
        (b"\xff", "not a request"),
        (b"[" * 100_000, "not a request"),
        (b" " * (edit_requests.MAX_REQUEST_BYTES + 1), "expected up to"),
        (json.dumps({"action": "purge", "episodes": [1]}).encode(), "expected one of delete, restore, label"),
        (json.dumps({"action": "judge", "episodes": [1], "success": 1}).encode(), "true, false or null"),
        (json.dumps({"action": "delete", "episodes": [1], "success": True}).encode(), "only for `judge`"),
        (json.dumps({"action": "delete", "episodes": [1], "more": 1}).encode(), "more"),
        (json.dumps({"action": "delete", "episodes": []}).encode(), "numbers from 1"),
        (json.dumps({"action": "delete", "episodes": [True]}).encode(), "numbers from 1"),
        (json.dumps({"action": "delete", "episodes": [99]}).encode(), "there is no episode 99"),
        (json.dumps({"action": "label", "episodes": [1], "labels": {"a": 1}}).encode(), "letters of text"),
        (json.dumps({"action": "label", "episodes": [1], "labels": {"a": "\ud800"}}).encode(), "letters of text"),
        (json.dumps({"action": "label", "episodes": [1]}).encode(), "expected some for `label`"),
    ],
)
def test_a_damaged_request_is_set_aside_and_the_next_is_applied(
    content: bytes, words: str, path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (path / "inbox").mkdir()
    (path / "inbox" / "0.json").write_bytes(content)
    submit_edit(path, EditRequest(action="delete", episodes=(3,)))
    assert len(pending_edits(path)) in (1, 2)  # a request may be sound and about an episode that is not there
    with caplog.at_level(logging.WARNING):
        Store.open(path).close()
    assert words in caplog.text
    assert "0.json: moved to refused/" in caplog.text
    assert records(path)[2].deleted
    assert [p.name for p in (path / "inbox").glob("*.json")] == []
    assert (path / "inbox" / "refused" / "0.json").read_bytes() == content


def test_a_file_that_is_half_written_is_left_alone(path: Path) -> None:
    (path / "inbox").mkdir()
    (path / "inbox" / "1.json.new").write_bytes(b'{"action": "del')
    Store.open(path).close()
    assert (path / "inbox" / "1.json.new").exists()
    assert pending_edits(path) == []


def test_a_request_needs_a_store(tmp_path: Path) -> None:
    with pytest.raises(StoreFormatError, match="not an Understudy store"):
        submit_edit(tmp_path / "nothing", EditRequest(action="delete", episodes=(1,)))
    with pytest.raises(StoreError, match="numbers from 1"):
        EditRequest(action="delete", episodes=(0,))


def test_requests_of_many_processes_are_all_applied_while_another_commits(path: Path) -> None:
    with Store.open(path) as store:
        live(store, 20)
        context = multiprocessing.get_context("spawn")
        asking = [context.Process(target=_ask, args=(path, first)) for first in (1, 11)]
        for process in asking:
            process.start()
        while any(process.is_alive() for process in asking) or pending_edits(path):
            live(store)
            time.sleep(0.05)
        for process in asking:
            process.join()
            assert process.exitcode == 0
    assert [record.info.labels.get("n") for record in records(path)[:20]] == [str(n) for n in range(1, 21)]


def _ask(path: Path, first: int) -> None:
    for number in range(first, first + 10):
        submit_edit(path, EditRequest(action="label", episodes=(number,), labels={"n": str(number)}))


def test_a_request_in_the_same_tick_as_the_last_look_is_not_missed(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(edit_requests, "POLL_S", 0.0)
    tick = time.time_ns() + 10**10  # a directory that changed just now, however slow this machine is
    (path / "inbox").mkdir()
    os.utime(path / "inbox", ns=(tick, tick))
    with Store.open(path) as store:  # looks, and finds nothing
        submit_edit(path, EditRequest(action="delete", episodes=(1,)))
        os.utime(path / "inbox", ns=(tick, tick))
        live(store)
        assert records(path)[0].deleted
