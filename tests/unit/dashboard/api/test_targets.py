"""Targets that do not exist yet, are empty, replaced or damaged; and their cached readers and answers."""

from __future__ import annotations

import shutil
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import pytest
from tests.unit.dashboard.stores import SPEC, live

from understudy.dashboard.api import change_events, store_stats, targets
from understudy.dashboard.api.app import overview, replay
from understudy.dashboard.api.change_events import change_stamp
from understudy.dashboard.api.targets import Target, make_targets
from understudy.replay import Store
from understudy.training.runs.health import Health
from understudy.training.runs.run import Run


@dataclass(frozen=True, kw_only=True)
class _Networks:
    lr: float = 1e-3
    hidden: tuple[int, ...] = (8, 8)


@dataclass(frozen=True, kw_only=True)
class _Config:
    """A small config; the page knows none of its options."""

    env: str = "toy"
    steps: int = 10
    sac: _Networks = field(default_factory=_Networks)


def test_nothing_there_yet_and_then_there_is(tmp_path: Path) -> None:
    target = Target(tmp_path / "run", "run")
    assert overview(target)["store"] is False
    assert replay(target) == {"absent": True}
    assert change_stamp(target)["commit"] is None
    Run.create(tmp_path / "run", "rlpd", _Config())
    assert overview(target)["config"]["kind"] == "rlpd"
    with Store.open(tmp_path / "run" / "store") as store:
        assert overview(target)["totals"]["episodes"] == 0
        assert store_stats.training_course(target) == []
        live(store.writer("w", SPEC), 5)
        assert overview(target)["totals"]["episodes"] == 1
        assert overview(target)["totals"]["being_written"]
    shutil.rmtree(tmp_path / "run" / "store")
    assert overview(target)["store"] is False
    target.close()


def test_somebody_is_at_work_while_a_process_runs_or_commits_are_new(
    store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = Target(store, "s")
    monkeypatch.setattr(change_events, "FRESH_S", 1e9)  # the store was made at some time before
    assert change_stamp(target)["at_work"]
    monkeypatch.setattr(change_events, "FRESH_S", 0.0)
    assert not change_stamp(target)["at_work"]
    health = Health(store / "health", role="learner", name="rlpd").start()
    assert change_stamp(target)["at_work"]
    health.close()
    assert not change_stamp(target)["at_work"]
    target.close()


def test_a_store_that_is_made_anew_under_the_same_name_is_seen(tmp_path: Path) -> None:
    target = Target(tmp_path / "store", "s")
    for number in (3, 1):
        with Store.open(tmp_path / "store") as store:
            writer = store.writer("w", SPEC)
            for episode in range(number):
                live(writer, episode)
        assert store_stats.totals(target)["episodes"] == number
        shutil.rmtree(tmp_path / "store")
    target.close()


def test_what_is_damaged_is_said_in_words(store: Path) -> None:
    (store / "catalog.seal").unlink()
    (store / "catalog.sqlite").write_bytes(b"nonsense" * 1000)
    assert "error: " in change_stamp(Target(store, "s"))["commit"]


def test_readers_are_let_go_when_nobody_looks(target: Target) -> None:
    with target.images().reader():
        pass
    target.close_readers(idle_s=60)
    assert target.images()._reader is not None
    target.close_readers()
    assert target.images()._reader is None


def test_answers_are_kept_for_a_share_of_the_time(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(targets, "CACHE_S", 3600.0)
    calls = []
    for _ in range(3):
        target.cached("x", lambda: calls.append(1) or len(calls))
    with Store.open(target.store) as store:
        store.delete([1])
    target.cached("x", lambda: calls.append(1) or len(calls))
    assert len(calls) == 1
    monkeypatch.setattr(targets, "CACHE_S", 0.0)
    target._cache.clear()
    target.cached("x", lambda: calls.append(1) or len(calls))
    target.cached("x", lambda: calls.append(1) or len(calls))  # nothing has changed
    with Store.open(target.store) as store:
        store.restore([1])
    target.cached("x", lambda: calls.append(1) or len(calls))
    assert len(calls) == 3


def test_an_outdated_answer_is_followed_by_a_change(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a page that asked just after the last commit would show the numbers before it until it is loaded again."""
    now_s = 1000.0
    monkeypatch.setattr(targets, "CACHE_S", 1.0)
    monkeypatch.setattr(targets, "time", SimpleNamespace(monotonic=lambda: now_s))
    number = store_stats.totals(target)["episodes"]
    told = change_stamp(target)
    with Store.open(target.store) as store:
        store.delete([1])
        assert change_stamp(target)["being_written"]
    assert change_stamp(target)["commit"] != told["commit"]  # the page asks, a moment after the answer was made
    assert store_stats.totals(target)["episodes"] == number
    told = change_stamp(target)
    assert not told["being_written"]
    now_s += 1.0
    assert change_stamp(target)["renewals"] == told["renewals"] + 1
    assert store_stats.totals(target)["episodes"] == number - 1
    assert change_stamp(target)["renewals"] == told["renewals"] + 1


def test_names_of_places_differ(tmp_path: Path) -> None:
    made = make_targets([tmp_path / "a" / "run", tmp_path / "b" / "run", tmp_path / "c" / "store", tmp_path / "c"])
    assert len({target.name for target in made}) == len(made)
    assert len(make_targets([tmp_path, tmp_path / "." / ""])) == 1
