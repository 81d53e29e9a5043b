"""What every policy promises: `evaluate` finds what `act` recorded, seeds repeat, files carry all of it."""

from __future__ import annotations

import atexit
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.unit.algorithms.batches import CAMERAS, GRIPPER, STATE, random_batch, random_tree, small_actor, small_sac

from understudy.algorithms import Cloning, CloningConfig
from understudy.core import ArraySpec, Spec, StepSpec
from understudy.core import tree as trees
from understudy.policies import ActorPolicy, EncoderConfig, Inputs, Policy, PolicyError, Stats

torch.set_num_threads(1)

TREE_ACTION = StepSpec(
    observation=STATE.observation,
    action=Spec(
        {
            "arm": ArraySpec(shape=(2, 2), dtype="float32", low=-0.5, high=2.0),
            "hand": ArraySpec(shape=(1,), dtype="float64", low=0.0, high=0.08),
        }
    ),
)
BARE = StepSpec(observation=Spec(ArraySpec(shape=(5,), dtype="float32")), action=STATE.action)


def learned(spec: StepSpec, **actor: Any) -> ActorPolicy:
    """A policy with some updates behind it, so that nothing is zero."""
    sac = small_sac(spec, actor=small_actor(**actor))
    for seed in range(3):
        sac.update(random_batch(spec, seed=seed))
    return sac.policy(version=3)


def cloned(spec: StepSpec) -> ActorPolicy:
    batch = random_batch(spec, 64)
    stats = Stats.of_data(Inputs(spec.observation), [batch.observation])
    cloning = Cloning(CloningConfig(actor=small_actor(), loss="likelihood"), spec, stats, seed=1)
    for _ in range(3):
        cloning.update(batch)
    return cloning.policy(version=3)


@cache
def tiny_vit() -> str:
    """A directory with a vision encoder of transformers with random weights; it is removed at exit."""
    transformers = pytest.importorskip("transformers")
    size = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    torch.manual_seed(0)
    directory = tempfile.mkdtemp()
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    config = transformers.ViTConfig(image_size=16, patch_size=8, **size)
    transformers.ViTModel(config, add_pooling_layer=False).save_pretrained(directory)
    return directory


def pretrained(*, frozen: bool) -> ActorPolicy:
    encoder = EncoderConfig(kind="pretrained", pretrained=tiny_vit(), frozen=frozen, latent=6, spatial_features=2)
    return learned(CAMERAS, encoder=encoder)


POLICIES: dict[str, tuple[StepSpec, Callable[[], ActorPolicy]]] = {
    "state": (STATE, lambda: learned(STATE)),
    "cameras": (CAMERAS, lambda: learned(CAMERAS)),
    "gripper": (STATE, lambda: learned(STATE, gripper=GRIPPER)),
    "gripper and cameras": (CAMERAS, lambda: learned(CAMERAS, gripper=GRIPPER)),
    "tree of actions": (TREE_ACTION, lambda: learned(TREE_ACTION)),
    "bare observation": (BARE, lambda: learned(BARE)),
    "cloned": (CAMERAS, lambda: cloned(CAMERAS)),
    "resnet10": (CAMERAS, lambda: learned(CAMERAS, encoder=EncoderConfig(kind="resnet10", latent=6))),
    "pretrained, frozen": (CAMERAS, lambda: pretrained(frozen=True)),
    "pretrained, trained": (CAMERAS, lambda: pretrained(frozen=False)),
}


@pytest.fixture(params=POLICIES)
def case(request: pytest.FixtureRequest) -> tuple[StepSpec, ActorPolicy, Any]:
    spec, make = POLICIES[request.param]
    return spec, make(), random_tree(spec.observation, 16, np.random.default_rng(9))


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def test_evaluate_finds_what_act_recorded(case: tuple[StepSpec, Policy, Any]) -> None:
    _, policy, observation = case
    for deterministic in (False, True):
        acted = policy.act(observation, rng=rng(), deterministic=deterministic)
        evaluated = policy.evaluate(observation, acted.replay)
        np.testing.assert_array_equal(evaluated.log_prob.numpy(), acted.log_prob)
        assert np.isfinite(evaluated.entropy.numpy()).all()
        assert (acted.value is None) == (evaluated.value is None)
        assert acted.version == policy.version == 3


def test_the_recorded_choice_is_the_executed_one(case: tuple[StepSpec, ActorPolicy, Any]) -> None:
    """From the replay alone, without the policy's own code: u is the atanh of the executed number."""
    spec, policy, observation = case
    acted = policy.act(observation, rng=rng())
    unit = policy.actor.actions.to_unit(acted.action, torch.device("cpu"))
    arm, choice = policy.actor.split(unit)
    np.testing.assert_allclose(np.tanh(acted.replay["pre_tanh"]), arm.numpy(), atol=1e-5)
    if choice is not None:
        np.testing.assert_array_equal(acted.replay["gripper"], choice.numpy())
    for row in range(16):
        spec.action.check(trees.map_leaves(lambda leaf, row=row: leaf[row], acted.action), "action")


def test_evaluate_is_differentiable(case: tuple[StepSpec, ActorPolicy, Any]) -> None:
    _, policy, observation = case
    acted = policy.act(observation, rng=rng())
    policy.actor.requires_grad_()
    evaluated = policy.evaluate(observation, acted.replay)
    named = {name: one for name, one in policy.actor.named_parameters() if not name.startswith("gripper.")}
    for number in (evaluated.log_prob.sum(), evaluated.entropy.sum()):
        gradients = torch.autograd.grad(number, list(named.values()), retain_graph=True, allow_unused=True)
        for name, gradient in zip(named, gradients, strict=True):
            if ".backbone.pooler." in name:  # no feature of a pretrained encoder depends on it
                assert gradient is None
            elif not name.endswith("key.bias"):  # a softmax does not change with it
                assert gradient is not None, name
                assert gradient.abs().sum() > 0, name


def test_the_same_seed_gives_the_same_action_and_another_another(case: tuple[StepSpec, Policy, Any]) -> None:
    _, policy, observation = case
    first, again, other = (flat(policy.act(observation, rng=rng(seed)).action) for seed in (1, 1, 2))
    np.testing.assert_array_equal(first, again)
    assert not np.array_equal(first, other)


def test_deterministic_draws_nothing(case: tuple[StepSpec, Policy, Any]) -> None:
    _, policy, observation = case
    used = rng(1)
    first = policy.act(observation, rng=used, deterministic=True)
    np.testing.assert_array_equal(
        flat(first.action), flat(policy.act(observation, rng=rng(2), deterministic=True).action)
    )
    assert used.bit_generator.state == rng(1).bit_generator.state


def test_one_and_a_batch_agree(case: tuple[StepSpec, Policy, Any]) -> None:
    spec, policy, observation = case
    together = policy.act(observation, rng=rng(), deterministic=True)
    for row in (0, 15):
        one = trees.map_leaves(lambda leaf, row=row: leaf[row], observation)
        alone = policy.act(one, rng=rng(), deterministic=True)
        spec.action.check(alone.action, "action")
        np.testing.assert_allclose(flat(alone.action)[0], flat(together.action)[row], rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(alone.log_prob, together.log_prob[row], rtol=1e-4, atol=1e-4)
        assert alone.log_prob.shape == ()
        assert {name: array.shape for name, array in alone.replay.items()} == {
            name: array.shape[1:] for name, array in together.replay.items()
        }


def test_the_mode_is_more_likely_than_samples_are_on_average(case: tuple[StepSpec, Policy, Any]) -> None:
    _, policy, observation = case
    sampled = policy.act(observation, rng=rng(), deterministic=False)
    assert not np.array_equal(flat(sampled.action), flat(policy.act(observation, rng=rng(), deterministic=True).action))


def test_published_parameters_are_the_policy(case: tuple[StepSpec, ActorPolicy, Any]) -> None:
    _, policy, observation = case
    parameters = policy.parameters()
    assert all(leaf.dtype == np.float32 for _, leaf in trees.leaves(parameters))
    other = ActorPolicy.of(parameters, policy.description())
    assert_same_actions(policy, other, observation)
    newer = other.with_parameters(trees.map_leaves(lambda leaf: leaf * 1.5, parameters), version=4)
    assert newer.version == 4
    assert not np.array_equal(
        flat(newer.act(observation, rng=rng()).action), flat(policy.act(observation, rng=rng()).action)
    )
    with pytest.raises(PolicyError, match="they are of another network"):
        other.with_parameters({**parameters, "weights": {"actor": {}}}, version=5)


def test_a_saved_policy_acts_the_same(case: tuple[StepSpec, ActorPolicy, Any], tmp_path: Path) -> None:
    spec, policy, observation = case
    policy.save(tmp_path / "policy.safetensors")
    assert_same_actions(policy, ActorPolicy.load(tmp_path / "policy.safetensors", spec), observation)


def test_a_saved_policy_acts_the_same_in_another_process(tmp_path: Path) -> None:
    policy = learned(CAMERAS, gripper=GRIPPER)
    observation = random_tree(CAMERAS.observation, 16, rng(9))
    policy.save(tmp_path / "policy.safetensors")
    np.savez(tmp_path / "observation.npz", **observation)
    subprocess.run([sys.executable, "-c", OTHER_PROCESS, str(tmp_path)], check=True)
    there = np.load(tmp_path / "acted.npz")
    acted = policy.act(observation, rng=rng())
    np.testing.assert_array_equal(there["action"], acted.action)
    np.testing.assert_array_equal(there["log_prob"], acted.log_prob)
    there.close()


OTHER_PROCESS = """
import sys
from pathlib import Path
import numpy as np
import torch
from understudy.policies import ActorPolicy
torch.set_num_threads(1)
place = Path(sys.argv[1])
observation = dict(np.load(place / "observation.npz"))
acted = ActorPolicy.load(place / "policy.safetensors").act(observation, rng=np.random.default_rng(0))
np.savez(place / "acted.npz", action=acted.action, log_prob=acted.log_prob)
"""


def flat(action: Any) -> Any:
    """[B, D]; one action is a batch of one."""
    leaves = [np.asarray(leaf) for _, leaf in trees.leaves(action)]
    size = 16 if len(leaves[0]) == 16 else 1
    return np.concatenate([leaf.reshape(size, -1) for leaf in leaves], axis=1)


def assert_same_actions(policy: ActorPolicy, other: ActorPolicy, observation: Any) -> None:
    mine, theirs = (one.act(observation, rng=rng()) for one in (policy, other))
    np.testing.assert_array_equal(flat(mine.action), flat(theirs.action))
    np.testing.assert_array_equal(mine.log_prob, theirs.log_prob)
    assert mine.version == theirs.version
