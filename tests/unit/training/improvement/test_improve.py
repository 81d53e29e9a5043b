"""Runs that improve a policy: each option, going on to the same bits, estimates beside the store, and comparisons."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import understudy as us
from understudy.algorithms.recap import ValueTrainingConfig
from understudy.algorithms.sft import SFTUpdateConfig
from understudy.cli import main
from understudy.core import Source, StoreError
from understudy.envs.toy import ToyTable
from understudy.policies import EncoderConfig
from understudy.policies.flow import FlowConfig, FlowPolicy
from understudy.policies.value_model import ValueModel
from understudy.policies.vla import VLAConfig
from understudy.replay import Reader, verify
from understudy.training.improvement.config import ImproveConfig, RecapConfig
from understudy.training.improvement.improve import KIND, resolved, run_improve
from understudy.training.onpolicy.config import TaskEvaluationConfig
from understudy.training.onpolicy.sft import KIND as SFT_KIND
from understudy.training.onpolicy.sft import SFTConfig, run_sft
from understudy.training.runs.config import ConfigError
from understudy.training.runs.fingerprint import digest_of_arrays
from understudy.training.runs.metrics import read_metrics
from understudy.training.runs.run import Run

torch.set_num_threads(1)

ENV = "toy:touch_purple?cameras=false&state=task"
TINY = FlowConfig(block_steps=3, hidden=16, layers=1, word_size=4, num_inference_steps=2)
VALUE = ValueTrainingConfig(updates=4, batch_size=16, hidden=(8,))


def silent(text: str) -> None:
    del text


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A policy that has learned little, and six of its episodes: in every second a script takes over."""
    path = tmp_path_factory.mktemp("improve")
    assert main(["record", str(path / "sft" / "store"), "--env", ENV, "--successes", "2"]) == 0
    config = SFTConfig(env=ENV, updates=6, batch_size=8, evaluate=False, network="flow", flow=TINY)
    run_sft(Run.create(path / "sft", SFT_KIND, config), silent)
    rollout = ["rollout", str(path / "mixed"), "--policy", str(path / "sft"), "--episodes", "6", "--human", "script"]
    assert main([*rollout, "--takeover-every", "2", "--patience-steps", "4", "--burst-steps", "3"]) == 0
    return path


def config_of(root: Path, by: Any = "recap", **options: Any) -> ImproveConfig:
    base = ImproveConfig(
        policy=str(root / "sft"),
        experience=(str(root / "mixed"),),
        by=by,
        report_every=3,
        checkpoint_every=2,
        evaluation=TaskEvaluationConfig(episodes=2, sampling="greedy"),
        sft=SFTUpdateConfig(warmup_updates=1),
        recap=RecapConfig(value=VALUE) if by == "recap" else RecapConfig(),
    )
    return replace(base, **options)


def lines(path: Path, config: ImproveConfig) -> list[dict[str, Any]]:
    run = Run.create(path, KIND, resolved(config))
    run_improve(run, silent)
    return list(read_metrics(run.metrics))


@pytest.fixture(scope="module")
def plain(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run of RECAP that nothing happened to."""
    path = tmp_path_factory.mktemp("plain") / "run"
    lines(path, config_of(root))
    return Run(path)


def estimates_of(run: Run, store: Path) -> us.Estimates:
    """What the value model of a run thinks of a store, with the advantages that the run has asked for."""
    model, asked = (
        digest_of_arrays(ValueModel.load(run.path / "value.safetensors").parameters()),
        run.config(ImproveConfig),
    )
    every = [us.Estimates.read(path) for path in (store / "estimates").iterdir()]
    (found,) = [
        one
        for one in every
        if (one.model, one.options["good_share"], one.options["advantage_steps"])
        == (model, asked.recap.good_share, asked.recap.advantage_steps)
    ]
    return found


# ---- what a run does


def test_what_is_left_open_is_as_in_the_run_of_the_policy(root: Path, plain: Run) -> None:
    config = resolved(config_of(root))
    assert (config.env, config.updates, config.batch_size) == (ENV, 6, 8)
    assert config.demos == str(root / "sft" / "store")
    assert resolved(config) == config
    again = resolved(replace(config_of(root), policy=str(plain.path)))  # an improved policy can be improved again
    assert (again.demos, again.env) == (config.demos, ENV)


def test_recap_learns_values_then_the_policy_and_evaluates(plain: Run, root: Path) -> None:
    found = [(line["kind"], line["update"]) for line in read_metrics(plain.metrics)]
    assert found == [("value", 3), ("value", 4), ("train", 3), ("train", 6), ("evaluation", 6)]
    policy, before = FlowPolicy.load(plain.policy), FlowPolicy.load(root / "sft" / "policy.safetensors")
    assert (policy.config.advantage, policy.config.guidance) == (True, 1.5)
    assert policy.stats.mean["state"].tolist() == before.stats.mean["state"].tolist()
    assert not torch.equal(policy.model.enter.weight, before.model.enter.weight)
    assert main(["evaluate", str(plain.path), "--episodes", "2", "--workers", "1"]) == 0


def test_estimates_lie_beside_the_store_and_change_nothing_in_it(plain: Run, root: Path) -> None:
    estimates = estimates_of(plain, root / "mixed")
    with Reader(root / "mixed") as reader:
        assert (estimates.store_id, estimates.commit) == (reader.catalog.store_id, reader.last_commit())
        for number in range(1, 7):
            episode, found = reader.read(number), estimates.of(number)
            assert found is not None
            assert len(found.value) == len(episode)
            assert found.value.min() >= -1.0
            assert found.value.max() <= 0.0
            assert found.good[episode.source == Source.HUMAN].all()
        policy_steps = np.concatenate([reader.read(number).source != Source.HUMAN for number in range(1, 7)])
    share = estimates.good[policy_steps].mean()
    assert 0.3 <= share < 0.3 + 1.5 / policy_steps.sum()
    assert verify(root / "mixed").ok
    assert estimates_of(plain, root / "sft" / "store").good.all()


CHANGES: dict[str, tuple[str, dict[str, Any], Callable[[list[Any], list[Any]], bool]]] = {
    "updates": ("recap", {"updates": 9}, lambda new, old: new[-1]["update"] == 9),
    "report_every": ("recap", {"report_every": 2}, lambda new, old: len(new) > len(old)),
    "batch_size": ("recap", {"batch_size": 4}, lambda new, old: train(new) != train(old)),
    "seed": ("recap", {"seed": 1}, lambda new, old: new[0]["loss"] != old[0]["loss"]),
    "by": ("hg-dagger", {}, lambda new, old: train(new)[0]["step"] < train(old)[0]["step"]),
    "sft": ("recap", {"sft": SFTUpdateConfig(learning_rate=1e-2)}, lambda new, old: train(new) != train(old)),
    "evaluation": (
        "recap",
        {"evaluation": TaskEvaluationConfig(episodes=3)},
        lambda new, old: new[-1]["episodes"] == 3,
    ),
    "advantage_dropout": (
        "recap",
        {"sft": SFTUpdateConfig(warmup_updates=1, advantage_dropout=0.9)},
        lambda new, old: train(new) != train(old),
    ),
}


def train(some: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [line for line in some if line["kind"] == "train"]


@pytest.mark.parametrize("name", CHANGES)
def test_every_option_changes_something(name: str, root: Path, plain: Run, tmp_path: Path) -> None:
    by, changes, changed = CHANGES[name]
    new = lines(tmp_path / "new", config_of(root, by, **changes))
    assert changed(new, list(read_metrics(plain.metrics)))


@pytest.mark.parametrize(
    "change",
    [
        {"advantage_steps": 1},
        {"good_share": 0.8},
        {"failure_steps": 3},
        {"guidance": 0.5},
        {"value": replace(VALUE, updates=2)},
        {"value": replace(VALUE, batch_size=4)},
        {"value": replace(VALUE, hidden=(4,))},
        {"value": replace(VALUE, learning_rate=0.1)},
        {"value": replace(VALUE, weight_decay=50.0)},
    ],
    ids=str,
)
def test_every_option_of_recap_changes_something(
    change: dict[str, Any], root: Path, plain: Run, tmp_path: Path
) -> None:
    shutil.copytree(root / "mixed", tmp_path / "mixed", ignore=shutil.ignore_patterns("estimates"))
    config = config_of(root, recap=replace(RecapConfig(value=VALUE), **change))
    lines(tmp_path / "new", replace(config, experience=(str(tmp_path / "mixed"),)))
    before, after = estimates_of(plain, root / "mixed"), us.Estimates.newest(tmp_path / "mixed")
    assert after is not None
    if change.keys() == {"guidance"}:
        assert FlowPolicy.load(tmp_path / "new" / "policy.safetensors").config.guidance == 0.5
        assert np.array_equal(after.value, before.value)  # it is an option of acting
    elif change.keys() <= {"advantage_steps", "good_share"}:
        assert np.array_equal(after.value, before.value)
        assert not np.array_equal(after.good, before.good)
    else:
        assert not np.array_equal(after.value, before.value)


# ---- going on


class Killed(Exception):
    pass


@pytest.mark.parametrize("at", ["value model: update 3 of 4", "update 3 of 6", "update 6 of 6"])
def test_a_run_that_was_cut_off_goes_on_to_the_same_bits(at: str, root: Path, plain: Run, tmp_path: Path) -> None:
    """Also if the store has more episodes by then, its estimates are gone, and so is the policy that it began from."""
    shutil.copytree(root / "mixed", tmp_path / "mixed", ignore=shutil.ignore_patterns("estimates"))
    shutil.copytree(root / "sft", tmp_path / "sft")
    config = replace(
        resolved(config_of(root)),
        policy=str(tmp_path / "sft"),
        experience=(str(tmp_path / "mixed"),),
    )
    run = Run.create(tmp_path / "run", KIND, config)

    def kill(text: str) -> None:
        if text.startswith(at):
            raise Killed

    with pytest.raises(Killed):
        run_improve(run, kill)
    assert not run.policy.exists()
    more = ["rollout", str(tmp_path / "mixed"), "--policy", str(root / "sft"), "--episodes", "7"]
    assert main(more) == 0
    shutil.rmtree(tmp_path / "mixed" / "estimates", ignore_errors=True)
    if not at.startswith("value"):
        (tmp_path / "sft" / "policy.safetensors").unlink()
    run_improve(run, silent)
    assert run.policy.read_bytes() == plain.policy.read_bytes()
    numbers = [[{**line, "fingerprint": 0} for line in read_metrics(one.metrics)] for one in (run, plain)]
    assert numbers[0] == numbers[1]
    assert (run.path / "value.safetensors").read_bytes() == (plain.path / "value.safetensors").read_bytes()


# ---- the command, and what is refused


def test_the_command_compares_the_methods_and_resume_repeats_it(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["--policy", str(root / "sft"), "--experience", str(root / "mixed"), "--evaluation.episodes", "2"]
    path = tmp_path / "run"
    assert main(["improve", str(path), *given, "--by", "filtered-cloning", "--updates", "2", "--compare"]) == 0
    shown = capsys.readouterr().out
    rows = json.loads((path / "comparison.json").read_text())
    assert [row["method"] for row in rows] == ["before", "cloning", "filtered-cloning", "hg-dagger"]
    assert [row["success"]["num_episodes"] for row in rows] == [2] * 4
    assert rows[1]["num_steps"] > rows[2]["num_steps"] > rows[3]["num_steps"] > rows[0]["num_steps"]
    for row in rows:
        assert row["method"] in shown
    assert not (path / "compare" / "filtered-cloning").exists()
    before = (path / "comparison.json").read_bytes()
    assert main(["resume", str(path)]) == 0
    assert (path / "comparison.json").read_bytes() == before


@pytest.mark.parametrize("by", ["filtered-cloning", "recap"])
def test_a_policy_that_sees_smaller_images_improves_from_resized_ones(by: str, tmp_path: Path) -> None:
    env, demos = "toy:touch_purple?size=64", tmp_path / "sft" / "store"
    assert main(["record", str(demos), "--env", env, "--successes", "2"]) == 0
    flow = replace(TINY, encoder=EncoderConfig(filters=(4, 4), latent=8, image_size=(32, 32)))
    config = SFTConfig(env=env, updates=2, batch_size=8, evaluate=False, network="flow", flow=flow)
    run_sft(Run.create(tmp_path / "sft", SFT_KIND, config), silent)
    mixed = tmp_path / "mixed"
    rollout = ["rollout", str(mixed), "--policy", str(tmp_path / "sft"), "--episodes", "2", "--human", "script"]
    assert main([*rollout, "--patience-steps", "4"]) == 0
    assert lines(tmp_path / by, config_of(tmp_path, by, updates=2, batch_size=8))
    assert any((mixed / "derived").rglob("*"))


def test_what_cannot_be_learned_from_is_said(root: Path, tmp_path: Path) -> None:
    assert main(["rollout", str(tmp_path / "alone"), "--policy", str(root / "sft"), "--episodes", "1"]) == 0
    alone = replace(config_of(root, "hg-dagger"), experience=(str(tmp_path / "alone"),))
    with pytest.raises(
        StoreError, match="alone: has no steps of a human; record some with `understudy rollout --human"
    ):
        lines(tmp_path / "run", alone)
    with pytest.raises(ConfigError, match="recap: has no effect with by='cloning'; leave these options out"):
        config_of(root, "cloning", recap=RecapConfig(guidance=2.0))
    with pytest.raises(ConfigError, match="experience: expected at least one store, got none"):
        replace(config_of(root), experience=())
    for change, said in (
        ({"advantage_steps": 0}, "advantage_steps: expected a number from 1, got 0"),
        ({"good_share": 2.0}, "good_share: expected a share from 0 to 1, got 2.0"),
        ({"failure_steps": -1}, "failure_steps: expected None or a number from 0, got -1"),
    ):
        with pytest.raises(ConfigError, match=said):
            RecapConfig(**change)  # type: ignore[arg-type]


def test_recap_needs_a_policy_that_can_be_told(root: Path, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    from understudy.policies.vla import VLAPolicy

    run = Run.create(tmp_path / "vla", SFT_KIND, SFTConfig(env=ENV, demos=str(root / "sft" / "store")))
    tiny = VLAConfig(num_bins=8, vision_hidden=8, vision_layers=1, vision_heads=1, hidden=8, layers=1, heads=1)
    VLAPolicy.new(tiny, ToyTable(size=32).step_spec, ["do it"], seed=0).save(run.policy)
    with pytest.raises(ConfigError, match="by: recap needs a flow policy, which can be told what is good, got a VLAP"):
        lines(tmp_path / "run", replace(config_of(root), policy=str(run.path)))


def test_a_policy_that_was_told_goes_on_to_be_trained_on_demonstrations(plain: Run, root: Path, tmp_path: Path) -> None:
    config = SFTConfig(
        env=ENV, demos=str(root / "sft" / "store"), policy=str(plain.policy), updates=2, batch_size=4, evaluate=False
    )
    run = Run.create(tmp_path / "on", SFT_KIND, config)
    policy, _ = run_sft(run, silent)
    assert isinstance(policy, FlowPolicy)
    assert policy.config.guidance == 1.5
