"""RLPD on a real Ray: synchronous, it is the local run, bit for bit, whatever is killed; else a step is stored once."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.system.train_process import ENV, small_config

from understudy.cli import main
from understudy.cluster import launch
from understudy.cluster.config import ClusterConfig, InferenceConfig, LearnerConfig, RolloutConfig, ShardsConfig
from understudy.cluster.launch import run_rlpd
from understudy.cluster.status import EVENTS_FILE, STATUS_FILE
from understudy.core import UnderstudyError
from understudy.replay import Reader, verify
from understudy.training.offpolicy.local_run import LocalRun
from understudy.training.offpolicy.rlpd_learner import RLPDProgress
from understudy.training.runs.config import ConfigError
from understudy.training.runs.metrics import read_metrics
from understudy.training.runs.run import Run, RunError

pytestmark = pytest.mark.xdist_group("ray")  # they share one Ray

CPUS = {"cpus": 0.5}
SYNCHRONOUS = ClusterConfig(rollout=RolloutConfig(**CPUS), learner=LearnerConfig(**CPUS), heartbeat_timeout_s=60.0)
ASYNCHRONOUS = ClusterConfig(
    rollout=RolloutConfig(num=2, **CPUS),
    learner=LearnerConfig(**CPUS),
    shards=ShardsConfig(num=2),
    max_lag=1,
    heartbeat_timeout_s=60.0,
)


@pytest.fixture(autouse=True)
def one_thread() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def demos(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = str(tmp_path_factory.mktemp("demos") / "store")
    assert main(["record", path, "--env", ENV, "--successes", "4"]) == 0
    return path


def metrics(path: Path) -> list[dict[str, Any]]:
    return [
        {k: v for k, v in line.items() if k not in ("updates_per_s", "fingerprint")}
        for line in read_metrics(path / "metrics.jsonl")
    ]


def episodes_of(*stores: Path) -> Counter[tuple[Any, ...]]:
    """All episodes that count, as a multiset of their contents."""
    found: Counter[tuple[Any, ...]] = Counter()
    for store in stores:
        assert verify(store).problems == []
        with Reader(store) as reader:
            for record in reader.catalog.episodes("deleted is null"):
                episode = reader.read(record.id)
                columns = (episode.reward, episode.policy_version, episode.source, episode.action)
                seen = b"".join(column.tobytes() for column in columns)
                found[record.info.actor, record.info.init_state, record.num_steps, record.state, seen] += 1
    return found


def shards(path: Path) -> list[Path]:
    return sorted((path / "shards").iterdir())


def status(path: Path) -> dict[str, Any]:
    return dict(json.loads((path / STATUS_FILE).read_text()))


def events(path: Path, what: str) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (path / EVENTS_FILE).read_text().splitlines()]
    return [line for line in lines if line["what"] == what]


def pid_of(path: Path, name: str) -> int | None:
    """Of a process that is up, by what the run says of it, or its own health."""
    try:
        if name.startswith("shard"):
            health = json.loads((path / "shards" / name / "health" / f"server-{name}.json").read_text())
            return int(health["pid"])
        roles = {role["name"]: role for role in status(path)["roles"]}
        return int(roles[name]["pid"]) if roles[name]["state"] == "running" else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


class Killer:
    """Kills processes of a run one after the other, each when the one before is back and steps were taken since."""

    def __init__(self, path: Path, *names: str):
        self._path = path
        self.killed: list[str] = []
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, args=names)

    def __enter__(self) -> Killer:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _run(self, *names: str) -> None:
        for name in names:
            before = self._step
            if not self._wait(lambda before=before: self._step > before + 30):
                return
            pid = pid_of(self._path, name)
            if pid is None:
                self._wait(lambda name=name: pid_of(self._path, name) is not None)
                pid = pid_of(self._path, name)
            if pid is None:
                return
            os.kill(pid, signal.SIGKILL)
            self.killed.append(name)
            self._wait(lambda name=name, pid=pid: pid_of(self._path, name) not in (None, pid))

    @property
    def _step(self) -> int:
        path = self._path / "metrics.jsonl"
        return max((line["step"] for line in read_metrics(path)), default=0) if path.exists() else 0

    def _wait(self, condition: Callable[[], bool]) -> bool:
        while not condition():
            if self._over.wait(0.05):
                return False
        return True


# ---- synchronous: one actor and the learner take turns


def equal(path: Path, local: Path) -> None:
    assert metrics(path) == metrics(local)
    assert (path / "policy.safetensors").read_bytes() == (local / "policy.safetensors").read_bytes()
    found = episodes_of(*shards(path))
    assert found == episodes_of(local / "store")
    assert set(found.values()) == {1}


@pytest.mark.nightly  # the test below compares one whose processes are killed
def test_a_synchronous_run_equals_the_local_one(tmp_path: Path, demos: str, address: str) -> None:
    with LocalRun(Run.create(tmp_path / "local", "rlpd", small_config(demos))) as here:
        here.run()
    path = tmp_path / "run"
    run_rlpd(Run.create(path, "rlpd", small_config(demos)), SYNCHRONOUS, address=address)
    equal(path, tmp_path / "local")


def test_a_synchronous_run_equals_the_local_one_whatever_is_killed(
    tmp_path: Path, demos: str, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    local, path = tmp_path / "local", tmp_path / "run"
    config = small_config(demos, steps=700, updates_per_step=1, eval_every=400)  # long enough for all kills
    with LocalRun(Run.create(local, "rlpd", config)) as here:
        here.run()
    news: list[RLPDProgress] = []
    messages: list[str] = []
    monkeypatch.setattr(launch, "STATUS_S", 0.1)  # from what this writes, the killer knows whom to kill
    with Killer(path, "actor-0", "learner", "shard-0") as killer:
        run = Run.create(path, "rlpd", config)
        run_rlpd(run, SYNCHRONOUS, address=address, on_update=news.append, on_messages=messages.extend)
    equal(path, local)
    assert killer.killed == ["actor-0", "learner", "shard-0"]
    assert status(path)["counts"]["restarts"] >= 3
    assert {event["name"] for event in events(path, "worker lost")} == {"actor-0", "shard-0"}
    assert len(events(path, "learners restarted")) == 1
    assert "max_lag 0: one actor and the learner take turns, as in one process, and shard-0 keeps" in messages[0]
    assert news[-1].evaluation is not None
    now = status(path)
    assert now["state"] == "ended"
    roles = {role["name"]: role for role in now["roles"]}
    assert roles.keys() == {"shard-0", "learner", "actor-0"}
    assert len({roles[name]["pid"] for name in ("learner", "actor-0")} | {os.getpid()}) == 3
    # Resumed, it ends at once; without the cluster, the error says where its episodes are.
    run_rlpd(Run(path), SYNCHRONOUS, address=address, on_messages=messages.extend)
    assert any("restored checkpoint" in line for line in messages)
    equal(path, local)
    with pytest.raises(
        RunError, match=r"its episodes are on shard-0; resume it with `understudy resume .* --cluster local`"
    ):
        LocalRun(Run(path))


@pytest.mark.nightly  # the test above kills an actor, too
def test_an_episode_whose_actor_died_is_run_again_and_counts_once(tmp_path: Path, demos: str, address: str) -> None:
    env = f"tests.unit.cluster.offpolicy_worlds:DiesOnce?flag={tmp_path / 'died'}"
    config = small_config(
        demos, env=env, steps=200, start_steps=150, cloning_updates=0, eval_every=10_000, updates_per_step=1
    )
    (tmp_path / "died").touch()
    with LocalRun(Run.create(tmp_path / "local", "rlpd", config)) as here:
        here.run()
    (tmp_path / "died").unlink()
    run_rlpd(Run.create(tmp_path / "run", "rlpd", config), SYNCHRONOUS, address=address)
    equal(tmp_path / "run", tmp_path / "local")
    with Reader(shards(tmp_path / "run")[0]) as reader:
        (aside,) = reader.catalog.episodes("deleted is not null")
    assert aside.num_rows >= 50  # what was there of it
    (event,) = events(tmp_path / "run", "worker lost")
    assert event["text"].startswith("actor-0 died (")


# ---- asynchronous: actors run beside the learner


def check_once(path: Path, num_steps: int) -> None:
    """Each step is stored once; only killed processes leave cut episodes behind."""
    found = episodes_of(*shards(path))
    assert set(found.values()) == {1}
    assert sum(key[2] for key in found) >= num_steps
    last = list(read_metrics(path / "metrics.jsonl", "evaluation"))[-1]
    assert last["step"] >= num_steps


@pytest.mark.nightly  # a long fault run
def test_an_asynchronous_run_continues_whatever_is_killed(tmp_path: Path, demos: str, address: str) -> None:
    path = tmp_path / "run"
    config = small_config(
        demos,
        steps=2000,
        eval_every=600,
        checkpoint_every=150,
        publish_every=20,
        max_pending_updates=300,
        cloning_updates=0,
    )
    run = Run.create(path, "rlpd", config)
    messages: list[str] = []
    with Killer(path, "actor-1", "learner", "shard-1", "actor-0") as killer:
        run_rlpd(run, ASYNCHRONOUS, address=address, on_messages=messages.extend)
    assert killer.killed == ["actor-1", "learner", "shard-1", "actor-0"]
    check_once(path, 2000)
    assert list(read_metrics(path / "metrics.jsonl", "evaluation"))[-1]["update"] == config.num_updates
    assert {event["name"] for event in events(path, "worker lost")} == {"actor-0", "actor-1", "shard-1"}
    assert len(events(path, "learners restarted")) == 1
    assert {event["name"] for event in events(path, "worker back")} >= {"actor-1", "learner"}  # the run may end before
    assert any("restored checkpoint" in line for line in messages)  # the learner
    assert not list((path / "spool").rglob("*.safetensors"))  # all that was recorded is on the shards
    by_actor = Counter(key[0] for key in episodes_of(*shards(path)))
    assert by_actor.keys() == {"actor-0", "actor-1"}
    with Reader(shards(path)[0]) as one, Reader(shards(path)[1]) as two:
        records = [record for reader in (one, two) for record in reader.episodes()]
    cut = [record for record in records if record.state != "ended"]
    assert len(cut) <= 2  # only those of the two who were killed
    starts = [(r.info.actor, r.info.seed) for r in records if r.state == "ended"]
    assert len(set(starts)) == len(starts)  # a restarted actor runs other episodes


@pytest.mark.nightly  # test_supervisor.py shows it without Ray
def test_an_actor_that_hangs_is_replaced_and_its_stack_is_shown(tmp_path: Path, demos: str, address: str) -> None:
    path = tmp_path / "run"
    env = f"tests.unit.cluster.offpolicy_worlds:HangsOnce?flag={tmp_path / 'hung'}"
    run = Run.create(
        path, "rlpd", small_config(None, env=env, steps=400, start_steps=50, cloning_updates=0, eval_every=10_000)
    )
    cluster = replace(ASYNCHRONOUS, rollout=RolloutConfig(num=1, **CPUS), progress_timeout_s=15.0)
    run_rlpd(run, cluster, address=address)
    (event, *_) = [event for event in events(path, "stuck") if event["name"] == "actor-0"]
    assert "made no progress for" in event["text"]
    assert "advance" in event["stack"]
    check_once(path, 400)


@pytest.mark.parametrize(
    "placed", [SYNCHRONOUS, pytest.param(ASYNCHRONOUS, marks=pytest.mark.nightly)], ids=["synchronous", "asynchronous"]
)
def test_options_that_do_not_fit_are_refused(placed: ClusterConfig, tmp_path: Path, demos: str, address: str) -> None:
    run = Run.create(tmp_path / "run", "rlpd", small_config(demos))
    for cluster, text in (
        (replace(ASYNCHRONOUS, learner=LearnerConfig(num=2)), "cluster.learner.num: expected 1 for rlpd, got 2"),
        (
            replace(ASYNCHRONOUS, rollout=RolloutConfig(envs=3)),
            "cluster.rollout.envs: expected 1 for rlpd, got 3; an actor has",
        ),
        (replace(ASYNCHRONOUS, inference=InferenceConfig(num=1)), "cluster.inference.num: expected 0 for rlpd, got 1"),
    ):
        with pytest.raises(ConfigError, match=text):
            run_rlpd(run, cluster, address=address)
    wrong = Run.create(tmp_path / "wrong", "rlpd", small_config(demos, env="toy:no_such_task"))
    with pytest.raises(UnderstudyError, match="no_such_task"):
        run_rlpd(wrong, placed, address=address)
    assert status(tmp_path / "wrong")["state"] == "failed"


@pytest.mark.nightly  # a long fault run
def test_actors_join_and_leave_with_their_nodes(tmp_path: Path, demos: str, address: str, ray_cluster: Any) -> None:
    path = tmp_path / "run"
    config = small_config(
        demos,
        steps=100_000,
        eval_every=10**6,
        checkpoint_every=500,
        publish_every=20,
        max_pending_updates=200,
        cloning_updates=0,
    )
    run = Run.create(path, "rlpd", config)
    arms = {"num_cpus": 1, "object_store_memory": 80 * 2**20, "resources": {"arm": 1}}
    nodes = [ray_cluster.add_node(**arms)]
    rollout = RolloutConfig(num=2, resources='{"arm": 1}', **CPUS)
    cluster = replace(
        ASYNCHRONOUS, rollout=rollout, shards=ShardsConfig(num=1), separate_nodes=True, placement_timeout_s=60.0
    )
    seen: list[dict[str, str]] = []

    def states() -> dict[str, str]:
        return {role["name"]: role["state"] for role in status(path)["roles"]} if (path / STATUS_FILE).exists() else {}

    def watch(moment: RLPDProgress) -> None:
        now = states()
        if now and now != (seen[-1] if seen else None):
            seen.append(now)
        first = now.get("actor-0") == "running" or now.get("actor-1") == "running"
        both = now.get("actor-0") == "running" and now.get("actor-1") == "running"
        if len(nodes) == 1 and first:
            nodes.append(ray_cluster.add_node(**arms))
        elif len(nodes) == 2 and both:
            ray_cluster.remove_node(nodes[0])
            nodes.append(None)
        elif len(nodes) == 3 and now.get("actor-0") != now.get("actor-1") and events(path, "node lost"):
            raise KeyboardInterrupt

    try:
        with pytest.raises(KeyboardInterrupt):
            run_rlpd(run, cluster, address=address, on_update=watch)
    finally:
        for node in nodes[1:2] if len(nodes) > 2 else nodes:
            ray_cluster.remove_node(node)
    pairs = [(now.get("actor-0"), now.get("actor-1")) for now in seen]
    assert any(sorted(map(str, pair)) == ["pending placement", "running"] for pair in pairs)
    assert ("running", "running") in pairs
    roles = {role["name"]: role for role in status(path)["roles"]}
    assert {roles["actor-0"]["node"], roles["actor-1"]["node"]}.isdisjoint({roles["learner"]["node"]})
    assert set(episodes_of(*shards(path)).values()) == {1}
