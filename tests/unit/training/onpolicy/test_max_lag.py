"""Runs with max_lag 1: the next episodes are run while the policy learns, with the policy from before."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.unit.training.onpolicy.making import digest_of_weights, make_config, save_policy, train

from understudy.processes.stop import Stopped, StopRequest
from understudy.replay import Reader
from understudy.training.onpolicy.onpolicy_run import OnPolicyProgress, OnPolicyRun
from understudy.training.onpolicy.policy_copy import PolicyCopy
from understudy.training.onpolicy.policy_gradient_learner import PolicyGradientLearner
from understudy.training.runs.config import ConfigError
from understudy.training.runs.metrics import read_metrics
from understudy.training.runs.run import Run


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_policy(tmp_path_factory.mktemp("policy") / "policy.safetensors")


def trained(run: OnPolicyRun) -> list[dict[str, Any]]:
    """The metrics of each iteration."""
    return list(read_metrics(run.directory.metrics, "train"))


def lags(run: OnPolicyRun) -> list[float]:
    return [line["lag"] for line in trained(run)]


def test_only_the_first_iteration_has_the_newest_policy(tmp_path: Path, policy: Path) -> None:
    late = train(tmp_path / "late", make_config(policy, iterations=4, max_lag=1))
    again = train(tmp_path / "again", make_config(policy, iterations=4, max_lag=1, workers={"num_parallel_envs": 3}))
    now = train(tmp_path / "now", make_config(policy, iterations=4))
    assert lags(late) == [0, 1, 1, 1]
    assert lags(now) == [0, 0, 0, 0]
    # Ratios begin from the policy that is trained, and importance weights account for the older one that acted.
    assert [line["sampler_kl"] > 1e-9 for line in trained(late)] == [False, True, True, True]
    assert not any("sampler_kl" in line for line in trained(now))
    assert digest_of_weights(late) == digest_of_weights(again) != digest_of_weights(now)
    with Reader(late.directory.store) as reader:
        assert len(list(reader.episodes())) == 4 * 16
        versions = [set(reader.read(record.id).policy_version.tolist()) for record in reader.episodes()]
    assert versions == [{version} for version in (0, 0, 1, 2) for _ in range(16)]


def test_episodes_are_run_while_it_learns(tmp_path: Path, policy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    learning, ran = threading.Event(), threading.Event()
    learn = PolicyGradientLearner.learn

    def slowly(self: PolicyGradientLearner, *args: Any) -> dict[str, float]:
        if self.policy.version == 0:
            learning.set()
            assert ran.wait(60)
        return learn(self, *args)

    class Watched(PolicyCopy):
        def copy_weights(self, version: int, trained: torch.nn.Module) -> None:
            super().copy_weights(version, trained)
            act = self.policy.act

            def watched(*args: Any, **options: Any) -> Any:
                if learning.wait(60):
                    ran.set()
                return act(*args, **options)

            monkeypatch.setattr(self.policy, "act", watched, raising=False)

    monkeypatch.setattr(PolicyGradientLearner, "learn", slowly)
    monkeypatch.setattr("understudy.training.onpolicy.rollout_backend.PolicyCopy", Watched)
    train(tmp_path / "run", make_config(policy, max_lag=1))
    assert ran.is_set()


@pytest.mark.parametrize(
    ("when", "restored"),
    [("after iteration 3", 2), pytest.param("while saving iteration 2", 0, marks=pytest.mark.nightly)],
)
def test_a_run_that_is_broken_off_goes_on_to_the_same_bits(
    when: str, restored: int, tmp_path: Path, policy: Path
) -> None:
    """What was prefetched is in the checkpoint, since nobody has the policy any more that ran it."""
    config = make_config(policy, iterations=4, checkpoint_every=2, max_lag=1, plan={"wave_groups": 5})
    whole = train(tmp_path / "whole", config)
    run = Run.create(tmp_path / "broken", "grpo", config)

    def stop(news: OnPolicyProgress) -> None:
        if news.metrics if news.iteration == 3 else news.iteration == 2 and news.episodes == 3 and restored == 0:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), OnPolicyRun(run, stop) as broken:
        broken.run()
    with OnPolicyRun(Run(run.path)) as resumed:
        assert resumed.iteration == restored
        assert f"{20 if restored else 0} episodes of this iteration" in " ".join(resumed.restored)
        resumed.run()
    assert digest_of_weights(resumed) == digest_of_weights(whole)
    assert lags(resumed) == lags(whole)
    with Reader(run.store) as reader:
        tickets = [record.info.labels["ticket"] for record in reader.episodes("deleted is null")]
    assert len(tickets) == len(set(tickets))


def test_a_stop_request_finishes_the_updates_and_keeps_the_episodes(tmp_path: Path, policy: Path) -> None:
    stop = StopRequest()
    run = Run.create(tmp_path / "run", "grpo", make_config(policy, iterations=4, checkpoint_every=4, max_lag=1))

    def watch(news: OnPolicyProgress) -> None:
        if news.metrics:
            stop.request()

    with OnPolicyRun(run, watch, stop=stop) as stopped, pytest.raises(Stopped):
        stopped.run()
    assert stopped.iteration == 1
    with OnPolicyRun(Run(run.path)) as resumed:
        assert resumed.iteration == 1
        resumed.run()
    assert resumed.iteration == 4
    with Reader(run.store) as reader:
        tickets = [record.info.labels["ticket"] for record in reader.episodes("deleted is null")]
    assert sorted(map(int, tickets)) == list(range(4 * 16))


def test_frozen_weights_are_held_once_and_trained_ones_twice(tmp_path: Path, policy: Path) -> None:
    config = make_config(policy, max_lag=1, lora={"rank": 2, "targets": ()})
    with OnPolicyRun(Run.create(tmp_path / "run", "grpo", config)) as run:
        acting = run.backend._acting.policy.model  # type: ignore[attr-defined]
        trained = dict(run.policy.model.named_parameters())
        for name, value in acting.named_parameters():
            assert (value.data_ptr() == trained[name].data_ptr()) == (not trained[name].requires_grad), name
        run.run()


def test_what_cannot_be_is_refused(tmp_path: Path, policy: Path) -> None:
    with pytest.raises(ConfigError, match="max_lag: expected 0 or 1, got 2"):
        make_config(policy, max_lag=2)
    config = make_config(policy, max_lag=1, engine={"parallel": "fsdp"})
    with pytest.raises(ConfigError, match=r"max_lag: with FSDP each rank holds a shard .*; use engine\.parallel ddp"):
        OnPolicyRun(Run.create(tmp_path / "run", "grpo", config))
