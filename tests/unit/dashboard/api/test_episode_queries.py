"""Edits of episodes are applied, shown while they are pending, and undone."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.unit.dashboard.stores import SPEC, live

from understudy.core import StoreError
from understudy.dashboard.api import episode_queries, store_stats
from understudy.dashboard.api.targets import Target
from understudy.replay import Store, compact, verify
from understudy.replay.write import edit_requests
from understudy.replay.write.edit_requests import EditRequest


def test_a_change_is_made_at_once_if_nobody_writes(target: Target, store: Path) -> None:
    answer = episode_queries.edit_episodes(target, EditRequest(action="delete", episodes=(1, 2), who="ada"))
    assert answer == {"pending": False, "undo": [{"action": "restore", "episodes": [1, 2]}]}
    assert store_stats.totals(target)["episodes"] == 10
    episode_queries.edit_episodes(target, EditRequest(action="restore", episodes=(1, 2)))
    assert store_stats.totals(target)["episodes"] == 12
    target.close()
    assert (store / "catalog.seal").exists()
    assert verify(store).ok


def test_a_change_waits_if_somebody_writes_and_is_shown_as_done(
    target: Target, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(edit_requests, "POLL_S", 0.0)
    with Store.open(store) as opened:
        answer = episode_queries.edit_episodes(target, EditRequest(action="delete", episodes=(4,)))
        assert answer["pending"]
        assert episode_queries.one_episode(target, 4)["deleted"]
        assert episode_queries.one_episode(target, 4)["pending"]
        for undo in answer["undo"]:
            episode_queries.edit_episodes(target, EditRequest(action=undo["action"], episodes=tuple(undo["episodes"])))
        assert not episode_queries.one_episode(target, 4)["deleted"]
        episode_queries.edit_episodes(target, EditRequest(action="label", episodes=(4,), labels={"good": "yes"}))
        assert episode_queries.one_episode(target, 4)["labels"]["good"] == "yes"
        live(opened.writer("other", SPEC), 20)
        found = episode_queries.one_episode(target, 4)
        assert not found["pending"]
        assert not found["deleted"]
        assert found["labels"]["good"] == "yes"


def test_undo_of_a_label_brings_back_what_each_had(target: Target) -> None:
    episode_queries.edit_episodes(target, EditRequest(action="label", episodes=(1,), labels={"look": "here"}))
    before = {row: episode_queries.one_episode(target, row)["labels"] for row in (1, 2, 6)}
    answer = episode_queries.edit_episodes(
        target, EditRequest(action="label", episodes=(1, 2, 6), labels={"look": "there", "new": "x"})
    )
    assert episode_queries.one_episode(target, 2)["labels"]["look"] == "there"
    for undo in answer["undo"]:
        episode_queries.edit_episodes(
            target, EditRequest(action="label", episodes=tuple(undo["episodes"]), labels=undo["labels"])
        )
    assert {row: episode_queries.one_episode(target, row)["labels"] for row in (1, 2, 6)} == before


@pytest.mark.parametrize("name", ["origin", "origin_digest", "intervention_count", "ticket", "merged_from", "sensors"])
def test_a_label_that_the_software_reads_again_cannot_be_changed(name: str, target: Target, store: Path) -> None:
    with Store.open(store) as opened:
        opened.label([1], {name: "written"})
    assert episode_queries.one_episode(target, 1)["recorded_labels"][name] == "written"
    assert episode_queries.one_episode(target, 1)["labels"] == {"look": "again"}  # of a person
    for value in (None, "other"):
        with pytest.raises(StoreError, match=f"labels: '{name}' is written and read again by Understudy itself"):
            episode_queries.edit_episodes(target, EditRequest(action="label", episodes=(1,), labels={name: value}))
    assert episode_queries.one_episode(target, 1)["recorded_labels"][name] == "written"


def test_what_cannot_be_done_is_said(target: Target, store: Path) -> None:
    with pytest.raises(StoreError, match="1 of them do not exist"):
        episode_queries.edit_episodes(target, EditRequest(action="delete", episodes=(1, 99)))
    with Store.open(store) as opened:
        opened.delete([3])
        compact(opened, min_dead=0.0)
    with pytest.raises(StoreError, match="do not exist"):
        episode_queries.edit_episodes(target, EditRequest(action="restore", episodes=(3,)))
