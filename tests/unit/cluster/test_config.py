"""Options of a cluster: what they accept, and that a run remembers them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from understudy.cluster.config import ClusterConfig, InferenceConfig, LearnerConfig, RoleConfig, RolloutConfig
from understudy.cluster.status import StatusWriter, last_cluster_config
from understudy.training.runs.config import ConfigError


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: RolloutConfig(num=0), "num: expected a number from 1, got 0"),
        (lambda: RolloutConfig(envs=0), "envs: expected a number from 1, got 0"),
        (lambda: RoleConfig(cpus=-1), "cpus: expected 0 or more, got -1"),
        (lambda: RoleConfig(resources="simulator"), "resources: expected JSON, got 'simulator'"),
        (lambda: RoleConfig(runtime_env="[]"), "runtime_env: expected a JSON object"),
        (lambda: LearnerConfig(num=1, min_num=2), r"min_num: expected at most num \(1\), got 2"),
        (lambda: ClusterConfig(max_lag=2), "max_lag: expected 0 or 1, got 2"),
        (lambda: ClusterConfig(heartbeat_timeout_s=0), "heartbeat_timeout_s: expected more than 0, got 0"),
        (lambda: ClusterConfig(shard_dir="data"), "shard_dir: expected an absolute path"),
    ],
)
def test_it_refuses(make: object, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        make()  # type: ignore[operator]


def test_resources_have_rays_names() -> None:
    assert RoleConfig(cpus=2, gpus=0.5, resources='{"simulator": 1}').ray_resources() == {
        "CPU": 2,
        "GPU": 0.5,
        "simulator": 1.0,
    }


def test_inference_waits_for_no_more_observations_than_there_are_simulators() -> None:
    rollout = RolloutConfig(num=3, envs=2)
    for max_rows, expected in ((64, 6), (4, 4)):
        assert ClusterConfig(rollout=rollout, inference=InferenceConfig(max_rows=max_rows)).inference_rows() == expected


def test_a_run_remembers_its_cluster_config(tmp_path: Path) -> None:
    assert last_cluster_config(tmp_path) is None
    config = ClusterConfig(rollout=RolloutConfig(num=7), separate_nodes=True, max_lag=1)
    StatusWriter(tmp_path, config, "127.0.0.1:1").write()
    assert last_cluster_config(tmp_path) == config


def test_options_and_status_load_neither_ray_nor_torch() -> None:
    code = "import sys, understudy.cluster.status; sys.exit(len({'ray', 'torch'} & sys.modules.keys()))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
