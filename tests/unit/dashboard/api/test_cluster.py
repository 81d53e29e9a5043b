"""The cluster on the page: what the driver wrote, in groups; what is wrong and what to do; files that make no sense."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.unit.dashboard.clusters import STACK, break_some, change, make_status, node_id

from understudy.cluster.status import EVENTS_FILE, STATUS_FILE, Event
from understudy.dashboard.api import cluster, cluster_file
from understudy.dashboard.api.app import overview
from understudy.dashboard.api.change_events import change_stamp
from understudy.dashboard.api.cluster import cluster_alarms, cluster_view, lost_shards, summary_line, workers
from understudy.dashboard.api.cluster_file import Cluster, ClusterFile
from understudy.dashboard.api.targets import Target


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return tmp_path / "press"


@pytest.fixture
def broken(run: Path) -> Target:
    status = make_status(run)
    break_some(status)
    status.write()
    return Target(run, "press")


def read(run: Path) -> Cluster:
    found = ClusterFile(run).read()
    assert found is not None
    return found


def named(target: Target, *words: str) -> list[dict[str, Any]]:
    return [one for one in cluster_alarms(target) if all(word in f"{one['what']} {one['detail']}" for word in words)]


# ---- in good health


def test_a_healthy_cluster_is_shown_in_groups(run: Path) -> None:
    make_status(run).write()
    target = Target(run, "press")
    view = cluster_view(target)
    assert (view["driver"]["state"], view["driver"]["pid"], view["alarms"]) == ("running", os.getpid(), [])
    assert [node["host"] for node in view["nodes"]] == ["gpu-a", "gpu-b", "sim-c"]
    assert [group["role"] for group in view["nodes"][0]["groups"]] == ["learner", "shard", "rollout"]
    rollout = view["nodes"][0]["groups"][2]
    assert (rollout["total"], rollout["states"], rollout["restarts"]) == (334, [("running", 334)], 2)
    assert rollout["doing"] == [("running ticket …", 222), ("waiting for tickets", 112)]
    assert view["totals"] == {
        "nodes": 3,
        "alive": 3,
        "cpus": 1536.0,
        "gpus": 8.0,
        "used_cpus": 1084.5,
        "used_gpus": 8.0,
        "roles": 1012,
        "memory_bytes": 3 * 256 * 2**30,
        "steps": 1_000_006,
        "lost_steps": 0,
    }
    assert len(json.dumps(view)) < 20_000  # a thousand workers, every two seconds, to every page


def test_a_group_unfolds(run: Path) -> None:
    status = make_status(run)
    at = next(index for index, role in enumerate(status.roles) if role.name == "rollout-1-5" and role.role == "rollout")
    status.roles[at] = replace(status.roles[at], state="stuck", stack=STACK)
    status.write()
    target = Target(run, "press")
    node = status.roles[at].node or ""
    found = workers(target, node, "rollout", 0)
    assert (found["total"], len(found["rows"])) == (333, 200)
    assert (found["rows"][0]["name"], found["rows"][0]["stack"]) == ("rollout-1-5", STACK)  # trouble first
    later = workers(target, node, "rollout", 200)["rows"]
    names = [row["name"] for row in (*found["rows"][1:], *later)]
    assert len(set(names)) == len(names) == 332
    assert names == sorted(names, key=lambda name: [int(part) for part in name.split("-")[1:]])  # 9 before 10
    assert workers(target, "nowhere", "rollout", 0)["total"] == 0
    assert workers(target, node, "rollout", -5)["offset"] == 0


# ---- in trouble


def test_what_is_wrong_is_said_with_what_to_do(broken: Target) -> None:
    found = cluster_alarms(broken)
    assert [one["level"] for one in found] == ["bad", "warn", "warn", "warn"]
    assert named(broken, "shard-2 is lost", "250,002 acknowledged steps", "understudy serve")
    assert named(broken, "node sim-c is gone", "3 min ago", "as resources allow")
    assert named(broken, "rollout-0-9 is stuck", "on gpu-a", "see its stack")
    assert named(broken, "333 workers wait for resources", "`ray start --address ...`", "--cluster.*")
    view = cluster_view(broken)
    assert [one["name"] for one in view["unhealthy"]] == ["shard-2", "rollout-0-9"]
    assert view["nodes"][-1]["id"] == ""  # those without a machine
    assert view["nodes"][-1]["groups"][0]["states"] == [("pending placement", 333)]
    assert (view["totals"]["alive"], view["totals"]["cpus"], view["totals"]["lost_steps"]) == (2, 1024.0, 250_002)


def test_a_shard_that_was_replaced_is_not_forgotten(run: Path) -> None:
    status = make_status(run, num_workers=8)
    status.shards[1] = replace(status.shards[1], lost_steps=77, steps=5)
    status.shards[3] = replace(status.shards[3], state="restarting", node=None)
    status.write()
    target = Target(run, "press")
    assert named(target, "shard-1 was lost", "77 acknowledged steps", "an empty shard replaces it")[0]["level"] == "bad"
    assert named(target, "shard-3 is restarting", "no node yet", "it restarts")[0]["level"] == "warn"
    assert lost_shards(read(run)) == ["77 steps of shard-1: the disk with `/data/understudy/press/shard-1` was lost"]


def test_waiting_for_a_moment_is_no_alarm(run: Path) -> None:
    status = make_status(run, num_workers=8)
    status.roles[-1] = replace(status.roles[-1], state="pending placement", node=None, since_s=time.time() - 5)
    status.write()
    assert cluster_alarms(Target(run, "press")) == []


def test_a_learner_is_worse_than_a_worker(run: Path) -> None:
    status = make_status(run, num_workers=8)
    status.roles[0] = replace(status.roles[0], state="stuck", error="no progress for 300 s\nand more")
    for index in (-1, -2):
        status.roles[index] = replace(status.roles[index], state="stuck", error="hangs")
    status.write()
    target = Target(run, "press")
    assert named(target, "rank-0 is stuck", "no progress for 300 s")[0]["level"] == "bad"
    assert named(target, "2 rollouts are stuck", "hangs")[0]["level"] == "warn"


# ---- the driver


def test_a_driver_that_was_killed_is_gone(run: Path) -> None:
    make_status(run, num_workers=2).write()
    target = Target(run, "press")
    before = change_stamp(target)["cluster"]
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    change(run, pid=ended.pid)
    assert read(run).driver_state == "gone"
    assert change_stamp(target)["cluster"] != before
    assert named(target, "the driver is gone", f"process {ended.pid}", f"`understudy resume {run} --cluster ...`")


def test_a_driver_elsewhere_that_says_nothing_is_silent(run: Path) -> None:
    make_status(run, num_workers=2).write()
    target = Target(run, "press")
    change(run, host="another", updated_s=time.time() - 5)
    assert read(run).driver_state == "running"
    assert not cluster_view(target)["over"]
    change(run, host="another", updated_s=time.time() - 3 * 60)
    assert read(run).driver_state == "silent"
    assert named(target, "no heartbeat from the driver for 3 min", "on another", "understudy resume")
    change(run, state="ended")
    assert (read(run).driver_state, cluster_alarms(target)) == ("ended", [])
    view = cluster_view(target)
    states = {state for group in view["groups"] for state, _ in group["states"]}
    assert states | {shard["state"] for shard in view["shards"]} == {"ended"}
    assert {row["state"] for row in workers(target, node_id(0), "rollout", 0)["rows"]} == {"ended"}
    assert view["over"]
    change(run, state="failed", error="ClusterError: no room")
    assert named(target, "the run failed", "ClusterError: no room; fix it")


def test_a_page_hears_of_a_driver_that_falls_silent(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Though no file changes then."""
    make_status(run, num_workers=2).write()
    target = Target(run, "press")
    before = change_stamp(target)["cluster"]
    assert change_stamp(target)["cluster"] == before
    monkeypatch.setattr(cluster_file, "HEARTBEAT_TIMEOUT_S", -1.0)
    assert change_stamp(target)["cluster"] != before


def test_the_overview_has_it_too(broken: Target) -> None:
    view = overview(broken)
    assert view["cluster"] == "running"
    assert any(alarm["view"] == "cluster" and "shard-2" in alarm["what"] for alarm in view["alarms"])
    (broken.path / STATUS_FILE).unlink()
    assert overview(broken)["cluster"] is None
    assert change_stamp(broken)["cluster"] is None


# ---- what happened


def test_events_come_newest_first_and_are_bounded(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    status = make_status(run, num_workers=2)
    status.append(
        [Event(what="worker lost", name=f"w{index}", text=f"event {index}", time_s=index) for index in range(300)]
    )
    with (run / EVENTS_FILE).open("a") as file:
        file.write('{"time_s": 5, "what": "stuck", "na')  # being written just now
    found, earlier = ClusterFile(run).events(100)
    assert ([event.name for event in found][:2], len(found), earlier) == (["w299", "w298"], 100, True)
    everything, earlier = ClusterFile(run).events(1000)
    assert (len(everything), everything[-1].what, earlier) == (301, "began", False)
    monkeypatch.setattr(cluster_file, "TAIL_BYTES", 2000)
    some, earlier = ClusterFile(run).events(1000)
    assert 5 < len(some) < 50
    assert (some[0].name, earlier) == ("w299", True)  # and no half line at the other end


# ---- files that make no sense


@pytest.mark.parametrize("text", ["", "{", "[1, 2]", "null", '"text"', "\x00\xff", "[" * 100_000, '{"a": ' * 50_000])
def test_a_damaged_file_is_said_and_nothing_else_breaks(run: Path, text: str) -> None:
    run.mkdir()
    (run / STATUS_FILE).write_text(text)
    (run / EVENTS_FILE).write_text(text + "\n" + text)
    target = Target(run, "press")
    view = cluster_view(target)
    assert view["absent"] is True
    assert view["problem"]
    assert named(target, "cluster.json is not valid")[0]["level"] == "warn"
    assert change_stamp(target)["cluster"]
    assert workers(target, "", "rollout", 0)["rows"] == []
    make_status(run, num_workers=2).write()
    assert "absent" not in cluster_view(target)  # whole again, and seen to be


def test_no_file_is_no_cluster(run: Path) -> None:
    target = Target(run, "press")
    assert cluster_view(target) == {"absent": True, "problem": None}
    assert cluster_alarms(target) == []
    (run / STATUS_FILE).mkdir(parents=True)
    assert cluster_view(target)["absent"] is True


@pytest.mark.parametrize(
    "value", [None, 7, "text", [], {}, [None, 3, "x", [], {"name": {}}], {"a": 1}, float("nan"), True]
)
@pytest.mark.parametrize(
    "name",
    [
        "updated_s",
        "pid",
        "host",
        "address",
        "state",
        "error",
        "config",
        "nodes",
        "roles",
        "shards",
        "counts",
    ],
)
def test_every_field_may_be_anything(run: Path, name: str, value: Any) -> None:
    status = make_status(run, num_workers=4)
    break_one(status)
    status.write()
    change(run, **{name: value})
    target = Target(run, "press")
    json.dumps(cluster_view(target))
    cluster_alarms(target)
    workers(target, node_id(0), "rollout", 0)
    assert isinstance(summary_line(read(run)), str)


def break_one(status: Any) -> None:
    status.roles[-1] = replace(status.roles[-1], state="stuck", stack=STACK, node=None)


@pytest.mark.parametrize("part", ["nodes", "roles", "shards", "counts"])
@pytest.mark.parametrize("value", [None, -1, 1e400, 2**80, "x" * 100, [1], {"a": 1}, False])
def test_every_field_of_an_entry_may_be_anything(run: Path, part: str, value: Any) -> None:
    make_status(run, num_workers=2).write()
    view = json.loads((run / STATUS_FILE).read_text())
    entries = view[part] if isinstance(view[part], list) else [view[part]]
    for name in list(entries[0]):
        was = entries[0][name]
        entries[0][name] = value
        change(run, **{part: view[part]})
        target = Target(run, "press")
        json.dumps(cluster_view(target), allow_nan=False)
        cluster_alarms(target)
        del entries[0][name]  # of another version
        change(run, **{part: view[part]})
        json.dumps(cluster_view(Target(run, "press")), allow_nan=False)
        entries[0][name] = was


def test_a_role_on_a_node_that_is_not_listed_is_shown(run: Path) -> None:
    status = make_status(run, num_workers=3)
    del status.nodes[1]
    status.write()
    view = cluster_view(Target(run, "press"))
    assert [node["id"] for node in view["nodes"]] == [node_id(0), node_id(2), node_id(1)]
    assert view["nodes"][-1]["alive"] is False


def test_a_file_that_is_too_large_is_not_read(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_status(run, num_workers=100).write()
    monkeypatch.setattr(cluster_file, "MAX_BYTES", 1000)
    assert "more than" in str(cluster_view(Target(run, "press"))["problem"])


# ---- in reports


def test_a_report_has_a_line(run: Path) -> None:
    status = make_status(run)
    status.write()
    assert summary_line(read(run)) == "3 nodes: 8 learners, 4 shards, 1,000 rollout workers; 4 restarts"
    status.counts = replace(status.counts, reissued=12, nodes_lost=1)
    status.write()
    assert summary_line(read(run)).endswith("4 restarts, 12 episodes reissued, 1 node lost")
    status.roles, status.nodes, status.counts = [], status.nodes[:1], type(status.counts)()
    status.write()
    assert summary_line(read(run)) == "1 node: no workers; no failures"


def test_rounds_of_time(run: Path) -> None:
    assert [cluster._span(seconds) for seconds in (3, 119, 600, 7300, 400_000)] == [
        "3 s",
        "119 s",
        "10 min",
        "2 h",
        "5 days",
    ]
