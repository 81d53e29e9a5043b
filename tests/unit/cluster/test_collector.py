"""Tickets on a real Ray: what comes back is what one process would have lived, whatever dies meanwhile."""

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
from understudy.cluster.ray_session import ClusterError, connected
from understudy.cluster.roles.inference_worker import InferenceWorker
from understudy.core import UnderstudyError
from understudy.policies import Sampling
from understudy.training.collection import Collector, Plan, PlannedTask, Rollout, Ticket
from understudy.training.onpolicy.config import OnPolicyConfig
from understudy.training.onpolicy.policy_files import load_policy

pytestmark = pytest.mark.xdist_group("ray")  # they share one Ray

NUM_GROUPS = 8


class Stand:
    """A collector on a cluster, the tickets that it is to live, and what one process makes of them."""

    def __init__(self, config: OnPolicyConfig, policy: Path, place: ClusterConfig):
        with Collector(config.env, num_parallel_envs=2) as local:
            self.policy = load_policy(config, policy, local.step_spec, adapted=True)
            self.policy.version = 3
            tasks = [PlannedTask(name=t.name, starts=tuple(local.suite.starts(t, "train"))) for t in local.tasks]
            plan = Plan(config.plan, tasks)
            plan.next_iteration()
            self.tickets: tuple[Ticket, ...] = plan.wave(NUM_GROUPS)
            self.expected = {one.ticket.number: one for one in local.collect(self.tickets, self.policy, Sampling())}
        self.collector = ClusterCollector(config, place, policy, rank=0, num_ranks=1, device="cpu")
        self.collector.publish(3, self.weights)

    def weights(self) -> dict[str, Any]:
        return {name: value.detach().numpy() for name, value in self.policy.model.named_parameters()}

    def wait_for_workers(self) -> None:
        """All are up, and what happened before is forgotten."""
        while any(role.state != "up" for role in self.collector.roles()):
            list(self.stream())
        self.collector.take_events()
        self.collector.num_restarts = 0

    def stream(self) -> Iterator[Rollout]:
        return self.collector.stream(self.tickets, self.policy, Sampling())

    def check(self, found: list[Rollout]) -> None:
        """Each ticket once, and to the same bits."""
        assert sorted(one.ticket.number for one in found) == sorted(self.expected)
        assert all(one.equals(self.expected[one.ticket.number]) for one in found)

    def pids(self) -> list[int]:
        return [role.pid for role in self.collector.roles() if role.state == "up" and role.pid is not None]


@contextmanager
def standing(folder: Path, address: str, place: ClusterConfig, **changes: Any) -> Iterator[Stand]:
    policy = save_policy(folder / "start.safetensors")
    with connected(address, place):
        stand = Stand(make_config(policy, **changes), policy, place)
        try:
            yield stand
        finally:
            stand.collector.close()


@pytest.fixture(scope="module")
def stand(tmp_path_factory: pytest.TempPathFactory, ray_cluster: Any) -> Iterator[Stand]:
    """Two workers that serve several tests: whatever one does to them, the next finds them whole again."""
    place = ClusterConfig(rollout=RolloutConfig(num=2, envs=2), silent_s=8.0)
    with standing(tmp_path_factory.mktemp("stand"), str(ray_cluster.address), place) as stand:
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
    assert stand.collector.num_restarts >= 1


def test_who_is_thought_dead_and_still_answers_is_not_heard(stand: Stand, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a node that cannot be reached: it cannot be killed, and goes on when it can be reached again."""
    stand.wait_for_workers()
    stream = stand.stream()
    found = [next(stream)]
    monkeypatch.setattr(ray, "kill", lambda handle: None)
    asleep = stand.pids()[0]
    os.kill(asleep, signal.SIGSTOP)
    before = stand.collector.num_fenced
    try:
        while stand.collector.num_fenced == before:
            found.append(next(stream))
    finally:
        os.kill(asleep, signal.SIGCONT)
    monkeypatch.undo()
    time.sleep(1.0)  # for it to answer
    found += stream
    stand.check(found)
    assert stand.collector.num_reissued > 0
    with suppress(ProcessLookupError):
        os.kill(asleep, signal.SIGKILL)


def test_where_a_worker_hangs_is_shown(stand: Stand, tmp_path: Path) -> None:
    flag = tmp_path / "hung"
    place = ClusterConfig(rollout=RolloutConfig(num=1), stuck_s=2.0)
    policy = save_policy(tmp_path / "start.safetensors")
    config = make_config(policy, env=f"tests.unit.cluster.worlds:HangsOnce?flag={flag}")
    collector = ClusterCollector(config, place, policy, rank=0, num_ranks=1, device="cpu")
    try:
        collector.publish(3, stand.weights)
        found = list(collector.stream(stand.tickets, stand.policy, Sampling()))
        assert flag.exists()
        assert len(found) == len(stand.tickets)
        events = [event for event in collector.take_events() if event.what == "stuck"]
        assert "got nothing done" in events[0].text
        assert events[0].stack is not None
        assert "collector.stream" in events[0].stack
    finally:
        collector.close()


def test_what_would_fail_anywhere_ends_it(stand: Stand, tmp_path: Path) -> None:
    config = make_config(tmp_path / "start.safetensors", env="tests.nowhere:World")
    with pytest.raises(UnderstudyError, match=r"tests\.nowhere"):
        ClusterCollector(config, ClusterConfig(), tmp_path, rank=0, num_ranks=1, device="cpu")


def test_no_room_is_said(stand: Stand, tmp_path: Path) -> None:
    place = ClusterConfig(rollout=RolloutConfig(cpus=1000), room_s=1.0)
    text = r"no node had room for .*1000.*of 6 CPU are free.*--place\.rollout\.cpus"
    with pytest.raises(ClusterError, match=text):
        ClusterCollector(make_config(tmp_path), place, tmp_path, rank=0, num_ranks=1, device="cpu")


def test_workers_join_and_leave(stand: Stand, tmp_path: Path, ray_cluster: Any) -> None:
    place = ClusterConfig(rollout=RolloutConfig(num=2, resources='{"simulator": 1}', cpus=0))
    policy = save_policy(tmp_path / "start.safetensors")
    nodes = [ray_cluster.add_node(num_cpus=0, resources={"simulator": 1}, object_store_memory=MEMORY)]
    collector = ClusterCollector(make_config(policy), place, policy, rank=0, num_ranks=1, device="cpu")
    try:
        collector.publish(3, stand.weights)
        stand.check(list(collector.stream(stand.tickets, stand.policy, Sampling())))
        assert sorted(role.state for role in collector.roles()) == ["up", "waiting for room"]
        nodes.append(ray_cluster.add_node(num_cpus=0, resources={"simulator": 1}, object_store_memory=MEMORY))
        for _ in range(500):
            stand.check(list(collector.stream(stand.tickets, stand.policy, Sampling())))
            if [role.state for role in collector.roles()] == ["up", "up"]:
                break
        assert [role.state for role in collector.roles()] == ["up", "up"]
        ray_cluster.remove_node(nodes.pop(0), allow_graceful=False)
        for _ in range(500):  # what is left of the node may answer for a while
            stand.check(list(collector.stream(stand.tickets, stand.policy, Sampling())))
            if collector.num_restarts:
                break
        assert collector.num_restarts
    finally:
        collector.close()
        for node in nodes:
            ray_cluster.remove_node(node, allow_graceful=False)


def test_roles_stand_where_they_are_put(stand: Stand, tmp_path: Path, ray_cluster: Any) -> None:
    """Apart from the learner, in an environment of their own."""
    head = ray.get_runtime_context().get_node_id()
    node = ray_cluster.add_node(num_cpus=1, object_store_memory=MEMORY)
    policy = save_policy(tmp_path / "start.safetensors")
    rollout = RolloutConfig(num=1, runtime_env='{"env_vars": {"SIDES_NAME": "other sides"}}')
    config = make_config(policy, env="tests.unit.cluster.worlds:Named")
    place = ClusterConfig(rollout=rollout, apart=True)
    try:
        collector = ClusterCollector(config, place, policy, rank=0, num_ranks=1, device="cpu", learner_nodes=[head])
        try:
            assert collector.roles()[0].node not in (None, head)
            assert collector.suite.name == "other sides"
        finally:
            collector.close()
    finally:
        ray_cluster.remove_node(node, allow_graceful=False)


def test_inference_workers_decide_for_those_without_a_policy(stand: Stand, tmp_path: Path) -> None:
    place = ClusterConfig(rollout=RolloutConfig(num=1, envs=2), inference=InferenceConfig(num=1))
    policy = save_policy(tmp_path / "start.safetensors")
    collector = ClusterCollector(make_config(policy), place, policy, rank=0, num_ranks=1, device="cpu")
    try:
        collector.publish(3, stand.weights)
        stand.check(list(collector.stream(stand.tickets, stand.policy, Sampling())))
        assert [role.role for role in collector.roles()] == ["rollout", "inference"]
    finally:
        collector.close()


def test_inference_takes_so_many_rows_at_once(stand: Stand, tmp_path: Path) -> None:
    policy = save_policy(tmp_path / "start.safetensors")
    spec = stand.collector.step_spec
    worker = InferenceWorker(make_config(policy), policy, spec, device="cpu", threads=1, max_rows=2)
    sizes: list[int] = []
    act = worker._copy._policy.act

    def counted(observation: Any, instructions: Any, **options: Any) -> Any:
        sizes.append(len(instructions))
        return act(observation, instructions, **options)

    worker._copy._policy.act = counted
    weights = [ray.put(stand.weights())]
    picture = {"camera": np.zeros((1, 16, 16, 3), np.uint8)}

    def ask() -> None:
        worker.act(3, weights, picture, ["go left"], [np.random.default_rng(0)], Sampling())

    threads = [threading.Thread(target=ask) for _ in range(5)]
    with worker._turn:  # until all of them wait
        for thread in threads:
            thread.start()
        while len(worker._waiting) < len(threads):
            time.sleep(0.01)
    for thread in threads:
        thread.join()
    assert sorted(sizes) == [1, 2, 2]


def test_no_ray_is_said() -> None:
    with (
        pytest.raises(ClusterError, match=r"no Ray at '127\.0\.0\.1:1'.*ray start --head"),
        connected("127.0.0.1:1", ClusterConfig()),
    ):
        pass
