"""OpenVLA-OFT's L1 head: what it predicts, the distribution around it, and that it trains and is kept."""

from __future__ import annotations

import math
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch.nn import functional

pytest.importorskip("transformers")
pytest.importorskip("peft")

from tests.unit.policies.openvla.make_checkpoint import (
    instructions,
    l1_head_weights,
    load,
    make_checkpoint,
    observations,
    rngs,
    statistics,
)
from tests.unit.policies.openvla.test_reference import Reference, prompt

from understudy.policies import PolicyError, Sampling
from understudy.policies.config import LoraConfig
from understudy.policies.lora import add_lora
from understudy.policies.openvla import laplace

GREEDY = Sampling(greedy=True)
FILE = "action_head--150000_checkpoint.pt"


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("openvla") / "checkpoint", proprio=True, l1_head=True)


def predict(hidden: torch.Tensor) -> torch.Tensor:
    """The head written out: hidden states [H * 7, width] to [H, 7]."""
    w = {name.removeprefix("module.model."): weight for name, weight in l1_head_weights().items()}

    def linear(name: str, x: torch.Tensor) -> torch.Tensor:
        return x @ w[f"{name}.weight"].T + w[f"{name}.bias"]

    def norm(name: str, x: torch.Tensor) -> torch.Tensor:
        return functional.layer_norm(x, x.shape[-1:], w[f"{name}.weight"], w[f"{name}.bias"])

    x = linear("fc1", norm("layer_norm1", hidden.reshape(-1, 7 * hidden.shape[-1]))).clamp(min=0)
    for n in range(2):
        x = x + linear(f"mlp_resnet_blocks.{n}.ffn.1", norm(f"mlp_resnet_blocks.{n}.ffn.0", x)).clamp(min=0)
    return linear("fc2", norm("layer_norm2", x))


def test_the_prediction_equals_the_parts_of_others(directory: Path) -> None:
    """The hidden states are those of transformers' own models, at the tokens before the numbers."""
    weights = {name: w for file in directory.glob("*.safetensors") for name, w in load_file(file).items()}
    policy, reference = (
        load(directory, cameras=("image", "wrist"), block_steps=2),
        Reference(weights, bidirectional=True),
    )
    observation, said = observations(2), ["pick up the bowl", "open the drawer of it"]
    acted = policy.act(observation, said, rngs=rngs(2), sampling=GREEDY)
    stats = statistics()["action"]
    low, high = np.array(stats["q01"]), np.array(stats["q99"])
    for row in range(2):
        images = [observation["image"][row], observation["wrist"][row]]
        hidden = reference.hidden(images, [*prompt(said[row]), *[1] * 14, 2], empty=14)[-16:-2]
        expected = predict(hidden).detach().numpy()
        np.testing.assert_allclose(acted.replay["numbers"][row], expected, rtol=0, atol=1e-4)
        scaled = 0.5 * (expected + 1) * (high - low + 1e-8) + low
        scaled[:, -1] = expected[:, -1]  # the mask leaves the gripper alone
        np.testing.assert_allclose(acted.action[row], np.clip(scaled, -1, 1), rtol=0, atol=1e-4)


def test_laplace_by_hand() -> None:
    """Mean 0.3 and scale 0.1: a quarter of the draws is further than 0.1 log 2 below the mean."""
    given = torch.tensor([0.3, math.log(0.1)]).expand(4, 2)
    drawn = laplace.draw(given, np.array([0.5, 0.25, 0.75, 0.0]), Sampling())
    np.testing.assert_allclose(drawn[:3], [0.3, 0.3 - 0.0693147, 0.3 + 0.0693147], atol=1e-6)
    assert torch.isfinite(drawn).all()
    log_prob, entropy = laplace.weigh(given, drawn, Sampling())
    np.testing.assert_allclose(log_prob[:3], [1.6094379, 0.9162907, 0.9162907], atol=1e-5)  # log 5 - distance / 0.1
    np.testing.assert_allclose(entropy, 1 - 1.6094379, atol=1e-6)
    wide, more = laplace.weigh(given, drawn, Sampling(temperature=2.0))
    np.testing.assert_allclose(wide[1], 0.9162907 - 0.3465736, atol=1e-5)  # log 2.5 - 0.0693147 / 0.2
    np.testing.assert_allclose(more - entropy, math.log(2), atol=1e-6)
    assert (laplace.draw(given, np.array([0.1, 0.2, 0.8, 0.9]), GREEDY) == 0.3).all()


def test_laplace_is_that_of_torch() -> None:
    generator = torch.Generator().manual_seed(0)
    given = torch.randn(1000, 2, generator=generator)
    sampling = Sampling(temperature=1.7)
    drawn = laplace.draw(given, np.random.default_rng(0).random(1000), sampling)
    theirs = torch.distributions.Laplace(given[:, 0], 1.7 * given[:, 1].exp())
    log_prob, entropy = laplace.weigh(given, drawn, sampling)
    torch.testing.assert_close(log_prob, theirs.log_prob(drawn), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(entropy, theirs.entropy(), rtol=1e-5, atol=1e-5)
    below = theirs.cdf(drawn).numpy()  # uniform, if they were drawn from it
    assert abs(below.mean() - 0.5) < 0.03
    assert abs(below.std() - 12**-0.5) < 0.02


def test_the_scale_is_the_one_that_was_asked_for(directory: Path) -> None:
    for scale in (0.05, 0.4):
        policy = load(directory, l1_scale=scale)
        acted = policy.act(observations(2), instructions(2), rngs=rngs(2), sampling=Sampling())
        entropy = policy.evaluate(observations(2), instructions(2), acted.replay, sampling=Sampling()).entropy
        np.testing.assert_allclose(entropy.detach().numpy(), 1 + math.log(2 * scale), atol=1e-5)
    assert load(directory).config.l1_scale == 0.05


def test_gradients_reach_every_weight_that_is_trained(directory: Path) -> None:
    policy = load(directory, use_proprio=("hand", "grip"), value_head=True)
    torch.nn.init.normal_(policy.model.value_head.weight, generator=torch.Generator().manual_seed(0))  # type: ignore[union-attr]
    acted = policy.act(observations(3), instructions(3), rngs=rngs(3), sampling=Sampling())
    told = policy.evaluate(observations(3), instructions(3), acted.replay, sampling=Sampling())
    assert told.value is not None
    (told.log_prob.sum() + told.value.sum()).backward()
    frozen = {name for name, weight in policy.model.named_parameters() if weight.grad is None}
    assert frozen == {"language_model.lm_head.weight"}
    assert not policy.model.language_model.lm_head.weight.requires_grad
    assert not any(name.startswith("language_model.lm_head") for name in policy.parameters())


def test_a_demonstrated_action_is_its_numbers(directory: Path) -> None:
    policy = load(directory)
    action = np.zeros((1, 1, 7), np.float32)
    stats = statistics()["action"]
    action[0, 0, 0], action[0, 0, 6] = stats["q99"][0], 0.25
    found = policy.tokens_of(action)
    assert found.dtype == np.float32
    np.testing.assert_allclose(found[0, 0, [0, 6]], [1.0, 0.25], atol=1e-6)
    np.testing.assert_allclose(policy.actions.of_unit(found.astype(np.float64)), action, atol=1e-6)


def test_a_saved_policy_acts_the_same_and_openvla_oft_can_read_it(directory: Path, tmp_path: Path) -> None:
    policy = load(directory)
    with torch.no_grad():
        for weight in policy.model.parameters():
            weight += 0.01
    policy.save(tmp_path / "saved")
    again = load(tmp_path / "saved", l1_scale=0.7)  # it has a trained one, which it keeps
    one, two = (x.act(observations(3), instructions(3), rngs=rngs(3), sampling=Sampling()) for x in (policy, again))
    np.testing.assert_array_equal(one.replay["numbers"], two.replay["numbers"])
    np.testing.assert_array_equal(one.log_prob, two.log_prob)
    saved = torch.load(tmp_path / "saved" / FILE, weights_only=True)
    assert saved.keys() == {name.removeprefix("module.") for name in l1_head_weights()}
    assert torch.equal(saved["model.fc2.bias"], l1_head_weights()["module.model.fc2.bias"] + 0.01)
    projector = "proprio_projector--150000_checkpoint.pt"  # not used, and kept
    assert (tmp_path / "saved" / projector).read_bytes() == (directory / projector).read_bytes()
    assert "action_head.model.fc1.weight" not in load_file(tmp_path / "saved" / "model.safetensors")


def test_an_adapter_is_merged_into_the_head(directory: Path, tmp_path: Path) -> None:
    policy = load(directory)
    add_lora(policy.model, LoraConfig(rank=2), seed=0)
    trained = {name for name, weight in policy.model.named_parameters() if weight.requires_grad}
    assert any(name.startswith("action_head.model.fc1.lora_A") for name in trained)
    assert {name for name in trained if "lora" not in name} == {"scale_head.weight", "scale_head.bias"}
    with torch.no_grad():
        for name, weight in policy.model.named_parameters():
            if name in trained:
                weight += 0.05
    policy.save(tmp_path / "saved")
    again = load(tmp_path / "saved")
    acted = policy.act(observations(3), instructions(3), rngs=rngs(3), sampling=GREEDY)
    found = again.act(observations(3), instructions(3), rngs=rngs(3), sampling=GREEDY)
    np.testing.assert_allclose(found.replay["numbers"], acted.replay["numbers"], rtol=0, atol=1e-4)


def test_what_does_not_fit_is_said(directory: Path, tmp_path: Path) -> None:
    with pytest.raises(PolicyError, match="has an action head or FiLM, which decode in parallel, got 'autoregressive'"):
        load(directory, decoding="autoregressive", block_steps=1)
    tokens = make_checkpoint(tmp_path / "tokens")
    with pytest.raises(
        PolicyError, match=r"l1_scale: .* has no L1 head, so that it would have no effect; leave it out"
    ):
        load(tokens, l1_scale=0.2)
    policy = load(directory)
    with pytest.raises(
        PolicyError, match=r"replay/numbers: expected \[1, 8, 7\], got tokens; store what act\(\) recorded"
    ):
        policy.evaluate(observations(1), instructions(1), {"tokens": np.zeros((1, 8, 7))}, sampling=Sampling())
    with pytest.raises(PolicyError, match=r"replay/numbers: expected \[1, 8, 7\], got \[1, 3, 7\]"):
        policy.evaluate(observations(1), instructions(1), {"numbers": np.zeros((1, 3, 7))}, sampling=Sampling())
    copy = Path(shutil.copytree(directory, tmp_path / "copy"))
    shutil.copy2(copy / FILE, copy / "action_head--9_checkpoint.pt")
    with pytest.raises(
        PolicyError, match=r"expected one file action_head--\*\.pt, got action_head--15.*; keep the one"
    ):
        load(copy)
    (copy / "action_head--9_checkpoint.pt").unlink()
    weights = l1_head_weights()
    torch.save({name: w[:3] if "fc2" in name else w for name, w in weights.items()}, copy / FILE)
    with pytest.raises(
        PolicyError, match=r"weights: action_head\.model\.layer_norm1\.weight: expected \[96\], got \[224\]"
    ):
        load(copy)
    torch.save({"noise_predictor.fc1.weight": torch.zeros(1)}, copy / FILE)
    with pytest.raises(PolicyError, match=r"expected the weights of an L1 head, got no 'model\.fc1\.weight'"):
        load(copy)
