"""A run of GRPO on a real Ray: a synchronous one is the local run, bit for bit; one ahead is one version behind."""

from __future__ import annotations

import json
import os
import signal
import stat
import threading
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.unit.training.onpolicy.making import make_config, save_policy

from understudy.cluster.config import ClusterConfig, LearnerConfig, RolloutConfig, ShardsConfig
from understudy.cluster.launch import TOKEN_FILE, run_on_policy
from understudy.cluster.ray_session import ClusterError
from understudy.cluster.status import EVENTS_FILE, STATUS_FILE
from understudy.core import UnderstudyError
from understudy.replay import Reader
from understudy.training.onpolicy.onpolicy_run import OnPolicyProgress, OnPolicyRun
from understudy.training.runs.run import Run, RunError

pytestmark = pytest.mark.xdist_group("ray")  # they share one Ray

TWO = ClusterConfig(rollout=RolloutConfig(num=2), shards=ShardsConfig(num=2))
MANY = 6  # iterations, so that a run has not ended before a learner is killed
NOT_COMPARED = ("busy", "time", "_s", "fingerprint", "bytes_moved")


@pytest.fixture(autouse=True)
def one_thread() -> Any:
    """As Ray gives to an actor of one CPU: sums in another order would be other bits."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def metrics(path: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if not any(part in k for part in NOT_COMPARED)} for line in lines]


def episodes_of(*stores: Path) -> Counter[tuple[Any, ...]]:
    """All episodes of some stores, as a multiset."""
    found: Counter[tuple[Any, ...]] = Counter()
    for store in stores:
        with Reader(store) as reader:
            for record in reader.catalog.episodes("deleted is null"):
                episode = reader.read(record.id)
                rows = b"".join(column.tobytes() for column in (episode.reward, episode.policy_version))
                action = b"".join(leaf.tobytes() for leaf in (episode.action, episode.extras["log_prob"]))
                found[record.info.labels["ticket"], record.info.seed, record.num_steps, rows, action] += 1
    return found


def shards(path: Path) -> list[Path]:
    return sorted((path / "shards").iterdir())


def kill_learner(path: Path) -> bool:
    """Whether there was one."""
    with suppress(FileNotFoundError, ProcessLookupError):
        for role in json.loads((path / STATUS_FILE).read_text())["roles"]:
            if role["role"] == "learner" and role["pid"] is not None:
                os.kill(role["pid"], signal.SIGKILL)
                return True
    return False


@pytest.mark.nightly  # test_commands.py trains on a cluster in every run, and test_offpolicy.py kills its learner
@pytest.mark.parametrize("kill", [True, False])
def test_it_equals_the_local_run_also_if_the_learner_is_killed(kill: bool, tmp_path: Path, address: str) -> None:
    config = make_config(save_policy(tmp_path / "start.safetensors"), iterations=MANY)
    with OnPolicyRun(Run.create(tmp_path / "here", "grpo", config)) as here:
        here.run()
    news: list[OnPolicyProgress] = []
    messages: list[str] = []
    killed = threading.Event()

    def watch(moment: OnPolicyProgress) -> None:
        news.append(moment)
        if kill and moment.iteration >= 2 and not killed.is_set() and kill_learner(tmp_path / "there"):
            killed.set()

    run = Run.create(tmp_path / "there", "grpo", config)
    run_on_policy(run, TWO, address=address, on_update=watch, on_messages=messages.extend)
    assert killed.is_set() == kill
    assert any("restored checkpoint" in line for line in messages) == kill
    events = [json.loads(line)["what"] for line in (tmp_path / "there" / EVENTS_FILE).read_text().splitlines()]
    assert ("learners restarted" in events) == kill
    assert metrics(tmp_path / "there") == metrics(tmp_path / "here")
    assert all(line["lag"] == 0 for line in metrics(tmp_path / "there") if line["kind"] == "train")
    weights = [(tmp_path / name / "policy.safetensors").read_bytes() for name in ("here", "there")]
    assert weights[0] == weights[1]
    found = episodes_of(*shards(tmp_path / "there"))
    assert found == episodes_of(tmp_path / "here" / "store")
    assert set(found.values()) == {1}
    assert all(episodes_of(shard) for shard in shards(tmp_path / "there"))  # both have some
    assert sorted({one.iteration for one in news if one.metrics}) == list(range(1, MANY + 1))
    assert stat.S_IMODE((tmp_path / "there" / TOKEN_FILE).stat().st_mode) == 0o600
    status = json.loads((tmp_path / "there" / STATUS_FILE).read_text())
    assert status["state"] == "ended"
    assert {role["role"] for role in status["roles"]} == {"learner", "rollout", "shard"}
    with pytest.raises(RunError, match=r"stores its episodes in shard-0, shard-1; resume it with --cluster"):
        OnPolicyRun(Run(tmp_path / "there"))
    with pytest.raises(RunError, match=r"in rank-0, and not in shard-0, shard-1; resume it without --cluster"):
        run_on_policy(Run(tmp_path / "here"), TWO, address=address)


@pytest.mark.nightly
@pytest.mark.parametrize("asked_of", ["cluster", "run"])
def test_a_prefetched_wave_is_one_version_behind(asked_of: str, tmp_path: Path, address: str) -> None:
    cluster = ClusterConfig(max_lag=int(asked_of == "cluster"))
    start = save_policy(tmp_path / "start.safetensors")
    config = make_config(start, iterations=4, checkpoint_every=4, max_lag=int(asked_of == "run"))
    run_on_policy(Run.create(tmp_path / "run", "grpo", config), cluster, address=address)
    train = [line for line in metrics(tmp_path / "run") if line["kind"] == "train"]
    assert [line["lag"] for line in train] == [0, 1, 1, 1]
    found = episodes_of(*shards(tmp_path / "run"))
    assert len(found) == 4 * 16
    assert set(found.values()) == {1}


@pytest.mark.nightly  # test_supervisor.py counts restarts without Ray
def test_learners_that_keep_failing_end_the_run(tmp_path: Path, address: str) -> None:
    config = make_config(save_policy(tmp_path / "start.safetensors"), iterations=MANY)
    path = tmp_path / "run"

    def kill(news: OnPolicyProgress) -> None:
        kill_learner(path)

    with pytest.raises(ClusterError, match="learners: was lost 1 times in a row without progress"):
        run_on_policy(Run.create(path, "grpo", config), ClusterConfig(max_restarts=0), address=address, on_update=kill)


@pytest.mark.nightly  # test_supervisor.py shows it without Ray
def test_fewer_learners_if_resources_are_missing(tmp_path: Path, address: str) -> None:
    config = make_config(save_policy(tmp_path / "start.safetensors"), iterations=1, engine={"parallel": "ddp"})
    cluster = ClusterConfig(learner=LearnerConfig(num=2, min_num=1, cpus=4), placement_timeout_s=20)
    run_on_policy(Run.create(tmp_path / "run", "grpo", config), cluster, address=address)
    roles = json.loads((tmp_path / "run" / STATUS_FILE).read_text())["roles"]
    assert [role["name"] for role in roles if role["role"] == "learner"] == ["rank-0"]


@pytest.mark.nightly  # test_supervisor.py shows it without Ray
def test_missing_resources_of_learners_are_named(tmp_path: Path, address: str) -> None:
    config = make_config(save_policy(tmp_path / "start.safetensors"))
    cluster = ClusterConfig(learner=LearnerConfig(cpus=100), placement_timeout_s=20)
    with pytest.raises(
        ClusterError, match=r"learner: no node had the resources for 1 x .*100.*--cluster\.learner\.num"
    ):
        run_on_policy(Run.create(tmp_path / "run", "grpo", config), cluster, address=address)
    assert json.loads((tmp_path / "run" / STATUS_FILE).read_text())["state"] == "failed"


def test_an_error_that_a_learner_would_raise_again_ends_the_run(tmp_path: Path, address: str) -> None:
    config = make_config(tmp_path / "nowhere.safetensors")
    with pytest.raises(UnderstudyError, match=r"policy: expected a policy file"):
        run_on_policy(Run.create(tmp_path / "run", "grpo", config), TWO, address=address)


@pytest.mark.nightly  # test_publish.py shows it without Ray
def test_two_learners_act_with_the_weights_that_the_first_has_put(tmp_path: Path, address: str) -> None:
    config = make_config(save_policy(tmp_path / "start.safetensors"), iterations=2, engine={"parallel": "ddp"})
    run = Run.create(tmp_path / "run", "grpo", config)
    run_on_policy(run, ClusterConfig(learner=LearnerConfig(num=2)), address=address)
    trained = [line for line in metrics(run.path) if line["kind"] == "train"]
    assert [line["lag"] for line in trained] == [0.0, 0.0]
    assert all(abs(line["ratio"] - 1) < 0.1 for line in trained)
    versions = {int(version) for path in shards(run.path) for version in versions_of(path)}
    assert versions == {0, 1}


def versions_of(store: Path) -> list[int]:
    """The versions of the policy that chose actions in a store."""
    with Reader(store) as reader:
        return [
            int(version)
            for record in reader.catalog.episodes("deleted is null")
            for version in reader.read(record.id).policy_version
            if version >= 0
        ]
