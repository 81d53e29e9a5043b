"""Runs of a flow policy: supervised fine-tuning, policy gradients over its denoising steps, and what is refused."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.sides import SidesWorld
from tests.unit.policies.test_registry import install_package
from tests.unit.training.onpolicy.making import make_config, save_policy

from understudy.algorithms import AlgorithmError
from understudy.algorithms.sft import SFT, SFTUpdateConfig
from understudy.cli import main
from understudy.core import tree as trees
from understudy.policies import EncoderConfig, PolicyError, policy_file
from understudy.policies.flow import FlowConfig, FlowPolicy
from understudy.policies.load import load_policy_file
from understudy.policies.vla import VLAConfig
from understudy.replay import Reader
from understudy.training.onpolicy.config import OnPolicyConfig, TaskEvaluationConfig
from understudy.training.onpolicy.onpolicy_run import OnPolicyProgress, OnPolicyRun
from understudy.training.onpolicy.policy_files import load_policy
from understudy.training.onpolicy.sft import KIND, SFTConfig, run_sft
from understudy.training.runs.config import ConfigError
from understudy.training.runs.metrics import read_metrics
from understudy.training.runs.run import Run

torch.set_num_threads(1)

ENV = "toy:pick_red?cameras=false&state=task"
TINY = FlowConfig(block_steps=3, hidden=16, layers=1, word_size=4, num_inference_steps=3)
BASE = SFTConfig(
    env=ENV,
    updates=6,
    batch_size=8,
    evaluate=False,
    report_every=3,
    checkpoint_every=2,
    network="flow",
    flow=TINY,
    sft=SFTUpdateConfig(warmup_updates=1),
)


@pytest.fixture(scope="module")
def demos(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = str(tmp_path_factory.mktemp("demos") / "store")
    assert main(["record", path, "--env", ENV, "--successes", "1"]) == 0
    return path


def silent(text: str) -> None:
    del text


@pytest.fixture(scope="module")
def plain(demos: str, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run that nothing happened to."""
    run = Run.create(tmp_path_factory.mktemp("plain") / "run", KIND, replace(BASE, demos=demos))
    run_sft(run, silent)
    return run


# ---- supervised fine-tuning


def test_a_run_that_was_cut_off_goes_on_to_the_same_bits(plain: Run, demos: str, tmp_path: Path) -> None:
    run = Run.create(tmp_path / "run", KIND, replace(BASE, demos=demos))

    def kill(text: str) -> None:
        if text.startswith("update 3"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_sft(run, kill)
    run_sft(run, silent)
    assert run.policy.read_bytes() == plain.policy.read_bytes()
    assert run.metrics.read_bytes() == plain.metrics.read_bytes()
    (first, _) = read_metrics(run.metrics)
    assert {"loss", "error", "gradient", "learning_rate"} <= set(first)


def test_the_store_resizes_the_cameras_and_the_policy_learns_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Frames of an encoded store are decoded and resized once, and kept; without that, in every batch."""
    pytest.importorskip("av")
    env, store = "toy:touch_purple?size=64", tmp_path / "store"
    assert main(["record", str(store), "--env", env, "--successes", "1", "--codec", "h264"]) == 0
    flow = replace(TINY, encoder=EncoderConfig(filters=(4, 4), latent=8, image_size=(32, 32)))
    config = replace(BASE, env=env, demos=str(store), flow=flow)
    run = Run.create(tmp_path / "run", KIND, config)
    run_sft(run, silent)
    assert any((store / "derived").rglob("*"))
    shutil.rmtree(store / "derived")
    monkeypatch.setattr("understudy.training.onpolicy.sft.resize_of", lambda policy: None)
    whole = Run.create(tmp_path / "whole", KIND, config)
    run_sft(whole, silent)
    assert not (store / "derived").exists()
    assert whole.policy.read_bytes() == run.policy.read_bytes()
    assert whole.metrics.read_bytes() == run.metrics.read_bytes()
    monkeypatch.undo()
    further = SFTConfig(policy=str(run.policy), demos=str(store), updates=2, batch_size=8, evaluate=False, env=env)
    run_sft(Run.create(tmp_path / "further", KIND, further), silent)
    assert any((store / "derived").rglob("*"))


def test_a_policy_can_be_gone_on_from_and_its_kind_is_found_in_its_file(plain: Run, demos: str, tmp_path: Path) -> None:
    config = SFTConfig(policy=str(plain.policy), demos=demos, updates=2, batch_size=8, evaluate=False, env="nowhere")
    run = Run.create(tmp_path / "run", KIND, config)
    policy, _ = run_sft(run, silent)
    assert isinstance(policy, FlowPolicy)
    before = FlowPolicy.load(plain.policy)
    assert trees.equal(policy.parameters()["stats"], before.parameters()["stats"])
    assert not trees.equal(policy.parameters()["weights"], before.parameters()["weights"])


def test_it_is_scored_like_any_other(plain: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    copied = shutil.copytree(plain.path, tmp_path / "run")
    assert main(["evaluate", str(copied), "--episodes", "2", "--sampled", "--workers", "1"]) == 0
    assert "held-out" in capsys.readouterr().out


def scored(run: Path, out: Path, *options: str) -> dict[str, Any]:
    assert main(["evaluate", str(run), "--out", str(out), "--episodes", "2", "--sampled", *options]) == 0
    found: dict[str, Any] = json.loads((out / "evaluation.json").read_text())
    return found


def test_asynchronous_acting_is_scored_reproducibly_and_with_a_clock(
    plain: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    waiting = scored(plain.path, tmp_path / "waiting", "--workers", "1")
    delayed = ["--async-inference", "--rtc.inference-delay", "1"]
    first = scored(plain.path, tmp_path / "first", "--workers", "1", *delayed)
    assert first == scored(plain.path, tmp_path / "again", "--workers", "2", *delayed)
    switched = scored(plain.path, tmp_path / "switched", *delayed, "--rtc.method", "switch")
    assert len({one["fingerprint"]["config"] for one in (waiting, first, switched)}) == 3
    capsys.readouterr()
    scored(plain.path, tmp_path / "clock", "--async-inference", "--hz", "500")
    assert re.search(r"of 500 Hz over \d+ ticks", capsys.readouterr().out)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            ["--rtc.method", "blend"],
            "rtc, hz: these options have no effect without --async-inference; give it, or omit",
        ),
        (["--hz", "30"], "rtc, hz: these options have no effect without --async-inference; give it, or omit them"),
        (["--async-inference"], "rtc/inference_delay: expected a number of steps, because toy:pick_red?cameras=false"),
        (["--async-inference", "--rtc.inference-delay", "2"], "rtc/inference_delay: expected up to 1 with blocks of 3"),
        (["--async-inference", "--hz", "30", "--workers", "1"], "split all, workers: expected neither in real time"),
    ],
)
def test_asynchronous_acting_that_cannot_be_is_refused(
    options: list[str], said: str, plain: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["evaluate", str(plain.path), "--episodes", "1", *options]) == 1
    assert said in capsys.readouterr().err.replace("\n", " ")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"vla": VLAConfig(layers=1)}, "vla: has no effect with network 'flow'; leave these options out, or set"),
        (
            {"network": "vla"},
            "flow: has no effect with network 'vla'; leave these options out, or set network to 'flow'",
        ),
        ({"policy": "it"}, "network: the given policy has its own network; leave these options out"),
    ],
)
def test_options_of_the_other_network_are_refused(change: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        replace(BASE, **change)


@pytest.mark.parametrize("change", [{"sigma": 1.0}, {"shift_pixels": 2}, {"checkpoint_gradients": True}])
def test_options_of_the_update_without_effect_are_refused(change: dict[str, Any], plain: Run) -> None:
    policy = FlowPolicy.load(plain.policy)
    with pytest.raises(AlgorithmError, match=f"sft.{next(iter(change))}: has no effect on this FlowPolicy"):
        SFT(SFTUpdateConfig(**change), policy, total_updates=1, seed=0)


def test_a_policy_that_cannot_imitate_is_refused() -> None:
    with pytest.raises(AlgorithmError, match="policy: expected one that can imitate, got object, which has no"):
        SFT(SFTUpdateConfig(), object(), total_updates=1, seed=0)  # type: ignore[arg-type]


def test_a_policy_that_another_package_registers_is_trained_too(
    plain: Run, demos: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From a file of its kind, and it resumes as that kind."""
    install_package(tmp_path, monkeypatch, "slow_trained", slow="slow_trained:Slow")
    made = FlowPolicy.load(plain.policy)
    policy_file.write(tmp_path / "slow", {**made.description(), "kind": "slow"}, made.parameters())
    config = SFTConfig(policy=str(tmp_path / "slow"), demos=demos, updates=2, batch_size=8, evaluate=False)
    run = Run.create(tmp_path / "run", KIND, config)
    run_sft(run, silent)
    run_sft(run, silent)  # from its last checkpoint
    assert policy_file.kind_of(run.policy) == "slow"
    before, after = made.parameters()["weights"], load_policy_file(run.policy).parameters()["weights"]
    assert not trees.equal(before, after)


# ---- on policy

SIDES = FlowConfig(
    encoder=EncoderConfig(filters=(4, 4), latent=8), block_steps=3, hidden=16, layers=1, num_inference_steps=3
)


@pytest.fixture(scope="module")
def untaught(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Without noise in its steps, as `understudy sft` makes it."""
    path = tmp_path_factory.mktemp("flow") / "policy.safetensors"
    world = SidesWorld(tasks=2)
    FlowPolicy.new(SIDES, world.step_spec, [task.instruction for task in world.suite.tasks], seed=0).save(path)
    return path


def train(path: Path, config: OnPolicyConfig) -> OnPolicyRun:
    with OnPolicyRun(Run.create(path, "grpo", config)) as run:
        run.run()
    return run


@pytest.mark.parametrize(
    ("kind", "lora", "noise"),
    [
        ("gae", {}, {"noise_level": 0.5}),
        ("grpo", {"rank": 2}, {"noise_level": 0.5}),
        ("gae", {"rank": 2}, {"noise_bounds": (0.1, 0.4)}),
    ],
)
def test_policy_gradients_learn_from_the_chain_of_each_block(
    kind: str, lora: dict[str, Any], noise: dict[str, Any], tmp_path: Path, untaught: Path
) -> None:
    is_learned = "noise_bounds" in noise
    algorithm = {"adv_estimator": kind, "ppo_epochs": 1, "ppo_mini_batch_size": 1000}
    config = make_config(
        untaught,
        iterations=1,
        lora=lora,
        algorithm={**algorithm, "entropy_coeff": 0.01 if is_learned else 0.0},
        **noise,
        evaluation={"episodes": 2},
    )
    run = train(tmp_path / "run", config)
    (line,) = read_metrics(run.directory.metrics, "train")
    assert line["ratio"] == pytest.approx(1.0, abs=1e-4)  # evaluate gives what act recorded
    assert line["gradient"] > 0
    with Reader(run.directory.store) as reader:
        episode = reader.read(next(iter(reader.episodes())).id)
    assert episode.extras["replay"]["chain"].shape[1:] == (4, 3, 1)
    saved = FlowPolicy.load(run.directory.policy)
    assert saved.config == replace(SIDES, **noise, value_head=kind == "gae")
    if is_learned:  # also beside an adapter: it is new
        began = FlowPolicy.load(untaught).with_noise_bounds((0.1, 0.4), seed=config.seed)
        assert not trees.equal(saved.parameters()["weights"]["noise"], began.parameters()["weights"]["noise"])


@pytest.mark.parametrize(
    ("level", "said"),
    [
        (
            None,
            "noise_level: this flow policy has 0, so that its log-probs do not depend on its weights .* set --noise-le",
        ),
        (0.0, "noise_level: this flow policy has 0"),
        (2.0, "noise_level: expected a number from 0 to 1, got 2.0"),
    ],
)
def test_what_a_policy_gradient_cannot_learn_from_is_said(level: float | None, said: str, untaught: Path) -> None:
    with pytest.raises((ConfigError, PolicyError), match=said):
        load_policy(make_config(untaught, noise_level=level), untaught, SidesWorld().step_spec, adapted=False)


def test_a_registered_policy_that_can_only_act_is_refused(
    tmp_path: Path, untaught: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install_package(tmp_path, monkeypatch, "fixed_policies", fixed="fixed_policies:Fixed")
    made = FlowPolicy.load(untaught)
    path = tmp_path / "fixed.safetensors"
    policy_file.write(path, {**made.description(), "kind": "fixed"}, made.parameters())
    with pytest.raises(ConfigError, match=r"policy: .*fixed.safetensors is a Fixed, which can act and not be trained"):
        load_policy(make_config(path), path, SidesWorld().step_spec, adapted=False)


def test_noise_in_the_steps_of_a_vla_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    policy = save_policy(tmp_path / "policy.safetensors")
    for name, given in (("noise_level", 0.5), ("noise_bounds", (0.1, 0.2))):
        with pytest.raises(ConfigError, match=rf"{name}: .*policy.safetensors is no flow policy, so it would have no"):
            load_policy(make_config(policy, **{name: given}), policy, SidesWorld().step_spec, adapted=False)


@pytest.mark.nightly  # test_onpolicy_run.py resumes a run of the small VLA in every run
@pytest.mark.parametrize("noise", [{"noise_level": 0.5}, {"noise_bounds": (0.1, 0.4)}])
def test_a_run_on_chains_that_is_broken_off_goes_on_to_the_same_bits(
    noise: dict[str, Any], tmp_path: Path, untaught: Path
) -> None:
    config = make_config(untaught, iterations=3, **noise, evaluation={"episodes": 2})
    whole = train(tmp_path / "whole", config)

    def stop(news: OnPolicyProgress) -> None:
        if news.iteration == 2 and news.episodes == 5:
            raise KeyboardInterrupt

    run = Run.create(tmp_path / "broken", "grpo", config)
    with pytest.raises(KeyboardInterrupt), OnPolicyRun(run, stop) as broken:
        broken.run()
    with OnPolicyRun(Run(run.path)) as resumed:
        resumed.run()
    assert resumed.directory.policy.read_bytes() == whole.directory.policy.read_bytes()


@pytest.mark.nightly  # a learning run
def test_grpo_teaches_a_flow_policy_to_do_what_it_is_told(tmp_path: Path, untaught: Path) -> None:
    """From success alone, as the small VLA is taught."""
    config = make_config(
        untaught,
        iterations=16,
        noise_level=0.5,
        plan={"n_samples": 8, "data_batch_size": 64},
        engine={"learning_rate": 3e-3},
        algorithm={"ppo_mini_batch_size": 64, "ppo_micro_batch_size": 64},
        evaluation={"episodes": 64},
    )
    run = train(tmp_path / "run", config)
    first, *_, last = read_metrics(run.directory.metrics, "evaluation")
    assert last["low"] > first["high"]


@pytest.mark.nightly  # a learning run
def test_a_flow_policy_learns_from_five_demonstrations(tmp_path: Path) -> None:
    """docs/flow.md has the figures of three seeds; a policy that learned nothing picks up nothing."""
    assert main(["record", str(tmp_path / "demos"), "--env", ENV, "--successes", "5", "--noise", "0.3"]) == 0
    config = SFTConfig(
        env=ENV,
        demos=str(tmp_path / "demos"),
        network="flow",
        flow=FlowConfig(block_steps=4),
        updates=1500,
        batch_size=256,
        evaluation=TaskEvaluationConfig(sampling="sampled"),
    )
    _, found = run_sft(Run.create(tmp_path / "run", KIND, config), silent)
    assert found is not None
    assert found.success_rate.rate > 0.2
    assert np.isfinite(list(read_metrics(tmp_path / "run" / "metrics.jsonl"))[-2]["loss"])
