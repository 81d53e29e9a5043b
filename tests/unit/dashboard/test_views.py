"""What the views say: right numbers, and sane ones for places that are not there, empty, half-made or damaged."""

from __future__ import annotations

import json
import math
import shutil
import sqlite3
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from tests.unit.dashboard.stores import SPEC, live
from tests.waiting import wait_for

from understudy.core import StoreError
from understudy.dashboard.api import alarms as vitals
from understudy.dashboard.api import episode_queries as library
from understudy.dashboard.api import store_stats as tallies
from understudy.dashboard.api import targets as places
from understudy.dashboard.api.app import _finite, overview, replay
from understudy.dashboard.api.compare import compare
from understudy.dashboard.api.live import look
from understudy.dashboard.api.targets import Place, make_places
from understudy.replay import Reader, Store, verify
from understudy.replay.write import edit_requests as inbox
from understudy.replay.write.edit_requests import Request
from understudy.training.runs.health import HEALTH, Health
from understudy.training.runs.metrics import MetricLog
from understudy.training.runs.run import Run


@pytest.fixture(autouse=True)
def _as_it_is_now(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(places, "KEEP_S", 0.0)
    monkeypatch.setattr(places, "KEEP_TIMES", 0.0)
    monkeypatch.setattr(vitals, "LITTLE_BYTES", 0)  # this machine's disk may well be full


def lines(place: Place, *words: str) -> list[dict[str, Any]]:
    return [alarm for alarm in alarms(place) if all(word in f"{alarm['what']} {alarm['detail']}" for word in words)]


def alarms(place: Place, **said: Any) -> list[dict[str, Any]]:
    return vitals.alarms(place, **{"last_train": None, "last_commit_s": None, **said})


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


# ---- numbers


def test_totals_and_groups_add_up(place: Place, store: Path) -> None:
    with Store.open(store) as opened:
        opened.delete([12])
    found, groups = tallies.totals(place), tallies.groups(place)
    assert (found["episodes"], found["steps"], found["deleted"]["episodes"]) == (11, 66, 1)
    assert sum(kind["steps"] for kind in found["kinds"]) == 66
    for name in ("kind", "task", "operator", "actor", "split"):
        assert sum(one["episodes"] for one in groups[name]) == 11
    assert groups["source"] == {"policy": 48 - 4, "human": 6, "script": 16, "random": 0}
    assert sum(one["practice"] + one["demonstration"] for one in groups["ages"]) == 66
    assert (groups["lost"], groups["duplicates"], groups["cut"]) == (0, 0, 0)
    assert found["disk_bytes"] > 0
    assert not found["being_written"]


@pytest.mark.parametrize(
    ("damage", "lost", "duplicates"),
    [
        ("update episodes set num_rows = num_rows + 2 where id = 3", 2, 0),
        (
            "insert into spans select null, commit_id, episode, first_index, segment, first_row, num_rows, row_check"
            " from spans where episode = 4",
            0,
            7,
        ),
    ],
)
def test_lost_and_doubled_rows_are_counted(damage: str, lost: int, duplicates: int, store: Path) -> None:
    (store / "catalog.seal").unlink()
    with sqlite3.connect(store / "catalog.sqlite") as db:
        db.execute(damage)
    db.close()
    place = Place(store, "s")
    found = tallies.groups(place)
    place.close()
    assert (found["lost"], found["duplicates"]) == (lost, duplicates)


def test_success_by_task_has_wilsons_interval(place: Place) -> None:
    found = {(one["task"], one["demonstration"]): one for one in tallies.tasks(place)}
    pick = found["pick", False]["all"]
    with Reader(place.store) as reader:
        records = [r for r in reader.episodes() if r.info.task == "pick" and r.info.kind == "practice"]
        records += [r for r in reader.episodes() if r.info.task == "pick" and r.info.kind == "correction"]
    assert pick["episodes"] == sum(r.info.success is not None for r in records)
    assert pick["successes"] == sum(r.info.success is True for r in records)
    assert pick["low"] <= pick["rate"] <= pick["high"]
    assert sum(one["episodes"] for one in found.values()) == 12


def test_the_course_of_training(place: Place) -> None:
    found = tallies.course(place)
    assert [one["step"] for one in found] == sorted(one["step"] for one in found)
    assert found[-1]["step"] == sum(one["steps"] for one in found) == 54  # nine episodes of practice
    assert sum(one["human_steps"] for one in found) == 4
    assert sum(one["takeovers"] for one in found) == 4


def test_interventions_by_operator_and_reason(place: Place) -> None:
    found = tallies.interventions(place)
    assert found["total"][0]["takeovers"] == 4
    assert [(one["name"], one["takeovers"]) for one in found["operators"]] == [("ada", 4)]
    assert [(one["name"], one["episodes"]) for one in found["reasons"]] == [("no progress", 2)]
    assert (found["latency"]["known"], found["latency"]["max"]) == (2, 9.5)
    assert sum(found["histogram"]["counts"]) == 2
    assert [one["id"] for one in found["newest"]] == [10, 6]
    assert found["newest"][0]["latency_ms"] == 9.5


# ---- places that are not what one hopes for


def test_nothing_there_yet_and_then_there_is(tmp_path: Path) -> None:
    place = Place(tmp_path / "run", "run")
    assert overview(place)["store"] is False
    assert replay(place) == {"absent": True}
    assert look(place)["commit"] is None
    Run.create(tmp_path / "run", "rlpd", _Config())
    assert overview(place)["config"]["kind"] == "rlpd"
    with Store.open(tmp_path / "run" / "store") as store:
        assert overview(place)["totals"]["episodes"] == 0
        assert tallies.course(place) == []
        live(store.writer("w", SPEC), 5)
        assert overview(place)["totals"]["episodes"] == 1
        assert overview(place)["totals"]["being_written"]
    shutil.rmtree(tmp_path / "run" / "store")
    assert overview(place)["store"] is False
    place.close()


def test_a_store_that_is_made_anew_under_the_same_name_is_seen(tmp_path: Path) -> None:
    place = Place(tmp_path / "store", "s")
    for number in (3, 1):
        with Store.open(tmp_path / "store") as store:
            writer = store.writer("w", SPEC)
            for episode in range(number):
                live(writer, episode)
        assert tallies.totals(place)["episodes"] == number
        shutil.rmtree(tmp_path / "store")
    place.close()


def test_what_is_damaged_is_said_in_words(store: Path) -> None:
    (store / "catalog.seal").unlink()
    (store / "catalog.sqlite").write_bytes(b"nonsense" * 1000)
    assert "error: " in look(Place(store, "s"))["commit"]


def test_readers_are_let_go_when_nobody_looks(place: Place) -> None:
    with place.pictures().reader():
        pass
    place.let_go(idle_s=60)
    assert place.pictures()._reader is not None
    place.let_go()
    assert place.pictures()._reader is None


def test_answers_are_kept_for_a_share_of_the_time(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(places, "KEEP_S", 3600.0)
    calls = []
    for _ in range(3):
        place.kept("x", lambda: calls.append(1) or len(calls))
    with Store.open(place.store) as store:
        store.delete([1])
    place.kept("x", lambda: calls.append(1) or len(calls))
    assert len(calls) == 1
    monkeypatch.setattr(places, "KEEP_S", 0.0)
    place._kept.clear()
    place.kept("x", lambda: calls.append(1) or len(calls))
    place.kept("x", lambda: calls.append(1) or len(calls))  # nothing has changed
    with Store.open(place.store) as store:
        store.restore([1])
    place.kept("x", lambda: calls.append(1) or len(calls))
    assert len(calls) == 3


def test_names_of_places_differ(tmp_path: Path) -> None:
    made = make_places([tmp_path / "a" / "run", tmp_path / "b" / "run", tmp_path / "c" / "store", tmp_path / "c"])
    assert len({place.name for place in made}) == len(made)
    assert len(make_places([tmp_path, tmp_path / "." / ""])) == 1


# ---- changing


def test_a_change_is_made_at_once_if_nobody_writes(place: Place, store: Path) -> None:
    said = library.ask(place, Request(action="delete", episodes=(1, 2), who="ada"))
    assert said == {"pending": False, "undo": [{"action": "restore", "episodes": [1, 2]}]}
    assert tallies.totals(place)["episodes"] == 10
    library.ask(place, Request(action="restore", episodes=(1, 2)))
    assert tallies.totals(place)["episodes"] == 12
    place.close()
    assert (store / "catalog.seal").exists()
    assert verify(store).ok


def test_a_change_waits_if_somebody_writes_and_is_shown_as_done(
    place: Place, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inbox, "LOOK_S", 0.0)
    with Store.open(store) as opened:
        said = library.ask(place, Request(action="delete", episodes=(4,)))
        assert said["pending"]
        assert library.one_episode(place, 4)["deleted"]
        assert library.one_episode(place, 4)["pending"]
        for undo in said["undo"]:
            library.ask(place, Request(action=undo["action"], episodes=tuple(undo["episodes"])))
        assert not library.one_episode(place, 4)["deleted"]
        library.ask(place, Request(action="label", episodes=(4,), labels={"good": "yes"}))
        assert library.one_episode(place, 4)["labels"]["good"] == "yes"
        live(opened.writer("other", SPEC), 20)
        found = library.one_episode(place, 4)
        assert not found["pending"]
        assert not found["deleted"]
        assert found["labels"]["good"] == "yes"


def test_undo_of_a_label_brings_back_what_each_had(place: Place) -> None:
    library.ask(place, Request(action="label", episodes=(1,), labels={"look": "here"}))
    before = {row: library.one_episode(place, row)["labels"] for row in (1, 2, 6)}
    said = library.ask(place, Request(action="label", episodes=(1, 2, 6), labels={"look": "there", "new": "x"}))
    assert library.one_episode(place, 2)["labels"]["look"] == "there"
    for undo in said["undo"]:
        library.ask(place, Request(action="label", episodes=tuple(undo["episodes"]), labels=undo["labels"]))
    assert {row: library.one_episode(place, row)["labels"] for row in (1, 2, 6)} == before


def test_what_cannot_be_done_is_said(place: Place, store: Path) -> None:
    with pytest.raises(StoreError, match="1 of them are not there"):
        library.ask(place, Request(action="delete", episodes=(1, 99)))
    with Store.open(store) as opened:
        opened.delete([3])
        opened.compact(min_dead=0.0)
    with pytest.raises(StoreError, match="are not there"):
        library.ask(place, Request(action="restore", episodes=(3,)))


# ---- health and alarms


def test_a_process_that_hangs_is_shown_with_the_place_where(tmp_path: Path) -> None:
    place = Place(tmp_path, "run")
    release = threading.Event()

    def hang_here_for_ever() -> None:
        release.wait()

    stuck = threading.Thread(target=hang_here_for_ever)
    stuck.start()
    try:
        with Health(tmp_path / HEALTH, role="learner", name="one", beat_s=0.05, stuck_s=0.1) as health:
            health.page = "http://127.0.0.1:7448/"
            health.add(lambda: {"queue": 3, "novel": "shown"})
            wait_for(lambda: vitals.roles(place) and vitals.roles(place)[0]["stack"])
            (role,) = vitals.roles(place)
            assert role["state"] == "stuck"
            assert "hang_here_for_ever" in role["stack"]
            assert (role["queue"], role["novel"], role["page"]) == (3, "shown", "http://127.0.0.1:7448/")
            assert lines(place, "learner one is stuck", "without progress")[0]["level"] == "bad"
    finally:
        release.set()
        stuck.join()
    assert vitals.roles(place)[0]["state"] == "ended"
    assert alarms(place) == []


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"state": "failed", "error": "ValueError: no"}, "learner one failed"),
        ({"pid": 2**22 + 5}, "learner one is gone"),
        ({"host": "elsewhere", "beat_s": 1.0}, "learner one is silent"),
        ({"delivery": {"dropped": 7, "connected": True}}, "learner one dropped 7 steps"),
        ({"delivery": {"dropped": 0, "connected": False, "problem": "refused"}}, "learner one cannot reach the server"),
    ],
)
def test_alarms_of_processes(change: dict[str, Any], what: str, tmp_path: Path) -> None:
    place = Place(tmp_path, "run")
    with Health(tmp_path / HEALTH, role="learner", name="one") as health:
        assert health.path is not None
        said = json.loads(health.path.read_text())
        assert alarms(place) == []
        (tmp_path / HEALTH / "learner-one.json").write_text(json.dumps({**said, **change}))
        assert [alarm["what"] for alarm in alarms(place)] == [what]


def test_an_actor_that_lags_is_told(tmp_path: Path) -> None:
    place = Place(tmp_path, "run")
    with (
        Health(tmp_path / HEALTH, role="learner", name="l") as learner,
        Health(tmp_path / HEALTH, role="actor", name="a", beat_s=0.05) as actor,
    ):
        learner.progress("x", policy_version=20)
        actor.progress("x", policy_version=2)
        learner._write(learner._now("running"))
        actor._write(actor._now("running"))
        assert [one["what"] for one in alarms(place)] == ["actor a lags"]
        actor.progress("x", policy_version=19)
        actor._write(actor._now("running"))
        assert alarms(place) == []


def test_alarms_of_disk_mixture_and_silence(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    assert alarms(place) == []
    (found,) = alarms(place, last_train={"demo_share": 1.0, "demo_share_wanted": 0.5})
    assert found["what"] == "the mixture is off"
    assert "100% demonstrations, wanted 50%" in found["detail"]
    assert alarms(place, last_train={"demo_share": 0.48, "demo_share_wanted": 0.5}) == []
    long_ago = time.time() - 3600
    assert alarms(place, last_commit_s=long_ago) == []  # nobody writes
    with Store.open(place.store):
        assert [one["what"] for one in alarms(place, last_commit_s=long_ago)] == ["nothing is written"]
    monkeypatch.setattr(vitals, "LITTLE_BYTES", 10**18)
    monkeypatch.setattr(vitals, "LITTLE_SHARE", 1.1)
    assert alarms(place)[0]["what"] == "the disk is nearly full"


# ---- comparing


def test_runs_are_compared_by_config_and_score(tmp_path: Path) -> None:
    runs = []
    for name, rate in (("one", 1e-3), ("two", 1e-4)):
        run = Run.create(tmp_path / name, "rlpd", _Config(sac=_Networks(lr=rate)))
        log = MetricLog(run.metrics)
        log.write("train", step=1, update=1, loss=rate)
        log.write("evaluation", step=1, update=1, success=0.5, low=0.1, high=0.9, fingerprint={"code": name}, trials=[])
        log.close()
        runs.append(Place(run.path, name))
    found = compare([*runs, Place(tmp_path / "nothing", "nothing")])
    assert [run["name"] for run in found["runs"]] == ["one", "two"]
    table = {row["name"]: row for row in found["config"]}
    assert table["sac.lr"] == {"name": "sac.lr", "values": [1e-3, 1e-4], "differs": True}
    assert not table["env"]["differs"]
    assert table["sac.hidden"]["values"] == [[8, 8], [8, 8]]
    assert found["runs"][1]["evaluations"][0]["fingerprint"] == {"code": "two"}
    assert found["runs"][0]["train"]["values"]["loss"] == [1e-3]


def test_what_is_no_number_becomes_null() -> None:
    assert _finite({"a": [math.nan, math.inf, 1.0], 2: "\ud800"}) == {"a": [None, None, 1.0], "2": "?"}
