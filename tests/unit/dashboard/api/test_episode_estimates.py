"""Estimates of an episode: shown if they are of it, absent if there are none, a sentence if they cannot be trusted."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tests.unit.dashboard.stores import SPEC, live, write_estimates
from tests.unit.dashboard.test_server import ask

from understudy.core import StoreError
from understudy.dashboard.api.episode_estimates import estimates_of, mean_values
from understudy.dashboard.api.episode_queries import facets, list_episodes
from understudy.dashboard.api.filters import Filter
from understudy.dashboard.api.targets import Target
from understudy.dashboard.server import WatchServer
from understudy.replay import Estimates, Store


def test_without_estimates_there_is_nothing(target: Target, store: Path) -> None:
    assert estimates_of(target, 4, 6) is None
    write_estimates(store, 4)
    assert estimates_of(target, 5, 6) is None


def test_each_step_has_its_value_and_whether_it_is_good(target: Target, store: Path) -> None:
    written = Estimates.read(write_estimates(store, 4, 8))
    found = estimates_of(target, 8, 6)
    assert found == {
        "value": pytest.approx([-1, -5 / 6, -4 / 6, -3 / 6, -2 / 6, -1 / 6], abs=1e-4),
        "advantage": pytest.approx([-3 / 12, -2 / 12, -1 / 12, 0, 1 / 12, 2 / 12], abs=1e-4),
        "good": [False, False, False, True, True, True],
        "commit": written.commit,
        "model": "0123456789abcdef",
        "note": None,
    }
    shown = estimates_of(target, 8, 4)  # as many as the other curves have
    assert shown is not None
    assert [len(shown[name]) for name in ("value", "advantage", "good")] == [4, 4, 4]


def test_the_newest_estimates_are_shown(target: Target, store: Path) -> None:
    os.utime(write_estimates(store, 4), (1, 1))
    write_estimates(store, 4, model="another")
    found = estimates_of(target, 4, 6)
    assert found is not None
    assert found["model"] == "another"


def test_an_episode_that_was_edited_later_says_so(target: Target, store: Path) -> None:
    write_estimates(store, 4, 5)
    with Store.open(store) as opened:
        opened.set_success([4], True)
    edited, other = estimates_of(target, 4, 6), estimates_of(target, 5, 6)
    assert edited is not None
    assert other is not None
    assert edited["note"].startswith("This episode was edited after its estimates were made; if that changed")
    assert len(edited["value"]) == 6
    assert other["note"] is None  # the store has changed, and this episode has not


def test_estimates_from_before_the_episode_lead_to_a_sentence(target: Target, store: Path) -> None:
    commit = Estimates.read(write_estimates(store, 4)).commit
    with Store.open(store) as opened:
        writer = opened.writer("more", SPEC, background=False)
        for number in (12, 13, 14, 7):  # no outcome, success, failure, held out
            live(writer, number)
    notes = [(estimates_of(target, episode, 6) or {}).get("note") for episode in (13, 14, 15, 16)]
    later = f"The estimates are of commit {commit}; this episode was recorded or judged later; "
    assert [note and note.startswith(later) for note in notes] == [None, True, True, None]


def test_estimates_of_other_steps_or_another_store_lead_to_a_sentence(target: Target, store: Path) -> None:
    path = write_estimates(store, 4)
    found = Estimates.read(path)
    path.unlink()
    shorter = replace(
        found,
        num_steps=found.num_steps - 1,
        **{name: getattr(found, name)[:-1] for name in ("value", "advantage", "good")},
    )
    shorter.write(store).touch()
    assert estimates_of(target, 4, 6) == {
        "note": f"The estimates are of commit {found.commit}, when this episode had 5 steps and not 6; "
        "`understudy improve --by recap` makes new ones."
    }
    path.unlink()
    replace(found, store_id="elsewhere").write(store)
    shown = estimates_of(target, 4, 6)
    assert shown is not None
    assert shown["note"].startswith("The newest estimates are of another store (elsewher); ")


@pytest.mark.parametrize("content", [b"", b"nothing", None])
def test_a_damaged_file_leads_to_a_sentence_and_the_episode_is_shown(content: bytes | None, store: Path) -> None:
    path = write_estimates(store, 4)
    whole = bytearray(path.read_bytes())
    whole[-3] ^= 1
    path.write_bytes(bytes(whole) if content is None else content)
    with WatchServer([store]) as server:
        status, _, body = ask(server, "/api/0/episode/4")
    answer = json.loads(body)
    assert status == 200
    assert answer["steps"]["num_steps"] == 6
    assert list(answer["estimates"]) == ["note"]
    note = answer["estimates"]["note"]
    assert note.startswith(f"The estimates of the steps cannot be read: {path}: expected estimates of steps, got ")
    assert note.endswith("; delete the file")


# ---- by the mean of an episode


def listed(target: Target, **wanted: str) -> list[int]:
    return [row["id"] for row in list_episodes(target, Filter.parse(wanted), 0, 100)["rows"]]


def test_episodes_are_found_by_their_mean_value(target: Target, store: Path) -> None:
    assert facets(target)["value"] == []
    assert listed(target, value="value below -0.75") == []
    found = Estimates.read(write_estimates(store, 4, 5, 8))
    assert mean_values(target) == pytest.approx(dict.fromkeys((4, 5, 8), -3.5 / 6))
    value = np.repeat(np.float32([-0.75, -0.9, -0.1]), 6)
    value[:2] = -1, -0.5  # the mean is that of all steps
    replace(found, value=value).write(store)
    assert mean_values(target) == pytest.approx({4: -0.75, 5: -0.9, 8: -0.1})
    assert listed(target, value="value below -0.75") == [5]
    assert listed(target, value="value -0.75 to -0.5") == [4]
    assert listed(target, value="value above -0.25") == [8]
    assert listed(target, value="value above -0.25", kind="demonstration") == []
    assert facets(target)["value"] == [["value below -0.75", 1], ["value -0.75 to -0.5", 1], ["value above -0.25", 1]]
    with Store.open(store) as opened:
        opened.delete([5])
    assert listed(target, value="value below -0.75") == []
    assert [name for name, _ in facets(target)["value"]] == ["value -0.75 to -0.5", "value above -0.25"]


def test_a_damaged_file_or_that_of_another_store_offers_no_filter(target: Target, store: Path) -> None:
    path = write_estimates(store, 4)
    found = Estimates.read(path)
    path.write_bytes(b"nothing")
    assert facets(target)["value"] == []
    with pytest.raises(StoreError, match=r"expected estimates of steps, got .*; delete the file"):
        listed(target, value="value below -0.75")
    assert len(listed(target)) == 12
    with pytest.raises(StoreError, match=r"value: expected one of value below -0\.75, .*, got 'low'"):
        listed(target, value="low")
    path.unlink()
    replace(found, store_id="elsewhere").write(store)
    assert facets(target)["value"] == []
