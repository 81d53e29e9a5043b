"""A run of GRPO on a real Ray: synchronous it is the local run, bit for bit; ahead it is one version behind."""

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
from understudy.cluster.launch import TOKEN, run_on_policy
from understudy.cluster.ray_session import ClusterError
from understudy.cluster.status import EVENTS, NOW
from understudy.core import UnderstudyError
from understudy.replay import Reader
from understudy.training.onpolicy.onpolicy_run import OnPolicyRun, OnPolicyProgress
from understudy.training.runs.run import Run, RunError

pytestmark = pytest.mark.xdist_group("ray")  # they share one Ray

TWO = ClusterConfig(rollout=RolloutConfig(num=2), shards=ShardsConfig(num=2))
MANY = 60  # iterations, so that a run is not over before it is looked at
NOT_COMPARED = ("time", "_s", "fingerprint", "bytes_moved")


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


def lived(*stores: Path) -> Counter[tuple[Any, ...]]:
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
        for role in json.loads((path / NOW).read_text())["roles"]:
            if role["role"] == "learner" and role["pid"] is not None:
                os.kill(role["pid"], signal.SIGKILL)
                return True
    return False


def test_it_equals_the_local_run(tmp_path: Path, address: str) -> None:
    config = make_config(save_policy(tmp_path / "start.safetensors"))
    with OnPolicyRun(Run.create(tmp_path / "here", "grpo", config)) as here:
        here.run()
    news: list[OnPolicyProgress] = []
    run_on_policy(Run.create(tmp_path / "there", "grpo", config), TWO, address=address, watch=news.append)
    assert metrics(tmp_path / "there") == metrics(tmp_path / "here")
    assert all(line["lag"] == 0 for line in metrics(tmp_path / "there") if line["kind"] == "train")
    weights = [(tmp_path / name / "policy.safetensors").read_bytes() for name in ("here", "there")]
    assert weights[0] == weights[1]
    found = lived(*shards(tmp_path / "there"))
    assert found == lived(tmp_path / "here" / "store")
    assert set(found.values()) == {1}
    assert all(lived(shard) for shard in shards(tmp_path / "there"))  # both have some
    assert [one.iteration for one in news if one.metrics] == [1, 2]
    assert stat.S_IMODE((tmp_path / "there" / TOKEN).stat().st_mode) == 0o600
    said = json.loads((tmp_path / "there" / NOW).read_text())
    assert said["state"] == "ended"
    assert {role["role"] for role in said["roles"]} == {"learner", "rollout", "shard"}
    with pytest.raises(RunError, match=r"keeps its episodes in shard-0, shard-1; go on with it with --cluster"):
        OnPolicyRun(Run(tmp_path / "there"))
    with pytest.raises(RunError, match=r"in rank-0, and not in shard-0, shard-1; go on with it without --cluster"):
        run_on_policy(Run(tmp_path / "here"), TWO, address=address)


def test_a_wave_ahead_is_one_version_behind(tmp_path: Path, address: str) -> None:
    place = ClusterConfig(max_lag=1)
    config = make_config(save_policy(tmp_path / "start.safetensors"), iterations=4, checkpoint_every=4)
    run_on_policy(Run.create(tmp_path / "run", "grpo", config), place, address=address)
    train = [line for line in metrics(tmp_path / "run") if line["kind"] == "train"]
    assert [line["lag"] for line in train] == [0, 1, 1, 1]
    found = lived(*shards(tmp_path / "run"))
    assert len(found) == 4 * 16
    assert set(found.values()) == {1}


def test_a_learner_that_dies_begins_again(tmp_path: Path, address: str) -> None:
    config = make_config(save_policy(tmp_path / "start.safetensors"), iterations=MANY)
    with OnPolicyRun(Run.create(tmp_path / "here", "grpo", config)) as here:
        here.run()
    path = tmp_path / "there"
    killed = threading.Event()

    def kill(news: OnPolicyProgress) -> None:
        if news.iteration >= 2 and not killed.is_set() and kill_learner(path):
            killed.set()

    told: list[str] = []
    run_on_policy(Run.create(path, "grpo", config), ClusterConfig(), address=address, watch=kill, told=told.extend)
    assert killed.is_set()
    assert any("restored checkpoint" in line for line in told)
    assert metrics(path) == metrics(tmp_path / "here")
    assert lived(*shards(path)) == lived(tmp_path / "here" / "store")
    events = [json.loads(line)["what"] for line in (path / EVENTS).read_text().splitlines()]
    assert "learners restarted" in events


def test_learners_that_keep_failing_end_the_run(tmp_path: Path, address: str) -> None:
    config = make_config(save_policy(tmp_path / "start.safetensors"), iterations=MANY)
    path = tmp_path / "run"

    def kill(news: OnPolicyProgress) -> None:
        kill_learner(path)

    with pytest.raises(ClusterError, match="learners: failed 1 times without an iteration between"):
        run_on_policy(Run.create(path, "grpo", config), ClusterConfig(max_restarts=0), address=address, watch=kill)


def test_fewer_learners_if_there_is_no_room(tmp_path: Path, address: str) -> None:
    config = make_config(save_policy(tmp_path / "start.safetensors"), iterations=1, engine={"parallel": "ddp"})
    place = ClusterConfig(learner=LearnerConfig(num=2, least=1, cpus=4), room_s=10)
    run_on_policy(Run.create(tmp_path / "run", "grpo", config), place, address=address)
    roles = json.loads((tmp_path / "run" / NOW).read_text())["roles"]
    assert [role["name"] for role in roles if role["role"] == "learner"] == ["rank-0"]


def test_no_room_for_learners_is_said(tmp_path: Path, address: str) -> None:
    config = make_config(save_policy(tmp_path / "start.safetensors"))
    place = ClusterConfig(learner=LearnerConfig(cpus=100), room_s=5)
    with pytest.raises(ClusterError, match=r"learner: no room for 1 x .*100.*--place\.learner\.num"):
        run_on_policy(Run.create(tmp_path / "run", "grpo", config), place, address=address)
    assert json.loads((tmp_path / "run" / NOW).read_text())["state"] == "failed"


def test_what_a_learner_refuses_ends_the_run(tmp_path: Path, address: str) -> None:
    config = make_config(tmp_path / "nowhere.safetensors")
    with pytest.raises(UnderstudyError, match=r"policy: expected a policy file"):
        run_on_policy(Run.create(tmp_path / "run", "grpo", config), TWO, address=address)
