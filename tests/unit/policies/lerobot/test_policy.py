"""Policies of lerobot, small and random, in an interpreter that has lerobot: the same blocks as lerobot's own loop."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from tests.contracts import block_policy as contract
from tests.unit.policies.lerobot.made import (
    KINDS,
    SAID,
    SPEC,
    make_policies,
    needs_lerobot,
    observations,
    opened,
    run,
)

from understudy.cli import main
from understudy.core import tree as trees
from understudy.policies import PolicyError, Sampling
from understudy.policies.lerobot.config import LeRobotConfig
from understudy.policies.lerobot.policy import LeRobotPolicy
from understudy.policies.subprocess import PolicyProcessRaised

GREEDY = Sampling(greedy=True)
Policies: TypeAlias = Callable[[str], LeRobotPolicy]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_policies(tmp_path_factory.mktemp("lerobot"))


@pytest.fixture(scope="module")
def policies(directory: Path) -> Iterator[Policies]:
    """A policy of each kind, which is loaded once: the import of lerobot takes seconds."""
    with ExitStack() as stack:
        yield cache(lambda kind: stack.enter_context(opened(directory, kind)))


def act(policy: LeRobotPolicy, num: int = 2, *, seed: int = 0, sampling: Sampling = GREEDY, **options: Any) -> Any:
    return policy.act(observations(num), SAID[:num], rngs=contract.rngs(num, seed), sampling=sampling, **options)


@needs_lerobot
def test_blocks_are_those_of_lerobot(policies: Policies, directory: Path, tmp_path: Path) -> None:
    seen = observations(1)
    given: dict[str, Any] = {name: array[0] for name, array in seen.items()} | {"task": SAID[0]}
    found = {}
    for kind in KINDS:
        policy, noise = policies(kind), None
        if policy.noise_shape is not None:
            noise = np.random.default_rng(1).standard_normal((1, *policy.noise_shape), np.float32)
            given[f"noise/{kind}"] = noise[0]
        acted = act(policy, 1, noise=noise)
        assert acted.action.shape == (1, policy.block_steps, 4)
        np.testing.assert_array_equal(acted.action, np.clip(acted.replay["action"], -1, 1))
        assert trees.equal(act(policy, 1, noise=noise).replay, acted.replay)
        found[kind] = acted.replay["action"][0]
    np.savez(tmp_path / "given.npz", **given)
    run("reference.py", directory, tmp_path / "given.npz", tmp_path / "found.npz", *KINDS)
    with np.load(tmp_path / "found.npz") as wanted:
        for kind in KINDS:
            np.testing.assert_allclose(found[kind], wanted[kind], rtol=0, atol=1e-5, err_msg=kind)
            assert np.ptp(found[kind]) > 1e-3  # not all the same


@needs_lerobot
def test_every_input_counts(policies: Policies, directory: Path) -> None:
    policy = policies("smolvla")
    before = act(policy, 1).replay["action"]
    for name, array in observations(1).items():
        changed = observations(1) | {name: np.zeros_like(array)}
        other = policy.act(changed, SAID[:1], rngs=contract.rngs(1), sampling=GREEDY)
        assert not np.array_equal(other.replay["action"], before), name
    told = policy.act(observations(1), ["open the drawer"], rngs=contract.rngs(1), sampling=GREEDY)
    assert not np.array_equal(told.replay["action"], before)
    with opened(directory, "smolvla", cameras=("wrist", "front")) as swapped:
        assert not np.array_equal(act(swapped, 1).replay["action"], before)


@needs_lerobot
def test_an_adapter_is_merged_into_its_base(policies: Policies) -> None:
    base, adapted = (act(policies(kind)).replay["action"] for kind in ("smolvla", "smolvla_lora"))
    assert np.abs(adapted - base).max() > 1e-3
    assert "adapter_model.safetensors" in policies("smolvla_lora").parameters()


@needs_lerobot
def test_a_block_is_what_its_noise_makes_of_it(directory: Path) -> None:
    with opened(directory, "diffusion_ddim", block_steps=2) as policy:
        assert policy.block_steps == 2
        drawn = act(policy, sampling=Sampling())
        assert drawn.replay["noise"].shape == (2, 8, 4)  # the horizon, and what an action has
        again = act(policy, seed=5, sampling=Sampling(), noise=drawn.replay["noise"])
        assert trees.equal(again.replay, drawn.replay)
        assert not act(policy).replay["noise"].any()  # greedy


@needs_lerobot
def test_the_noise_of_each_step_of_a_sampler_is_drawn_with_the_rows_generator(policies: Policies) -> None:
    policy, noise = policies("diffusion"), np.ones((2, 8, 4), np.float32)
    first, again, other = (act(policy, seed=seed, sampling=Sampling(), noise=noise) for seed in (1, 1, 2))
    assert trees.equal(first.replay, again.replay)
    assert not np.array_equal(first.replay["action"], other.replay["action"])


@needs_lerobot
def test_act_takes_no_noise(policies: Policies) -> None:
    assert policies("act").noise_shape is None
    with pytest.raises(PolicyError, match="noise: LeRobotBlocks makes its blocks of none; leave it out"):
        act(policies("act"), noise=np.zeros((2, 6, 4), np.float32))


@needs_lerobot
def test_the_fingerprint_is_that_of_the_files(policies: Policies, directory: Path) -> None:
    found = policies("act").parameters()
    assert {"config.json", "model.safetensors", "policy_preprocessor.json"} <= set(found)
    (directory / "act" / "note").write_text("another file")
    assert not trees.equal(found, policies("act").parameters())
    (directory / "act" / "note").unlink()


@needs_lerobot
@pytest.mark.parametrize("kind", ["act", "pi0"])
def test_missing_weights_are_no_random_ones(kind: str, directory: Path, tmp_path: Path) -> None:
    broken = tmp_path / kind
    shutil.copytree(directory / kind, broken)
    weights = load_file(broken / "model.safetensors")
    name = next(name for name in weights if "action" in name and name.endswith("bias"))
    save_file({key: array for key, array in weights.items() if key != name}, broken / "model.safetensors")
    (tmp_path / "python").symlink_to(directory / "python")
    (tmp_path / "vlm").symlink_to(directory / "vlm")
    with pytest.raises(PolicyProcessRaised, match=rf"expected all weights of the policy, got no '{name}'; copy"):
        opened(tmp_path, kind)


@needs_lerobot
def test_nothing_is_downloaded(directory: Path) -> None:
    with pytest.raises(
        PolicyProcessRaised, match=r"paligemma-3b-pt-224[\s\S]*in the cache: run `hf download NAME` once"
    ):
        opened(directory, "pi0", tokenizer=None)


@needs_lerobot
def test_evaluate_scores_it(directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = ["evaluate", str(directory / "act"), "--env", "toy:press_button", "--episodes", "2", "--workers", "1"]
    assert main([*given, "--out", str(tmp_path), "--lerobot.block-steps", "3"]) == 0
    assert "of 2" in capsys.readouterr().out
    assert json.loads((tmp_path / "evaluation.json").read_text())["fingerprint"]["parameters"]


def test_an_interpreter_without_lerobot_is_told_what_it_needs(tmp_path: Path) -> None:
    from tests.unit.policies.lerobot.test_checkpoint import write_config

    path = write_config(tmp_path / "policy")
    with pytest.raises(PolicyProcessRaised, match=r"No module named 'lerobot.*pip install 'lerobot\["):
        LeRobotPolicy(path, SPEC, LeRobotConfig(python=sys.executable))
