"""Alarms of processes, the disk, the mixture and the store."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from tests.waiting import wait_for

from understudy.dashboard.api import alarms
from understudy.dashboard.api.targets import Target
from understudy.replay import Store
from understudy.training.runs.health import HEALTH, Health


def lines(target: Target, *words: str) -> list[dict[str, Any]]:
    return [
        alarm for alarm in all_alarms(target) if all(word in f"{alarm['what']} {alarm['detail']}" for word in words)
    ]


def all_alarms(target: Target, **more: Any) -> list[dict[str, Any]]:
    return alarms.find_alarms(target, **{"last_train": None, "last_commit_s": None, **more})


def test_a_process_that_hangs_is_shown_with_the_place_where(tmp_path: Path) -> None:
    target = Target(tmp_path, "run")
    release = threading.Event()

    def hang_here_for_ever() -> None:
        release.wait()

    stuck = threading.Thread(target=hang_here_for_ever)
    stuck.start()
    try:
        with Health(tmp_path / HEALTH, role="learner", name="one", heartbeat_s=0.05, progress_timeout_s=0.1) as health:
            health.page = "http://127.0.0.1:7448/"
            health.add(lambda: {"queue": 3, "novel": "shown"})
            wait_for(lambda: alarms.processes(target) and alarms.processes(target)[0]["stack"])
            (role,) = alarms.processes(target)
            assert role["state"] == "stuck"
            assert "hang_here_for_ever" in role["stack"]
            assert (role["queue"], role["novel"], role["page"]) == (3, "shown", "http://127.0.0.1:7448/")
            assert lines(target, "learner one is stuck", "without progress")[0]["level"] == "bad"
    finally:
        release.set()
        stuck.join()
    assert alarms.processes(target)[0]["state"] == "ended"
    assert all_alarms(target) == []


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"state": "failed", "error": "ValueError: no"}, "learner one failed"),
        ({"pid": 2**22 + 5}, "learner one is gone"),
        ({"host": "elsewhere", "beat_s": 1.0}, "learner one is silent"),
        ({"delivery": {"dropped": 7, "connected": True}}, "learner one dropped 7 steps"),
        ({"delivery": {"damaged_chunks": 2, "connected": True}}, "learner one: the disk damaged 2 chunks"),
        ({"delivery": {"dropped": 0, "connected": False, "problem": "refused"}}, "learner one cannot reach the server"),
    ],
)
def test_alarms_of_processes(change: dict[str, Any], what: str, tmp_path: Path) -> None:
    target = Target(tmp_path, "run")
    with Health(tmp_path / HEALTH, role="learner", name="one", heartbeat_s=3600) as health:
        assert health.path is not None
        content = json.loads(health.path.read_text())
        assert all_alarms(target) == []
        (tmp_path / HEALTH / "learner-one.json").write_text(json.dumps({**content, **change}))
        assert [alarm["what"] for alarm in all_alarms(target)] == [what]


def test_an_actor_that_lags_is_told(tmp_path: Path) -> None:
    target = Target(tmp_path, "run")
    with (
        Health(tmp_path / HEALTH, role="learner", name="l", heartbeat_s=3600) as learner,
        Health(tmp_path / HEALTH, role="actor", name="a", heartbeat_s=3600) as actor,
    ):
        learner.progress("x", policy_version=20)
        actor.progress("x", policy_version=2)
        learner._write(learner._now("running"))
        actor._write(actor._now("running"))
        assert [one["what"] for one in all_alarms(target)] == ["actor a lags"]
        actor.progress("x", policy_version=19)
        actor._write(actor._now("running"))
        assert all_alarms(target) == []


def test_alarms_of_disk_mixture_and_silence(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    assert all_alarms(target) == []
    (found,) = all_alarms(target, last_train={"demo_share": 1.0, "demo_share_wanted": 0.5})
    assert found["what"] == "batches have the wrong share of demonstrations"
    assert "100% demonstrations, wanted 50%" in found["detail"]
    assert all_alarms(target, last_train={"demo_share": 0.48, "demo_share_wanted": 0.5}) == []
    long_ago = time.time() - 3600
    assert all_alarms(target, last_commit_s=long_ago) == []  # nobody writes
    with Store.open(target.store):
        assert [one["what"] for one in all_alarms(target, last_commit_s=long_ago)] == ["no new data"]
    monkeypatch.setattr(alarms, "LOW_DISK_BYTES", 10**18)
    monkeypatch.setattr(alarms, "LOW_DISK_SHARE", 1.1)
    assert all_alarms(target)[0]["what"] == "the disk is nearly full"
