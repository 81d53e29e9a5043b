"""Tickets on a real Ray: the rollouts are those of one process, whatever dies meanwhile."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
from tests.unit.cluster.conftest import MEMORY
from tests.unit.training.onpolicy.making import make_config, save_policy

from understudy.cluster.collector import ClusterCollector
from understudy.cluster.config import ClusterConfig, InferenceConfig, RolloutConfig
from understudy.cluster.ray_session import ClusterError, ray_session
from understudy.cluster.roles.inference_worker import InferenceWorker
from understudy.core import UnderstudyError
from understudy.policies import Sampling
from understudy.training.collection.collector import Collector
from understudy.training.collection.rollout import Rollout
from understudy.training.collection.task_start_plan import Plan, PlannedTask, Ticket
from understudy.training.onpolicy.config import OnPolicyConfig
from understudy.training.onpolicy.policy_files import load_policy

pytestmark = pytest.mark.xdist_group("ray")  # they share one Ray

NUM_GROUPS = 8


class Stand:
    """A collector on a cluster, its tickets, and the rollouts of one process for them."""

    def __init__(self, config: OnPolicyConfig, policy: Path, cluster: ClusterConfig):
        with Collector(config.env, num_parallel_envs=2) as local:
            self.policy = load_policy(config, policy, local.step_spec, adapted=True)
            self.policy.version = 3
            tasks = [PlannedTask(name=t.name, starts=tuple(local.suite.starts(t, "train"))) for t in local.tasks]
            plan = Plan(config.plan, tasks)
            plan.next_iteration()
            self.tickets: tuple[Ticket, ...] = plan.wave(NUM_GROUPS)
            self.expected = {one.ticket.number: one for one in local.collect(self.tickets, self.policy, Sampling())}
        self.collector = ClusterCollector(config, cluster, policy, rank=0, num_ranks=1, device="cpu")
        self.collector.publish(3, self.weights)

    def weights(self) -> dict[str, Any]:
        return {name: value.detach().numpy() for name, value in self.policy.model.named_parameters()}

    def wait_for_workers(self) -> None:
        """Wait until all run, and forget what happened before."""
        while any(role.state != "running" for role in self.collector.roles()):
            list(self.stream())
        self.collector.take_events()
        self.collector.counts.clear()

    def stream(self) -> Iterator[Rollout]:
        return self.collector.stream(self.tickets, self.policy, Sampling())

    def check(self, found: list[Rollout]) -> None:
        """Each ticket once, and to the same bits."""
        assert sorted(one.ticket.number for one in found) == sorted(self.expected)
        assert all(one.equals(self.expected[one.ticket.number]) for one in found)

    def pids(self) -> list[int]:
        return [role.pid for role in self.collector.roles() if role.state == "running" and role.pid is not None]


@contextmanager
def standing(folder: Path, address: str, cluster: ClusterConfig, **changes: Any) -> Iterator[Stand]:
    policy = save_policy(folder / "start.safetensors")
    with ray_session(address, cluster):
        stand = Stand(make_config(policy, **changes), policy, cluster)
        try:
            yield stand
        finally:
            stand.collector.close()


@pytest.fixture(scope="module")
def stand(tmp_path_factory: pytest.TempPathFactory, ray_cluster: Any) -> Iterator[Stand]:
    """Two workers that serve several tests: whatever one does to them, the next finds them whole again."""
    cluster = ClusterConfig(rollout=RolloutConfig(num=2, envs=2), heartbeat_timeout_s=8.0)
    with standing(tmp_path_factory.mktemp("stand"), str(ray_cluster.address), cluster) as stand:
        yield stand


def test_it_equals_one_process(stand: Stand) -> None:
    stand.check(list(stand.stream()))
    stand.check(list(stand.stream()))  # workers go on from one stream to the next
    assert {one.version for one in stand.stream()} == {3}


def test_a_worker_that_dies_is_replaced(stand: Stand) -> None:
    stand.wait_for_workers()
    stream = stand.stream()
    found = [next(stream)]
    os.kill(stand.pids()[0], signal.SIGKILL)
    found += stream
    stand.check(found)
    events = stand.collector.take_events()
    assert any(event.what == "worker lost" and "died" in event.text for event in events)
    assert stand.collector.counts["restarts"] >= 1


@pytest.mark.nightly  # test_supervisor.py shows it without Ray
def test_a_late_reply_of_a_replaced_worker_is_ignored(stand: Stand, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a node that cannot be reached: it cannot be killed, and continues when it can be reached again."""
    stand.wait_for_workers()
    stream = stand.stream()
    found = [next(stream)]
    monkeypatch.setattr(ray, "kill", lambda handle: None)
    asleep = stand.pids()[0]
    os.kill(asleep, signal.SIGSTOP)
    before = stand.collector.counts["fenced"]
    try:
        while stand.collector.counts["fenced"] == before:
            found.append(next(stream))
    finally:
        os.kill(asleep, signal.SIGCONT)
    monkeypatch.undo()
    time.sleep(1.0)  # for it to answer
    found += stream
    stand.check(found)
    assert stand.collector.counts["reissued"] > 0
    with suppress(ProcessLookupError):
        os.kill(asleep, signal.SIGKILL)


@pytest.mark.nightly  # test_supervisor.py shows it without Ray
def test_a_worker_that_hangs_is_replaced_and_its_stack_is_shown(stand: Stand, tmp_path: Path) -> None:
    flag = tmp_path / "hung"
    cluster = ClusterConfig(rollout=RolloutConfig(num=1), progress_timeout_s=2.0)
    policy = save_policy(tmp_path / "start.safetensors")
    config = make_config(policy, env=f"tests.unit.cluster.worlds:HangsOnce?flag={flag}")
    collector = ClusterCollector(config, cluster, policy, rank=0, num_ranks=1, device="cpu")
    try:
        collector.publish(3, stand.weights)
        found = list(collector.stream(stand.tickets, stand.policy, Sampling()))
        assert flag.exists()
        assert len(found) == len(stand.tickets)
        events = [event for event in collector.take_events() if event.what == "stuck"]
        assert "made no progress" in events[0].text
        assert events[0].stack is not None
        assert "collector.stream" in events[0].stack
        assert collector.actors[0].restarts >= 1
        assert collector.actors[0].restarts_in_a_row == 0  # it has finished a rollout since
    finally:
        collector.close()


def test_an_error_that_any_worker_would_raise_ends_it(stand: Stand, tmp_path: Path) -> None:
    config = make_config(tmp_path / "start.safetensors", env="tests.nowhere:World")
    with pytest.raises(UnderstudyError, match=r"tests\.nowhere"):
        ClusterCollector(config, ClusterConfig(), tmp_path, rank=0, num_ranks=1, device="cpu")


def test_missing_resources_are_named(stand: Stand, tmp_path: Path) -> None:
    cluster = ClusterConfig(rollout=RolloutConfig(cpus=1000), placement_timeout_s=1.0)
    text = r"no node had the resources for 1 x .*1000.*of 6 CPU are free.*--cluster\.rollout\.num, \.cpus"
    with pytest.raises(ClusterError, match=text):
        ClusterCollector(make_config(tmp_path), cluster, tmp_path, rank=0, num_ranks=1, device="cpu")


@pytest.mark.nightly  # a long fault run
def test_workers_join_and_leave(stand: Stand, tmp_path: Path, ray_cluster: Any) -> None:
    cluster = ClusterConfig(rollout=RolloutConfig(num=2, resources='{"simulator": 1}', cpus=0))
    policy = save_policy(tmp_path / "start.safetensors")
    nodes = [ray_cluster.add_node(num_cpus=0, resources={"simulator": 1}, object_store_memory=MEMORY)]
    collector = ClusterCollector(make_config(policy), cluster, policy, rank=0, num_ranks=1, device="cpu")
    try:
        collector.publish(3, stand.weights)
        stand.check(list(collector.stream(stand.tickets, stand.policy, Sampling())))
        assert sorted(role.state for role in collector.roles()) == ["pending placement", "running"]
        nodes.append(ray_cluster.add_node(num_cpus=0, resources={"simulator": 1}, object_store_memory=MEMORY))
        for _ in range(500):
            stand.check(list(collector.stream(stand.tickets, stand.policy, Sampling())))
            if [role.state for role in collector.roles()] == ["running", "running"]:
                break
        assert [role.state for role in collector.roles()] == ["running", "running"]
        ray_cluster.remove_node(nodes.pop(0), allow_graceful=False)
        for _ in range(500):  # what is left of the node may answer for a while
            stand.check(list(collector.stream(stand.tickets, stand.policy, Sampling())))
            if collector.counts["restarts"]:
                break
        assert collector.counts["restarts"]
    finally:
        collector.close()
        for node in nodes:
            ray_cluster.remove_node(node, allow_graceful=False)


@pytest.mark.nightly  # starts a node
def test_workers_run_on_separate_nodes_in_their_environment(stand: Stand, tmp_path: Path, ray_cluster: Any) -> None:
    head = ray.get_runtime_context().get_node_id()
    node = ray_cluster.add_node(num_cpus=1, object_store_memory=MEMORY)
    policy = save_policy(tmp_path / "start.safetensors")
    rollout = RolloutConfig(num=1, runtime_env='{"env_vars": {"SIDES_NAME": "other sides"}}')
    config = make_config(policy, env="tests.unit.cluster.worlds:Named")
    cluster = ClusterConfig(rollout=rollout, separate_nodes=True)
    try:
        collector = ClusterCollector(config, cluster, policy, rank=0, num_ranks=1, device="cpu", learner_nodes=[head])
        try:
            assert collector.roles()[0].node not in (None, head)
            assert collector.suite.name == "other sides"
        finally:
            collector.close()
    finally:
        ray_cluster.remove_node(node, allow_graceful=False)


@pytest.mark.nightly  # a long run
def test_inference_workers_run_the_policy_for_rollout_workers(stand: Stand, tmp_path: Path) -> None:
    cluster = ClusterConfig(rollout=RolloutConfig(num=1, envs=2), inference=InferenceConfig(num=1))
    policy = save_policy(tmp_path / "start.safetensors")
    collector = ClusterCollector(make_config(policy), cluster, policy, rank=0, num_ranks=1, device="cpu")
    try:
        collector.publish(3, stand.weights)
        stand.check(list(collector.stream(stand.tickets, stand.policy, Sampling())))
        inference = collector.roles()[1]
        assert (inference.role, inference.state) == ("inference", "running")
        assert inference.pid is not None
        os.kill(inference.pid, signal.SIGKILL)
        while not collector.totals()["restarts"]:
            stand.check(list(collector.stream(stand.tickets, stand.policy, Sampling())))
        assert any(
            event.name == "inference-0-0" and "Ray starts it again" in event.text for event in collector.take_events()
        )
    finally:
        collector.close()


def test_inference_takes_so_many_rows_at_once(stand: Stand, tmp_path: Path) -> None:
    policy = save_policy(tmp_path / "start.safetensors")
    spec = stand.collector.step_spec
    worker = InferenceWorker(make_config(policy), policy, spec, device="cpu", threads=1, max_rows=2)
    sizes = count_rows(worker)
    threads = [threading.Thread(target=ask, args=(worker, [ray.put(stand.weights())])) for _ in range(5)]
    with worker._turn:  # until all of them wait
        for thread in threads:
            thread.start()
        while len(worker._waiting) < len(threads):
            time.sleep(0.01)
    for thread in threads:
        thread.join()
    assert sorted(sizes) == [1, 2, 2]


@pytest.mark.parametrize(("wait_ms", "max_rows", "expected"), [(600_000.0, 3, [3]), (1.0, 4, None)])
def test_inference_waits_for_requests_until_the_batch_is_full_or_late(
    wait_ms: float, max_rows: int, expected: list[int] | None, stand: Stand, tmp_path: Path
) -> None:
    start = save_policy(tmp_path / "start.safetensors")
    config = make_config(start, workers={"batch_wait_ms": wait_ms})
    worker = InferenceWorker(config, start, stand.collector.step_spec, device="cpu", threads=1, max_rows=max_rows)
    sizes = count_rows(worker)
    threads = [threading.Thread(target=ask, args=(worker, [ray.put(stand.weights())])) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(sizes) == 3
    assert expected is None or sizes == expected


def test_a_worker_that_waits_for_requests_is_not_stuck(stand: Stand, tmp_path: Path) -> None:
    start = save_policy(tmp_path / "start.safetensors")
    config = make_config(start, workers={"batch_wait_ms": 600_000.0})
    worker = InferenceWorker(config, start, stand.collector.step_spec, device="cpu", threads=1, max_rows=2)
    sizes = count_rows(worker)
    weights = [ray.put(stand.weights())]
    first = threading.Thread(target=ask, args=(worker, weights))
    first.start()
    while not worker._turn.locked():
        time.sleep(0.01)
    time.sleep(0.2)
    assert worker.poll(progress_timeout_s=0.1).busy_s == 0.0
    ask(worker, weights)
    first.join()
    assert sizes == [2]


def count_rows(worker: InferenceWorker) -> list[int]:
    """The number of rows of each forward pass from now on."""
    sizes: list[int] = []
    policy: Any = worker._loaded()._policy
    act = policy.act

    def counted(observation: Any, instructions: Any, **options: Any) -> Any:
        sizes.append(len(instructions))
        return act(observation, instructions, **options)

    policy.act = counted
    return sizes


def ask(worker: InferenceWorker, weights: list[Any]) -> None:
    picture = {"camera": np.zeros((1, 16, 16, 3), np.uint8)}
    worker.act(3, weights, picture, ["go left"], [np.random.default_rng(0)], Sampling())


def test_a_missing_ray_is_named() -> None:
    with (
        pytest.raises(ClusterError, match=r"no Ray at '127\.0\.0\.1:1'.*ray start --head"),
        ray_session("127.0.0.1:1", ClusterConfig()),
    ):
        pass
