"""Totals, groups, success rates and interventions of a store are the right numbers."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from understudy.dashboard.api import store_stats
from understudy.dashboard.api.targets import Target
from understudy.replay import Reader, Store


def test_totals_and_groups_add_up(target: Target, store: Path) -> None:
    with Store.open(store) as opened:
        opened.delete([12])
    found, groups = store_stats.totals(target), store_stats.groups(target)
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
    with closing(sqlite3.connect(store / "catalog.sqlite")) as db, db:
        db.execute(damage)
    db.close()
    target = Target(store, "s")
    found = store_stats.groups(target)
    target.close()
    assert (found["lost"], found["duplicates"]) == (lost, duplicates)


def test_success_by_task_has_wilsons_interval(target: Target) -> None:
    found = {(one["task"], one["part"]): one for one in store_stats.tasks(target)}
    with Reader(target.store) as reader:
        practice = [r for r in reader.episodes() if r.info.kind != "demonstration"]
    assert {part for _, part in found} == {"alone", "helped", "demonstration"}
    for (task, part), one in found.items():
        score, some = one["all"], [r for r in practice if r.info.task == task and r.info.success is not None]
        if part == "demonstration":
            continue
        assert score["episodes"] == len(some)  # both parts are of all practice
        assert score["successes"] == sum(bool(r.info.success) and (r.num_human > 0) == (part == "helped") for r in some)
        assert score["low"] - 1e-9 <= (score["rate"] or 0.0) <= score["high"]
    assert sum(one["episodes"] for (_, part), one in found.items() if part != "helped") == 12


def test_the_course_of_training(target: Target) -> None:
    found = store_stats.training_course(target)
    assert [one["step"] for one in found] == sorted(one["step"] for one in found)
    assert found[-1]["step"] == sum(one["steps"] for one in found) == 54  # nine episodes of practice
    assert sum(one["human_steps"] for one in found) == 4
    with Reader(target.store) as reader:
        practice = [r for r in reader.episodes() if r.info.kind != "demonstration" and r.info.success is not None]
    for name, helped in (("alone", False), ("helped", True)):
        assert sum(one[name]["episodes"] for one in found) == len(practice)
        some = [r for r in practice if r.info.success and (r.num_human > 0) is helped]
        assert sum(one[name]["successes"] for one in found) == len(some)
    assert sum(one["takeovers"] for one in found) == 4


def test_the_recent_rate_is_of_the_last_episodes(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    with Reader(target.store) as reader:
        practice = [r for r in reader.episodes() if r.info.kind != "demonstration"]
    monkeypatch.setattr(store_stats, "RECENT_PRACTICE", 4)
    found = store_stats.interventions(target)["recent"]
    assert found == store_stats.recent_practice(target)
    last = practice[-4:]
    assert found == {
        "episodes": 4,
        "steps": sum(r.num_steps for r in last),
        "human_steps": sum(r.num_human for r in last),
    }
    assert 0 < found["human_steps"] < sum(r.num_human for r in practice)


def test_interventions_by_operator_and_reason(target: Target) -> None:
    found = store_stats.interventions(target)
    assert found["total"][0]["takeovers"] == 4
    assert [(one["name"], one["takeovers"]) for one in found["operators"]] == [("ada", 4)]
    assert store_stats.operators(target) == ["ada"]
    assert [(one["name"], one["episodes"]) for one in found["reasons"]] == [("no progress", 2)]
    assert (found["latency"]["known"], found["latency"]["max"]) == (2, 9.5)
    assert sum(found["histogram"]["counts"]) == 2
    assert [one["id"] for one in found["newest"]] == [10, 6]
    assert found["newest"][0]["latency_ms"] == 9.5
