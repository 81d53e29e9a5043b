"""OpenVLA-OFT's diffusion head: it denoises as the original does, and can act and not be trained."""

from __future__ import annotations

import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch.nn import functional

pytest.importorskip("transformers")
pytest.importorskip("peft")

from tests.unit.policies.openvla.make_checkpoint import (
    HIDDEN,
    instructions,
    load,
    make_checkpoint,
    noisy_action_weights,
    observations,
    rngs,
)
from tests.unit.policies.openvla.test_l1_head import predict
from tests.unit.policies.openvla.test_reference import Reference, prompt
from tests.unit.training.onpolicy.making import make_config

from understudy.policies import Acted, PolicyError, Sampling
from understudy.policies.openvla import OpenVLAConfig, OpenVLAPolicy, diffusion
from understudy.training.onpolicy.policy_files import load_policy
from understudy.training.runs.config import ConfigError

GREEDY = Sampling(greedy=True)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("openvla") / "checkpoint", proprio=True, diffusion=True)


# ---- DDIM


def test_the_steps_are_those_of_diffusers() -> None:
    """Golden numbers of diffusers 0.42.1, DDIMScheduler(50, beta_schedule="squaredcos_cap_v2")."""
    shares = diffusion.signal_shares()
    assert len(shares) == 50
    golden = {0: 0.998252511, 1: 0.994570017, 10: 0.879122555, 25: 0.462706864, 40: 0.076649822, 49: 9.71e-07}
    for step, share in golden.items():
        assert shares[step] == pytest.approx(share, rel=1e-3)
    for num_steps, first, wanted in (
        (50, [49, 48, 47], [0.9999782, 0.0640425, -0.0068786, 0.0077363]),
        (10, [45, 40, 35], [0.1607532, 0.028277, 0.0199118, 0.0050547]),
        (7, [42, 35, 28], [0.1612847, 0.0034323, 0.0632055, 0.0080639]),
        (1, [0], [0.4795701, -1.0, 1.0, 0.0939053]),
    ):
        steps = diffusion.timesteps(num_steps)
        assert [now for now, _ in steps[:3]] == first
        numbers = torch.tensor([0.5, -1.5, 2.0, 0.1], dtype=torch.float64)
        for times in steps:
            numbers = diffusion.denoise(numbers, torch.sin(3 * numbers) * 0.5, times)
        np.testing.assert_allclose(numbers, wanted, atol=2e-5)


def test_a_perfect_prediction_gives_the_numbers_back() -> None:
    """Noise that is known exactly: whatever the number of steps, what it was added to remains."""
    wanted = torch.tensor([0.5, -0.9, 0.0])
    shares = diffusion.signal_shares()
    for num_steps in (1, 7, 10, 50):
        noise = torch.tensor([1.0, -2.0, 0.3])
        steps = diffusion.timesteps(num_steps)
        share = shares[steps[0][0]]
        numbers = math.sqrt(share) * wanted + math.sqrt(1 - share) * noise
        for times in steps:
            now = shares[times[0]]
            numbers = diffusion.denoise(numbers, (numbers - math.sqrt(now) * wanted) / math.sqrt(1 - now), times)
        np.testing.assert_allclose(numbers, wanted, atol=1e-4)


def test_the_embedding_of_a_time() -> None:
    found = diffusion.time_embedding(torch.tensor([0.0, 2.0]), 6)
    np.testing.assert_allclose(found[0], [0, 0, 0, 1, 1, 1])
    rates = [1.0, 0.01, 0.0001]
    np.testing.assert_allclose(found[1], [*np.sin(2 * np.array(rates)), *np.cos(2 * np.array(rates))], atol=1e-6)


# ---- the policy


def greedy(policy: OpenVLAPolicy, seed: int = 0) -> Acted:
    return policy.act(observations(2), instructions(2), rngs=rngs(2, seed), sampling=GREEDY)


def test_actions_equal_the_parts_of_others(directory: Path) -> None:
    """The hidden states are those of transformers' own models; noisy numbers and the time are put in by hand."""
    weights = {name: w for file in directory.glob("*.safetensors") for name, w in load_file(file).items()}
    reference = Reference(weights, bidirectional=True)
    w = {name.removeprefix("module."): weight for name, weight in noisy_action_weights().items()}
    options: dict[str, Any] = {"cameras": ("image", "wrist"), "block_steps": 2, "num_diffusion_steps": 4}
    observation, said = observations(2), ["pick up the bowl", "open the drawer of it"]
    acted = load(directory, **options).act(observation, said, rngs=rngs(2), sampling=Sampling(temperature=0.8))
    for row in range(2):
        images = [observation["image"][row], observation["wrist"][row]]
        noise = rngs(2)[row].standard_normal((2, 7), np.float32) * np.float32(0.8)
        np.testing.assert_array_equal(acted.replay["noise"][row], noise)
        numbers = torch.from_numpy(noise).reshape(14)
        for times in diffusion.timesteps(4):
            hidden = functional.gelu(numbers[:, None] @ w["fc1.weight"].T + w["fc1.bias"])
            noisy = hidden @ w["fc2.weight"].T + w["fc2.bias"]
            time = diffusion.time_embedding(torch.tensor([float(times[0])]), HIDDEN)[0]
            ids = [*prompt(said[row]), *[1] * 14, 2]
            hidden = reference.hidden(images, ids, empty=14, noisy=noisy, beside=(time,))[-16:-2]
            numbers = diffusion.denoise(numbers, predict(hidden).detach().reshape(14), times)
        np.testing.assert_allclose(acted.replay["numbers"][row], numbers.reshape(2, 7), rtol=0, atol=2e-4)


def test_the_number_of_steps_and_the_noise_decide(directory: Path) -> None:
    given: dict[str, Any] = {"sampling": Sampling(), "rngs": rngs(2)}
    found = [
        load(directory, num_diffusion_steps=steps).act(observations(2), instructions(2), **{**given, "rngs": rngs(2)})
        for steps in (2, 5)
    ]
    assert not np.array_equal(found[0].action, found[1].action)
    assert OpenVLAConfig().num_diffusion_steps == 50
    policy = load(directory, num_diffusion_steps=2)
    first, second = (
        policy.act(observations(2), instructions(2), rngs=rngs(2, seed), sampling=GREEDY) for seed in (0, 1)
    )
    np.testing.assert_array_equal(first.action, second.action)
    assert not first.replay["noise"].any()


def test_noise_can_be_given(directory: Path, tmp_path: Path) -> None:
    policy = load(directory, num_diffusion_steps=2)
    sampled = policy.act(observations(2), instructions(2), rngs=rngs(2), sampling=Sampling())
    given = policy.act(observations(2), instructions(2), rngs=rngs(2), sampling=GREEDY, noise=sampled.replay["noise"])
    assert policy.noise_shape == given.replay["noise"].shape[1:]
    np.testing.assert_array_equal(given.action, sampled.action)
    with pytest.raises(PolicyError, match="noise: expected finite numbers"):
        policy.act(observations(2), instructions(2), rngs=rngs(2), sampling=GREEDY, noise=sampled.replay["noise"][:1])
    plain = load(make_checkpoint(tmp_path / "plain"))
    assert plain.noise_shape is None
    with pytest.raises(PolicyError, match="noise: this policy has no diffusion head"):
        plain.act(observations(2), instructions(2), rngs=rngs(2), sampling=GREEDY, noise=sampled.replay["noise"])


def test_proprioception_is_seen(directory: Path) -> None:
    policy = load(directory, num_diffusion_steps=2, use_proprio=("hand", "grip"))
    seen = observations(2)
    moved = {**seen, "hand": seen["hand"] + 0.5}
    first, second = (policy.act(one, instructions(2), rngs=rngs(2), sampling=GREEDY).action for one in (seen, moved))
    assert not np.array_equal(first, second)
    assert policy.num_tokens("go") == load(directory).num_tokens("go") + 1


def test_it_is_saved_as_it_was(directory: Path, tmp_path: Path) -> None:
    policy = load(directory, num_diffusion_steps=2)
    policy.save(tmp_path / "saved")
    again = load(tmp_path / "saved", num_diffusion_steps=2)
    first, second = (
        one.act(observations(2), instructions(2), rngs=rngs(2), sampling=GREEDY) for one in (policy, again)
    )
    np.testing.assert_array_equal(first.action, second.action)


def test_it_is_not_trained(directory: Path, tmp_path: Path) -> None:
    text = "policy: it has a diffusion head, whose log-probs do not depend on its weights"
    policy = load(directory)
    assert policy.why_no_policy_gradient is not None
    with pytest.raises(PolicyError, match=text):
        policy.tokens_of(np.zeros((1, 8, 7), np.float32))
    config = make_config(directory, openvla={"cameras": ("image",), "unnorm_key": policy.config.unnorm_key})
    with pytest.raises(ConfigError, match=text):
        load_policy(config, directory, policy.spec, adapted=False)


def test_options_that_make_no_sense_are_refused(directory: Path, tmp_path: Path) -> None:
    for steps in (0, 51):
        with pytest.raises(PolicyError, match="num_diffusion_steps: expected 1 to 50"):
            OpenVLAConfig(num_diffusion_steps=steps)
    with pytest.raises(PolicyError, match=r"l1_scale: .* has no L1 head"):
        load(directory, l1_scale=0.3)
    with pytest.raises(PolicyError, match=r"value_head: .* has a diffusion head"):
        load(directory, value_head=True)
    with pytest.raises(PolicyError, match=r"decoding: .* has an action head"):
        load(directory, decoding="autoregressive", block_steps=1)
    plain = make_checkpoint(tmp_path / "plain")
    with pytest.raises(PolicyError, match=r"num_diffusion_steps: .* has no diffusion head"):
        load(plain, num_diffusion_steps=5)
    mixed = make_checkpoint(tmp_path / "mixed", l1_head=True)
    shutil.copy2(directory / "noisy_action_projector--150000_checkpoint.pt", mixed)
    with pytest.raises(PolicyError, match=r"expected the weights of a diffusion head, got no .*; remove noisy_action"):
        load(mixed)
