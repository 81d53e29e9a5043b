"""On-policy runs in one process: they learn, they come to the same bits again, and every option changes something."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tests.sides import SidesWorld
from tests.unit.policies.openvla.make_checkpoint import KEY, make_checkpoint
from tests.unit.training.onpolicy.making import digest_of_weights, make_config, save_policy, train

from understudy.cli import main
from understudy.core import UnderstudyError
from understudy.core import tree as trees
from understudy.policies import Sampling
from understudy.policies.openvla import OpenVLAPolicy
from understudy.policies.vla import VLAPolicy
from understudy.replay import Reader
from understudy.training.onpolicy.onpolicy_run import OnPolicyProgress, OnPolicyRun
from understudy.training.runs.fingerprint import digest_of_arrays
from understudy.training.runs.metrics import read_metrics
from understudy.training.runs.run import Run

TIMES = {"collect_s", "learn_s", "cpu_s", "save_s", "save_wait_s", "steps_per_s", "busy"}


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_policy(tmp_path_factory.mktemp("policy") / "policy.safetensors")


def lines(run: OnPolicyRun, kind: str | None = None) -> list[dict[str, Any]]:
    """Of the metrics, without what a clock says."""
    found = read_metrics(run.directory.metrics, kind)
    return [{name: value for name, value in line.items() if name not in TIMES} for line in found]


@pytest.mark.parametrize("max_lag", [0, 1])
@pytest.mark.nightly  # a learning run
def test_it_learns_to_do_what_it_is_told(max_lag: int, tmp_path: Path, policy: Path) -> None:
    """From success alone: a policy that knows nothing comes to use the instruction."""
    config = make_config(
        policy,
        iterations=12,
        max_lag=max_lag,
        plan={"n_samples": 8, "data_batch_size": 64},
        engine={"learning_rate": 3e-3},
        algorithm={"ppo_mini_batch_size": 64, "ppo_micro_batch_size": 64},
        evaluation={"episodes": 64},
    )
    run = train(tmp_path / "run", config)
    first, *_, last = lines(run, "evaluation")
    assert first["success"] < 0.6
    assert last["low"] > first["high"]
    assert min(task["success"] for task in last["tasks"].values()) > 0.8  # either side


def test_the_same_run_comes_to_the_same_bits_with_other_workers(tmp_path: Path, policy: Path) -> None:
    config = make_config(policy)
    one = train(tmp_path / "one", config)
    two = train(tmp_path / "two", make_config(policy, workers={"num_parallel_envs": 3}))
    assert digest_of_weights(one) == digest_of_weights(two)
    assert lines(one) != []
    skip = {"fingerprint"}
    assert [{k: v for k, v in line.items() if k not in skip} for line in lines(one)] == [
        {k: v for k, v in line.items() if k not in skip} for line in lines(two)
    ]


@pytest.mark.parametrize(
    ("kind", "algorithm"),
    [
        ("gae", {}),  # with a critic
        pytest.param("grpo", {}, marks=pytest.mark.nightly),
        pytest.param("rloo", {"kl_in": "loss", "kl_controller": "adaptive"}, marks=pytest.mark.nightly),
    ],
)
def test_a_run_that_is_broken_off_goes_on_to_the_same_bits(
    kind: str, algorithm: dict[str, Any], tmp_path: Path, policy: Path
) -> None:
    """In the middle of its third iteration, with groups carried over from the second."""
    config = make_config(
        policy,
        iterations=4,
        checkpoint_every=2,
        plan={"wave_groups": 5},
        filters={"max_age": 3},
        algorithm={"adv_estimator": kind, **algorithm},
    )
    whole = train(tmp_path / "whole", config)
    run = Run.create(tmp_path / "broken", "grpo", config)

    def stop(news: OnPolicyProgress) -> None:
        if news.iteration == 2 and news.episodes == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), OnPolicyRun(run, stop) as broken:
        broken.run()
    with OnPolicyRun(Run(run.path)) as resumed:
        assert resumed.iteration == 2
        assert "2 groups carried over" in " ".join(resumed.restored)
        resumed.run()
    assert digest_of_weights(resumed) == digest_of_weights(whole)
    drop = {"fingerprint"}
    assert [{k: v for k, v in line.items() if k not in drop} for line in lines(resumed)] == [
        {k: v for k, v in line.items() if k not in drop} for line in lines(whole)
    ]


def test_a_finished_run_is_trained_for_longer_to_the_bits_of_a_longer_run(
    tmp_path: Path, policy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    short = train(tmp_path / "short", make_config(policy, iterations=1))
    long = train(tmp_path / "long", make_config(policy))
    path = str(short.directory.path)
    assert main(["resume", path]) == 0
    said = "the run is finished: 1 iterations, asked for 1; `understudy resume"
    assert said in capsys.readouterr().out.replace("\n", " ")
    assert main(["resume", path, "--iterations", "2"]) == 0
    assert short.directory.policy.read_bytes() == long.directory.policy.read_bytes()
    assert main(["resume", path, "--steps", "2"]) == 1
    assert "a run of grpo is not lengthened by --steps; use --iterations" in capsys.readouterr().err


def test_all_that_was_lived_is_in_the_store(tmp_path: Path, policy: Path) -> None:
    run = train(tmp_path / "run", make_config(policy, plan={"wave_groups": 5}))
    told = lines(run, "episode")
    with Reader(run.directory.store) as reader:
        records = list(reader.episodes())
        episode = reader.read(records[0].id)
    assert [int(record.info.labels["ticket"]) for record in records] == [line["episode"] for line in told]
    assert [record.info.success for record in records] == [line["success"] for line in told]
    assert {record.info.group for record in records} == {str(line["group"]) for line in told}
    assert episode.extras["replay"]["tokens"].shape[1:] == (3, 1)
    assert episode.policy_version.tolist() == [0] * len(episode)


@pytest.mark.parametrize(
    ("max_steps", "bounds", "reason"),
    [(1, (0.99, 1.0), "8 too hard"), pytest.param(100, (0.0, 0.01), "8 too easy", marks=pytest.mark.nightly)],
)
def test_a_policy_that_teaches_nothing_ends_the_run_with_what_to_do(
    max_steps: int, bounds: tuple[float, float], reason: str, tmp_path: Path, policy: Path
) -> None:
    """Hardly anybody gets there within one step, and hardly anybody does not within a hundred."""
    config = make_config(
        policy,
        env=f"tests.sides:SidesWorld?tasks=2&max_steps={max_steps}",
        plan={"max_waves": 2},
        iterations=5,
        filters={"accuracy_lower_bound": bounds[0], "accuracy_upper_bound": bounds[1]},
        max_empty=2,
    )
    said = rf"0 of 4 groups after 2 waves.*{reason}.*2 iterations in a row had no group.*understudy sft"
    with pytest.raises(UnderstudyError, match=said):
        train(tmp_path / "run", config)
    found = [line["kind"] for line in read_metrics(tmp_path / "run" / "metrics.jsonl")]
    assert (found.count("collection"), found.count("train")) == (2, 0)


CHANGES: dict[str, dict[str, Any]] = {
    "env": {"env": "tests.sides:SidesWorld?tasks=1"},
    "max_steps": {"max_steps": 2},
    "sampling": {"sampling": {"temperature": 2.0}},
    "plan": {"plan": {"n_samples": 2}},
    "filters": {"filters": {"accuracy_lower_bound": 0.3, "accuracy_upper_bound": 0.7}},
    "algorithm": {"algorithm": {"adv_estimator": "rloo"}},
    "engine": {"engine": {"learning_rate": 1e-4}},
    "seed": {"seed": 1},
    "plan.seed": {"plan": {"seed": 1}},
    "sampling.greedy": {"sampling": {"greedy": True}},
    "iterations": {"iterations": 1},
}


@pytest.fixture(scope="module")
def usual(tmp_path_factory: pytest.TempPathFactory, policy: Path) -> OnPolicyRun:
    return train(tmp_path_factory.mktemp("usual") / "run", make_config(policy))


@pytest.mark.parametrize("name", CHANGES)
def test_each_option_changes_what_is_learned(name: str, tmp_path: Path, policy: Path, usual: OnPolicyRun) -> None:
    assert digest_of_weights(train(tmp_path / "run", make_config(policy, **CHANGES[name]))) != digest_of_weights(usual)


def test_another_policy_is_another_start(tmp_path: Path, usual: OnPolicyRun) -> None:
    other = save_policy(tmp_path / "policy.safetensors", seed=1)
    assert digest_of_weights(train(tmp_path / "run", make_config(other))) != digest_of_weights(usual)


def test_evaluations_and_checkpoints_are_as_often_as_asked(tmp_path: Path, policy: Path) -> None:
    config = make_config(
        policy,
        iterations=5,
        eval_every=2,
        checkpoint_every=2,
        keep_checkpoints=2,
        evaluation={"episodes": 6, "sampling": "greedy"},
        sinks=("tensorboard",),
    )
    run = train(tmp_path / "run", config)
    evaluations = lines(run, "evaluation")
    assert [line["update"] > 0 for line in evaluations] == [False, True, True, True]  # before, 2, 4 and the end
    assert {(line["episodes"], line["sampling"]) for line in evaluations} == {(6, "greedy")}
    assert sorted(path.name for path in run.directory.checkpoints.iterdir()) == ["000000000004-0", "000000000005-0"]
    assert any((run.directory.path / "tensorboard").iterdir())


def test_policies_are_kept_as_often_as_asked(tmp_path: Path, policy: Path) -> None:
    """Each is the policy of its iteration, whole and with its adapter, and can be evaluated and trained from."""
    options: dict[str, Any] = {"lora": {"rank": 2}, "checkpoint_every": 100}
    run = train(tmp_path / "run", make_config(policy, iterations=5, save_policy_every=2, **options))
    kept = sorted((run.directory.path / "policies").iterdir())
    assert [path.name for path in kept] == ["iteration-000002", "iteration-000004"]
    short = train(tmp_path / "short", make_config(policy, iterations=2, **options))
    assert not (short.directory.path / "policies").exists()
    found = [
        digest_of_arrays(VLAPolicy.load(path / "policy.safetensors").parameters())
        for path in (*kept, short.directory.path, run.directory.path)
    ]
    assert found[0] == found[2]
    assert len(set(found)) == 3
    adapters = [load_file(path / "adapter" / "adapter_model.safetensors") for path in (kept[0], short.directory.path)]
    assert adapters[0].keys() == adapters[1].keys()
    assert all(torch.equal(adapters[0][name], adapters[1][name]) for name in adapters[0])
    assert main(["evaluate", str(kept[0]), "--episodes", "2", "--workers", "1"]) == 0
    assert (kept[0] / "evaluations" / "evaluation.json").exists()
    further = train(tmp_path / "further", make_config(kept[0], iterations=1))
    assert lines(further, "train")


def test_a_policy_that_was_kept_before_a_kill_is_kept_again(tmp_path: Path, policy: Path) -> None:
    """The run is resumed from an earlier checkpoint and replaces what it had kept, or half of it."""
    config = make_config(policy, iterations=3, save_policy_every=3, checkpoint_every=2)
    kept = tmp_path / "run" / "policies" / "iteration-000003"
    with OnPolicyRun(Run.create(tmp_path / "run", "grpo", config)) as run:
        for _ in range(2):
            run.iterate()
        run._save()
    for directory in (kept, kept.with_name(".iteration-000003.new")):
        directory.mkdir(parents=True)
        (directory / "policy.safetensors").write_bytes(b"half")
    with OnPolicyRun(Run(tmp_path / "run")) as run:
        run.run()
    assert digest_of_arrays(VLAPolicy.load(kept / "policy.safetensors").parameters()) == digest_of_weights(run)
    assert [path.name for path in kept.parent.iterdir()] == [kept.name]


def test_the_reference_is_the_policy_that_it_began_with(tmp_path: Path, policy: Path) -> None:
    config = make_config(policy, algorithm={"kl_in": "loss", "kl_coef": 1.0}, iterations=3)
    run = train(tmp_path / "run", config)
    kl = [line["kl"] for line in lines(run, "train")]
    assert kl[0] == pytest.approx(0.0, abs=1e-10)
    assert kl[2] > kl[0]
    assert (run.directory.path / "reference.safetensors").exists()


def test_a_value_head_is_added_where_it_is_needed(tmp_path: Path, policy: Path) -> None:
    run = train(tmp_path / "run", make_config(policy, algorithm={"adv_estimator": "gae"}))
    assert run.policy.has_value
    assert {"value_loss", "explained_variance"} <= lines(run, "train")[0].keys()
    names = [path for path, _ in trees.leaves(run.policy.parameters())]
    assert any("value" in name for name in names)


def test_log_probs_are_those_of_the_policy_that_acted(tmp_path: Path, policy: Path) -> None:
    """Before the first update of a batch every ratio is one."""
    config = make_config(policy, iterations=1, algorithm={"ppo_epochs": 1, "ppo_mini_batch_size": 1000})
    (line,) = lines(train(tmp_path / "run", config), "train")
    assert line["ratio"] == pytest.approx(1.0, abs=1e-6)
    assert line["approx_kl"] == pytest.approx(0.0, abs=1e-10)


def test_it_acts_in_the_precision_that_it_is_trained_in(tmp_path: Path, policy: Path) -> None:
    config = make_config(
        policy, iterations=1, engine={"precision": "bfloat16"}, algorithm={"ppo_epochs": 1, "ppo_mini_batch_size": 1000}
    )
    (line,) = lines(train(tmp_path / "run", config), "train")
    assert (line["ratio"], line["ratio_spread"]) == (1.0, 0.0)
    assert line["sampler_ratio_spread"] < 2e-5  # in float32 it would be five times as much and more


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"iterations": 0}, "iterations: expected a number from 1"),
        ({"seed": -1}, "seed: expected 0 or more"),
        ({"save_policy_every": 0}, "save_policy_every: expected a number from 1, or None, got 0"),
        ({"workers": {"num_parallel_envs": 0}}, "num_parallel_envs: expected a number from 1"),
        ({"workers": {"batch_wait_ms": -1.0}}, "batch_wait_ms: expected a number of milliseconds from 0, got -1.0"),
    ],
)
def test_nonsense_is_refused(change: dict[str, Any], said: str, policy: Path) -> None:
    with pytest.raises(UnderstudyError, match=said):
        make_config(policy, **change)


def test_workers_are_those_that_were_asked_for(tmp_path: Path, policy: Path) -> None:
    """What they do with it, the collector's own tests say."""
    workers = {"num_parallel_envs": 3, "max_attempts": 7, "task_affinity": 0, "batch_wait_ms": 5.0}
    config = make_config(policy, workers=workers, clip_actions=True)
    with OnPolicyRun(Run.create(tmp_path / "run", "grpo", config)) as run:
        collector = run.backend.runner
        assert (len(collector.pids), collector.max_attempts, collector.task_affinity) == (3, 7, 0)  # type: ignore[attr-defined]
        assert collector.clip_actions  # type: ignore[attr-defined]
        assert collector.batch_wait_s == 0.005  # type: ignore[attr-defined]


def test_a_device_that_is_not_there(tmp_path: Path, policy: Path) -> None:
    with pytest.raises(UnderstudyError, match="device: torch cannot use 'nonsense' here"):
        train(tmp_path / "run", make_config(policy, device="nonsense"))


def test_a_start_that_is_another_now_is_refused(tmp_path: Path) -> None:
    """What was frozen, or is only in the file, would be another's."""
    path = save_policy(tmp_path / "policy.safetensors")
    run = train(tmp_path / "run", make_config(path, iterations=1))
    save_policy(path, seed=1)
    with pytest.raises(UnderstudyError, match=r"policy: .* is not the policy any more that this run started from"):
        OnPolicyRun(Run(run.directory.path))


def test_every_option_of_evaluate_changes_something(tmp_path: Path, usual: OnPolicyRun) -> None:
    def score(*options: str) -> dict[str, Any]:
        out = tmp_path / "-".join(options or ("none",)).replace("/", "")
        assert main(["evaluate", str(usual.directory.path), "--episodes", "8", "--out", str(out), *options]) == 0
        found: dict[str, Any] = json.loads((out / "evaluation.json").read_text())["score"]
        return found

    drawn = score("--sampled")
    assert score()["sampling"] == "greedy"
    assert (
        score("--sampled")["episode_results"]
        == drawn["episode_results"]
        == score("--sampled", "--workers", "1")["episode_results"]
    )
    assert score("--sampled", "--seed", "5")["episode_results"] != drawn["episode_results"]
    assert score("--sampled", "--temperature", "9")["episode_results"] != drawn["episode_results"]
    assert {trial["start"] for trial in drawn["episode_results"]}.isdisjoint(
        trial["start"] for trial in score("--split", "train")["episode_results"]
    )
    assert len(score("--videos", "2")["videos"]) == 2


def test_evaluate_takes_a_checkpoint_of_openvla_with_its_options(
    tmp_path: Path, usual: OnPolicyRun, capsys: pytest.CaptureFixture[str]
) -> None:
    make_checkpoint(tmp_path / "openvla")
    words = ["evaluate", str(tmp_path / "openvla"), "--env", "tests.sides:SidesWorld?numbers=7&max_steps=4"]
    words += ["--episodes", "4", "--workers", "1", "--sampled", "--openvla.unnorm-key", KEY]
    scores = []
    for normalization in ("bounds_q99", "bounds"):
        out = tmp_path / normalization
        assert main([*words, "--openvla.normalization", normalization, "--out", str(out)]) == 0
        scores.append(json.loads((out / "evaluation.json").read_text()))
    assert scores[0]["fingerprint"]["parameters"] == scores[1]["fingerprint"]["parameters"]
    assert scores[0]["fingerprint"]["config"] != scores[1]["fingerprint"]["config"]
    lengths = [[trial["num_steps"] for trial in one["score"]["episode_results"]] for one in scores]
    assert lengths[0] == [4, 4, 4, 4]  # percentiles of 0.1 do not get there in four steps, bounds of 9 may
    assert lengths[1] != lengths[0]
    capsys.readouterr()
    assert main(["evaluate", str(usual.directory.path), "--openvla.mirror"]) == 1
    assert "is no OpenVLA checkpoint, or a run with options of its own; omit it" in capsys.readouterr().err


def test_evaluate_ends_episodes_where_the_run_ends_them(tmp_path: Path, policy: Path) -> None:
    run = train(tmp_path / "run", make_config(policy, iterations=1, max_steps=2))
    assert main(["evaluate", str(run.directory.path), "--sampled", "--episodes", "4", "--workers", "1"]) == 0
    found = json.loads((run.directory.path / "evaluations" / "evaluation.json").read_text())["score"]
    assert found["episode_results"] == lines(run, "evaluation")[-1]["episode_results"]
    assert max(episode["num_steps"] for episode in found["episode_results"]) == 2


def test_a_policy_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(UnderstudyError, match=r"policy: expected a policy file or a run with one, got .*nowhere"):
        train(tmp_path / "run", make_config(tmp_path / "nowhere"))


def test_numbers_of_tickets_go_on(usual: OnPolicyRun) -> None:
    numbers = [line["episode"] for line in lines(usual, "episode")]
    assert numbers == list(range(32))
    assert np.bincount([line["group"] for line in lines(usual, "episode")]).tolist() == [4] * 8


# ---- adapters, and checkpoints of OpenVLA


def test_an_adapter_is_all_that_is_trained(tmp_path: Path, policy: Path) -> None:
    """And the policy that is kept has it merged in; the adapter lies beside, in peft's files."""
    run = train(tmp_path / "run", make_config(policy, lora={"rank": 2}, engine={"learning_rate": 1e-2}))
    frozen = {name for name, weight in run.policy.model.named_parameters() if not weight.requires_grad}
    assert frozen
    assert {path.name for path in (run.directory.path / "adapter").iterdir()} == {
        "adapter_config.json",
        "adapter_model.safetensors",
    }
    before, after = (trees.flatten(VLAPolicy.load(path).parameters()) for path in (policy, run.directory.policy))
    assert before.keys() == after.keys()
    changed = {name for name in before if not np.array_equal(before[name], after[name])}
    assert changed
    assert all("proj" in name or "fc" in name or "connector" in name for name in changed)


@pytest.mark.parametrize("change", [{"rank": 3}, {"rank": 2, "alpha": 1.0}, {"rank": 2, "targets": ("q_proj",)}])
def test_each_option_of_an_adapter_changes_something(change: dict[str, Any], tmp_path: Path, policy: Path) -> None:
    usual, other = (
        train(tmp_path / str(index), make_config(policy, iterations=1, lora=lora))
        for index, lora in enumerate([{"rank": 2}, change])
    )
    one, two = (trees.flatten(VLAPolicy.load(run.directory.policy).parameters()) for run in (usual, other))
    assert any(not np.array_equal(one[name], two[name]) for name in one)


def test_a_checkpoint_of_openvla_is_trained_with_an_adapter(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "openvla")
    config = make_config(
        tmp_path / "openvla",
        env="tests.sides:SidesWorld?numbers=7",
        clip_actions=True,
        iterations=2,
        openvla={"unnorm_key": KEY, "block_steps": 3},
        lora={"rank": 2},
        engine={"learning_rate": 1e-3},
        algorithm={"kl_in": "loss"},
        evaluation={"episodes": 2},
        save_policy_every=1,
    )
    run = train(tmp_path / "run", config)
    losses = [line["loss"] for line in lines(run, "train")]
    assert losses[0] != 0.0
    assert (run.directory.path / "adapter" / "adapter_model.safetensors").exists()
    with OnPolicyRun(Run(run.directory.path)) as again:  # from its checkpoint
        assert digest_of_arrays(again.policy.parameters()) == digest_of_weights(run)
    spec = SidesWorld(numbers=7).step_spec
    merged = OpenVLAPolicy.load(run.directory.path / "policy", spec, unnorm_key=KEY, block_steps=3)
    seen = {"camera": np.zeros((1, 16, 16, 3), np.uint8)}
    tokens = {"tokens": np.zeros((1, 3, 7), np.int32)}
    found = [
        one.evaluate(seen, ["go left"], tokens, sampling=Sampling()).log_prob.detach().numpy()
        for one in (merged, run.policy)
    ]
    assert found[0] == pytest.approx(found[1], abs=1e-4)
    kept = [run.directory.path / "policies" / f"iteration-00000{number}" for number in (1, 2)]
    assert sorted(path.name for path in kept[0].iterdir()) == ["adapter", "policy"]
    changed = "language_model.model.layers.0.mlp.up_proj.weight"
    one, two, last = (load_file(path / "policy" / "model.safetensors")[changed] for path in (*kept, run.directory.path))
    assert torch.equal(two, last)
    assert not torch.equal(one, last)
    assert main(["evaluate", str(run.directory.path), "--episodes", "2", "--workers", "1", "--split", "all"]) == 0
    said = json.loads((run.directory.path / "evaluations" / "evaluation.json").read_text())["score"]
    assert said["meaning"].startswith("benchmark: all starts")


def test_a_checkpoint_with_an_l1_head_is_trained(tmp_path: Path) -> None:
    """Numbers instead of tokens are drawn, stored and learned from; every ratio begins at one."""
    make_checkpoint(tmp_path / "openvla", l1_head=True)
    config = make_config(
        tmp_path / "openvla",
        env="tests.sides:SidesWorld?numbers=7",
        iterations=1,
        openvla={"unnorm_key": KEY, "block_steps": 3, "l1_scale": 1.0},
        lora={"rank": 2},
        algorithm={"ppo_epochs": 1, "ppo_mini_batch_size": 1000},
        evaluation={"episodes": 2},
    )
    run = train(tmp_path / "run", config)
    (line,) = lines(run, "train")
    assert line["ratio"] == pytest.approx(1.0, abs=1e-4)
    assert line["gradient"] > 0
    assert line["entropy"] == pytest.approx(1 + np.log(2.0), abs=1e-4)
    scale = load_file(run.directory.path / "policy" / "scale_head.safetensors")
    assert abs(scale["bias"].item()) > 1e-6  # it began as the log of 1
    with Reader(run.directory.store) as reader:
        episode = reader.read(next(iter(reader.episodes())).id)
    assert episode.extras["replay"]["numbers"].shape[1:] == (3, 7)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"lora": {"alpha": 2.0}}, "lora.rank: is 0, so alpha and targets would have no effect"),
        ({"lora": {"rank": -1}}, "lora.rank: expected 0 for none, or more, got -1"),
    ],
)
def test_adapters_that_make_no_sense(change: dict[str, Any], said: str, policy: Path) -> None:
    with pytest.raises(UnderstudyError, match=said):
        make_config(policy, **change)


def test_options_of_openvla_are_refused_where_they_do_nothing(tmp_path: Path, policy: Path) -> None:
    with pytest.raises(UnderstudyError, match=r"openvla: .* is no OpenVLA checkpoint, so these options do not apply"):
        train(tmp_path / "run", make_config(policy, openvla={"mirror": True}))
