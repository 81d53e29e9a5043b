"""ActorPolicy: its options, its grippers, its file and what it refuses."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.numpy import save_file
from tests.unit.algorithms.batches import CAMERAS, GRIPPER, STATE, random_tree, small_actor

from understudy.core import ArraySpec, Spec, StepSpec
from understudy.policies import ActorConfig, ActorPolicy, EncoderConfig, Gripper, Inputs, PolicyError, Stats
from understudy.policies.rlpd.actor import BASE_ACTION, Actor

CPU = torch.device("cpu")


def fresh(config: ActorConfig, spec: StepSpec = STATE, seed: int = 0) -> ActorPolicy:
    stats = Stats.none(Inputs(spec.observation, config.encoder.inputs))
    actor = Actor(config, spec, stats, CPU)
    actor.init_parameters(torch.Generator().manual_seed(seed))
    return ActorPolicy(actor)


@pytest.mark.parametrize(
    "change",
    [
        {"hidden": (16, 8)},
        {"log_std": (-4.0, 1.0)},
        {"gripper": GRIPPER},
        {"gripper": replace(GRIPPER, element=0)},
        {"gripper": replace(GRIPPER, values=(-0.5, 0.5))},
        {"encoder": EncoderConfig(filters=(4, 4), latent=6)},
        {"encoder": EncoderConfig(filters=(4, 8), latent=7)},
        {"encoder": EncoderConfig(filters=(4, 8), latent=6, inputs=("front", "state"))},
        {"encoder": EncoderConfig(filters=(4, 8), latent=6, image_size=(8, 6))},
    ],
    ids=str,
)
def test_every_option_changes_the_action_and_survives_a_file(change: dict[str, Any], tmp_path: Path) -> None:
    observation = random_tree(CAMERAS.observation, 8, np.random.default_rng(0))
    plain, changed = fresh(small_actor(), CAMERAS), fresh(small_actor(**change), CAMERAS)
    first, second = (policy.act(observation, rng=np.random.default_rng(1)) for policy in (plain, changed))
    assert not np.array_equal(first.action, second.action)
    changed.save(tmp_path / "it.safetensors")
    assert ActorPolicy.load(tmp_path / "it.safetensors").config == changed.config


def test_the_spread_stays_between_its_bounds() -> None:
    actor = fresh(small_actor(log_std=(-2.0, -1.0))).actor
    for parameter in actor.parameters():
        parameter.mul_(1e3)
    _, log_std = actor.distribution(torch.randn(64, 5, generator=torch.Generator().manual_seed(2)))
    assert log_std.min() >= -2.0
    assert log_std.max() <= -1.0
    assert log_std.max() - log_std.min() > 0.9


def test_a_new_policy_acts_around_the_middle() -> None:
    policy = fresh(small_actor())
    observation = random_tree(STATE.observation, 32, np.random.default_rng(0))
    assert np.abs(policy.act(observation, rng=np.random.default_rng(0), deterministic=True).action).max() < 0.1


# ---- residual actors


def with_base(size: int = 3) -> StepSpec:
    base = ArraySpec(shape=(size,), dtype="float32", low=-1.0, high=1.0)
    return replace(STATE, observation=Spec({**STATE.observation.tree, BASE_ACTION: base}))


def test_a_residual_actor_changes_the_base_action_within_its_scale(tmp_path: Path) -> None:
    spec = with_base()
    observation = random_tree(spec.observation, 64, np.random.default_rng(0))
    for scale in (0.1, 0.5):
        policy = fresh(small_actor(residual_scale=scale), spec)
        mode = policy.act(observation, rng=np.random.default_rng(0), deterministic=True).action
        assert np.abs(mode - observation[BASE_ACTION]).max() < 0.1 * scale  # it begins with the base action
        drawn = policy.act(observation, rng=np.random.default_rng(0)).action
        assert 0.5 * scale < np.abs(drawn - observation[BASE_ACTION]).max() <= scale + 1e-6
        assert np.abs(drawn).max() <= 1.0
        policy.save(tmp_path / "it.safetensors")
        assert ActorPolicy.load(tmp_path / "it.safetensors").config == policy.config


def test_a_residual_actor_leaves_the_gripper_to_its_critic() -> None:
    spec = with_base()
    policy = fresh(small_actor(residual_scale=0.1, gripper=Gripper(values=(-1.0, 1.0), epsilon=0.5)), spec)
    observation = random_tree(spec.observation, 64, np.random.default_rng(0))
    action = policy.act(observation, rng=np.random.default_rng(0)).action
    assert np.abs(action - observation[BASE_ACTION])[:, :2].max() <= 0.1 + 1e-6
    assert set(action[:, 2].tolist()) == {-1.0, 1.0}


def test_a_residual_actor_needs_its_base_action() -> None:
    with pytest.raises(PolicyError, match="residual_scale: expected 'base_action' in what the network sees, got state"):
        fresh(small_actor(residual_scale=0.5))
    for scale in (0.0, 2.5):
        with pytest.raises(PolicyError, match="residual_scale: expected more than 0 and at most 2"):
            small_actor(residual_scale=scale)


# ---- grippers


def test_a_gripper_takes_its_values_and_the_arm_the_rest() -> None:
    policy = fresh(small_actor(gripper=Gripper(element=1, values=(-1.0, 0.5), epsilon=0.5)))
    observation = random_tree(STATE.observation, 200, np.random.default_rng(0))
    action = policy.act(observation, rng=np.random.default_rng(0)).action
    assert set(action[:, 1].tolist()) == {-1.0, 0.5}
    assert len(np.unique(action[:, [0, 2]])) == 400
    arm, choice = policy.actor.split(torch.from_numpy(action))
    assert arm.shape == (200, 2)
    assert choice is not None
    assert torch.equal(policy.actor.join(arm, choice), torch.from_numpy(action))


def test_a_demonstrated_grip_counts_as_the_nearest_value() -> None:
    actor = fresh(small_actor(gripper=Gripper(values=(-1.0, 0.0, 1.0)))).actor
    grips = torch.tensor([-0.9, -0.4, 0.2, 0.6])
    _, choice = actor.split(torch.stack([torch.zeros(4), torch.zeros(4), grips], dim=1))
    assert choice is not None
    assert choice.tolist() == [0, 1, 1, 2]


def test_values_are_in_the_actions_own_units() -> None:
    """A gripper from 0 to 2, as LeRobot has it: nothing is squeezed into -1 to 1 on its way out."""
    action = Spec(ArraySpec(shape=(3,), dtype="float32", low=(-1.0, -1.0, 0.0), high=(1.0, 1.0, 2.0)))
    spec = StepSpec(observation=STATE.observation, action=action)
    policy = fresh(small_actor(gripper=Gripper(values=(0.0, 1.0, 2.0), epsilon=0.9)), spec)
    observation = random_tree(spec.observation, 100, np.random.default_rng(0))
    assert set(policy.act(observation, rng=np.random.default_rng(0)).action[:, 2].tolist()) == {0.0, 1.0, 2.0}


def test_epsilon_is_the_share_of_strays() -> None:
    gripper = Gripper(values=(-1.0, 0.0, 1.0), epsilon=0.3)
    q = np.tile(np.float32([0.1, 0.7, 0.2]), (30_000, 1))
    chosen = gripper.choose(q, np.random.default_rng(0))
    assert np.mean(chosen == 1) == pytest.approx(0.7 + 0.1, abs=0.01)
    assert (gripper.choose(q, None) == 1).all()
    log_prob = gripper.log_prob(torch.from_numpy(q[:3]), torch.tensor([0, 1, 2])).exp().tolist()
    assert log_prob == pytest.approx([0.1, 0.8, 0.1])
    assert gripper.entropy == pytest.approx(-(0.8 * np.log(0.8) + 0.2 * np.log(0.1)))
    assert Gripper(values=(0.0, 1.0)).entropy == 0.0


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: Gripper(values=(1.0,)), "gripper/values: expected two or more different values"),
        (lambda: Gripper(values=(1.0, 1.0, 0.0)), "gripper/values: expected two or more different values"),
        (lambda: Gripper(epsilon=1.0), "gripper/epsilon: expected a chance from 0 to less than 1, got 1.0"),
        (lambda: fresh(small_actor(gripper=Gripper(element=3))), "gripper/element: expected one of 3 numbers"),
        (
            lambda: fresh(small_actor(gripper=Gripper(values=(0.0, 2.0)))),
            "values: expected values from -1 to 1",
        ),
        (lambda: ActorConfig(hidden=()), "hidden: expected at least one positive number"),
        (lambda: ActorConfig(log_std=(1.0, 0.0)), "log_std: expected a lower and a higher bound"),
        (lambda: EncoderConfig(filters=()), "filters: expected at least one positive number"),
        (lambda: EncoderConfig(latent=0), "latent: expected a positive number"),
    ],
)
def test_options_that_make_no_sense_are_refused(make: Any, said: str) -> None:
    with pytest.raises(PolicyError, match=said):
        make()


def test_what_was_not_recorded_cannot_be_weighed() -> None:
    policy = fresh(small_actor(gripper=GRIPPER))
    observation = random_tree(STATE.observation, 4, np.random.default_rng(0))
    replay = policy.act(observation, rng=np.random.default_rng(0)).replay
    with pytest.raises(PolicyError, match=r"replay/gripper: expected what act\(\) recorded, got pre_tanh; store it"):
        policy.evaluate(observation, {"pre_tanh": replay["pre_tanh"]})


# ---- the file


def test_the_file_is_plain_safetensors_with_its_config_and_equal_policies_are_equal_files(tmp_path: Path) -> None:
    policy = fresh(small_actor(gripper=GRIPPER), CAMERAS)
    policy.save(tmp_path / "a.safetensors")
    with safe_open(tmp_path / "a.safetensors", framework="np") as file:
        said = json.loads(file.metadata()["understudy"])
        assert set(said) == {"format", "kind", "version", "config", "observation", "action", "check"}
        assert (said["format"], said["kind"]) == (1, "policy")
        assert "weights/actor/0/weight" in file.keys()  # noqa: SIM118
        assert "stats/mean/observation/state" in file.keys()  # noqa: SIM118
    ActorPolicy.load(tmp_path / "a.safetensors").save(tmp_path / "b.safetensors")
    assert (tmp_path / "a.safetensors").read_bytes() == (tmp_path / "b.safetensors").read_bytes()
    assert {path.name for path in tmp_path.iterdir()} == {"a.safetensors", "b.safetensors"}


def test_a_save_that_fails_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "it.safetensors"
    fresh(small_actor()).save(path)
    before = path.read_bytes()

    def full(fd: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(PolicyError, match=r"it.safetensors: writing failed: No space left on device"):
        fresh(small_actor(), seed=1).save(path)
    assert path.read_bytes() == before


def other_world(**fields: ArraySpec) -> StepSpec:
    return StepSpec(observation=Spec({**CAMERAS.observation.tree, **fields}), action=CAMERAS.action)


@pytest.mark.parametrize(
    ("world", "said"),
    [
        (
            other_world(front=ArraySpec(shape=(32, 32, 3), dtype="uint8")),
            r"observation/front: the policy was made for uint8 \[16, 16, 3\], the world has uint8 \[32, 32, 3\]",
        ),
        (STATE, r"observation/front: the policy was made for uint8 \[16, 16, 3\], the world has nothing of that name"),
        (
            StepSpec(
                observation=CAMERAS.observation, action=Spec(ArraySpec(shape=(3,), dtype="float32", low=-2.0, high=2.0))
            ),
            r"action: the policy was made for bounds from \(-1.0, -1.0, -1.0\) to \(1.0, 1.0, 1.0\), the world has -2",
        ),
        (
            StepSpec(observation=CAMERAS.observation, action=Spec({"arm": CAMERAS.action.tree})),
            r"action: the policy was made for float32 \[3\], the world has nothing of that name",
        ),
    ],
)
def test_another_world_is_refused_by_the_path_that_differs(world: StepSpec, said: str, tmp_path: Path) -> None:
    path = tmp_path / "it.safetensors"
    fresh(small_actor(), CAMERAS).save(path)
    ActorPolicy.load(path, other_world(extra=ArraySpec(shape=(9,), dtype="float32")))  # a field more is no matter
    with pytest.raises(PolicyError, match=r"it.safetensors: " + said):
        ActorPolicy.load(path, world)


def test_files_that_are_no_policy_are_refused(tmp_path: Path) -> None:
    with pytest.raises(PolicyError, match="nowhere: expected a policy, got no such file"):
        ActorPolicy.load(tmp_path / "nowhere")
    for text in ("hello, this is not a file of tensors", '{"learning_rate": 0.1, "steps": 1000}', "{}", ""):
        (tmp_path / "text").write_text(text)
        with pytest.raises(
            PolicyError, match=r"text: is not a policy file: expected .* got another format; give a fil"
        ):
            ActorPolicy.load(tmp_path / "text")
    save_file({"x": np.zeros(3)}, tmp_path / "other")
    with pytest.raises(PolicyError, match="other: expected a policy of Understudy, got a safetensors file of others"):
        ActorPolicy.load(tmp_path / "other")
    for key, value, said in (
        ("kind", "classifier", "expected a policy, got a classifier; load it as that"),
        ("format", 2, "expected format 1, got 2; a newer Understudy wrote it: update"),
    ):
        described = {"format": 1, **fresh(small_actor()).description(), key: value}
        save_file({"x": np.zeros(3)}, tmp_path / "it", {"understudy": json.dumps(described)})
        with pytest.raises(PolicyError, match=said):
            ActorPolicy.load(tmp_path / "it")


def test_a_damaged_policy_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "it.safetensors"
    fresh(small_actor()).save(path)
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(PolicyError, match=r"it.safetensors: expected a policy in safetensors, got"):
        ActorPolicy.load(path)
