"""What a cluster may be asked for."""

from __future__ import annotations

from pathlib import Path

import pytest

from understudy.cluster.config import ClusterConfig, LearnerConfig, RoleConfig, RolloutConfig
from understudy.cluster.status import Journal, last_place
from understudy.training.runs.config import ConfigError, to_json


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: RolloutConfig(num=0), "num: expected a number from 1, got 0"),
        (lambda: RolloutConfig(envs=0), "envs: expected a number from 1, got 0"),
        (lambda: RoleConfig(cpus=-1), "cpus: expected 0 or more, got -1"),
        (lambda: RoleConfig(resources="simulator"), "resources: expected JSON, got 'simulator'"),
        (lambda: RoleConfig(runtime_env="[]"), "runtime_env: expected a JSON object"),
        (lambda: LearnerConfig(num=1, least=2), r"least: expected at most num \(1\), got 2"),
        (lambda: ClusterConfig(max_lag=2), "max_lag: expected 0 or 1, got 2"),
        (lambda: ClusterConfig(silent_s=0), "silent_s: expected more than 0, got 0"),
        (lambda: ClusterConfig(shard_dir="data"), "shard_dir: expected an absolute path"),
    ],
)
def test_it_refuses(make: object, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        make()  # type: ignore[operator]


def test_shapes_have_rays_names() -> None:
    assert RoleConfig(cpus=2, gpus=0.5, resources='{"simulator": 1}').shape() == {
        "CPU": 2,
        "GPU": 0.5,
        "simulator": 1.0,
    }


def test_a_run_knows_how_it_was_placed(tmp_path: Path) -> None:
    assert last_place(tmp_path) is None
    place = ClusterConfig(rollout=RolloutConfig(num=7), apart=True, max_lag=1)
    Journal(tmp_path, to_json(place), "127.0.0.1:1").write()
    assert last_place(tmp_path) == place
