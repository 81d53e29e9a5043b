"""FiLM: language is mixed into the vision as OpenVLA-OFT does it, from its file and back into it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch.nn import functional

pytest.importorskip("transformers")
pytest.importorskip("peft")

from tests.unit.policies.openvla.make_checkpoint import (
    PICTURE,
    VOCABULARY,
    film_weights,
    instructions,
    load,
    make_checkpoint,
    observations,
    random_weights,
    rngs,
)
from tests.unit.policies.openvla.test_reference import Reference, below, dino_features, prompt, siglip_features

from understudy.policies import PolicyError, Sampling
from understudy.policies.config import LoraConfig
from understudy.policies.lora import add_lora

GREEDY = Sampling(greedy=True)
FILE = "vision_backbone--150000_checkpoint.pt"


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("openvla") / "checkpoint", film=True)


def merged() -> dict[str, torch.Tensor]:
    """The weights of the file by plain names, with adapters of rank 32 and alpha 16 merged by hand."""
    given, found = film_weights(), {}
    for name, weight in given.items():
        if ".lora_" in name:
            continue
        layer, adapted, kind = name.partition(".base_layer.")
        if adapted and kind == "weight":
            weight = weight + 0.5 * given[f"{layer}.lora_B.default.weight"] @ given[f"{layer}.lora_A.default.weight"]
        found[name.replace(".base_layer.", ".").replace(".block.", ".")] = weight
    return found


def vision(weights: dict[str, torch.Tensor], images: torch.Tensor, language: torch.Tensor | None) -> torch.Tensor:
    """A vision transformer written out, behind the block before the last; `language` is mixed in where it is given."""

    def linear(name: str, x: torch.Tensor) -> torch.Tensor:
        return functional.linear(x, weights[f"{name}.weight"], weights[f"{name}.bias"])

    def norm(name: str, x: torch.Tensor) -> torch.Tensor:
        return functional.layer_norm(x, x.shape[-1:], weights[f"{name}.weight"], weights[f"{name}.bias"], eps=1e-6)

    patches = functional.conv2d(images, weights["patch_embed.proj.weight"], weights["patch_embed.proj.bias"], stride=8)
    x = patches.flatten(2).transpose(1, 2) + weights["pos_embed"]
    special = [weights[name].expand(len(x), -1, -1) for name in ("cls_token", "reg_token") if name in weights]
    x = torch.cat([*special, x], dim=1)
    for n in range(2):
        q, k, v = linear(f"blocks.{n}.attn.qkv", norm(f"blocks.{n}.norm1", x)).chunk(3, dim=-1)
        q, k, v = (one.unflatten(-1, (16, -1)).transpose(1, 2) for one in (q, k, v))
        share = (q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5).softmax(dim=-1)
        seen = linear(f"blocks.{n}.attn.proj", (share @ v).transpose(1, 2).flatten(2))
        x = x + seen * weights.get(f"blocks.{n}.ls1.scale_factor", torch.ones(1))
        if language is not None:
            x = (
                x * (1 + linear(f"blocks.{n}.scale", language))[:, None]
                + linear(f"blocks.{n}.shift", language)[:, None]
            )
        more = linear(
            f"blocks.{n}.mlp.fc2", functional.gelu(linear(f"blocks.{n}.mlp.fc1", norm(f"blocks.{n}.norm2", x)))
        )
        x = x + more * weights.get(f"blocks.{n}.ls2.scale_factor", torch.ones(1))
    return x[:, sum(one.shape[1] for one in special) :]


@pytest.mark.parametrize("tower", ["featurizer", "fused_featurizer"])
def test_the_transformer_written_out_is_that_of_transformers(tower: str) -> None:
    """Without language, so that the tests below compare with what others compute, and not with our own."""
    images = torch.randn(2, 3, PICTURE, PICTURE, generator=torch.Generator().manual_seed(0))
    weights = below(random_weights(), f"vision_backbone.{tower}.")
    theirs = (dino_features if tower == "featurizer" else siglip_features)(weights, images)
    torch.testing.assert_close(vision(weights, images, None), theirs, rtol=0, atol=1e-4)


class FilmReference(Reference):
    """OpenVLA from others' parts, with language in its vision."""

    language: torch.Tensor  # [1, width]

    def towers(self, dino: torch.Tensor, siglip: torch.Tensor) -> list[torch.Tensor]:
        weights = merged()
        return [
            vision(below(weights, "vision_backbone.featurizer."), dino, self.language),
            vision(below(weights, "vision_backbone.fused_featurizer."), siglip, self.language),
        ]


def test_logits_equal_the_parts_of_others(directory: Path) -> None:
    """The language is the mean over the embeddings of the prompt and of the end of the text, not of the numbers."""
    weights = {name: w for file in directory.glob("*.safetensors") for name, w in load_file(file).items()}
    reference = FilmReference(weights, bidirectional=True)
    policy = load(directory, cameras=("image", "wrist"), block_steps=2)
    observation, said = observations(2), ["pick up the bowl", "open the drawer of it and put the bowl on the plate"]
    acted = policy.act(observation, said, rngs=rngs(2), sampling=GREEDY)
    together = policy.evaluate(observation, said, acted.replay, sampling=GREEDY).log_prob  # one prompt is padded
    np.testing.assert_allclose(together.detach().numpy(), acted.log_prob, rtol=0, atol=3e-5)
    for row in range(2):
        ids = [*prompt(said[row]), *[1] * 14, 2]
        with torch.no_grad():
            embedded = reference.llama.get_input_embeddings()(torch.tensor([[*prompt(said[row]), 2]]))
            reference.language = embedded.mean(dim=1)
        images = [observation["image"][row], observation["wrist"][row]]
        logits = reference.logits(images, ids, empty=14)[-16:-2, VOCABULARY - 256 : VOCABULARY].detach()
        log_probs = logits.log_softmax(dim=-1)
        expected = 255 - log_probs.argmax(dim=-1).numpy()
        np.testing.assert_array_equal(acted.replay["tokens"][row].ravel(), expected)
        found = acted.log_prob[row].ravel()
        np.testing.assert_allclose(found, log_probs.max(dim=-1).values.numpy(), rtol=0, atol=5e-4)


def test_words_change_what_is_seen(directory: Path, tmp_path: Path) -> None:
    plain = make_checkpoint(tmp_path / "plain")
    for path, mixed in ((directory, True), (plain, False)):
        policy = load(path)
        seen: list[torch.Tensor] = []
        policy.model.projector.register_forward_hook(lambda *x, seen=seen: seen.append(x[2]))
        for text in ("pick up the bowl", "pick up the plate"):
            policy.act(observations(1), [text], rngs=rngs(1), sampling=GREEDY)
        assert torch.equal(seen[0], seen[1]) is not mixed


def test_gradients_reach_every_weight(directory: Path) -> None:
    policy = load(directory)
    tokens = {"tokens": np.random.default_rng(3).integers(0, 256, (3, 8, 7), np.int32)}
    policy.evaluate(observations(3), instructions(3), tokens, sampling=Sampling()).log_prob.sum().backward()
    for name, weight in policy.model.named_parameters():
        assert weight.grad is not None, name
        assert weight.grad.abs().sum() > 0, name


@pytest.mark.parametrize("lora", [False, True])
def test_a_saved_policy_acts_the_same_and_openvla_oft_can_read_it(directory: Path, tmp_path: Path, lora: bool) -> None:
    policy = load(directory)
    if lora:
        add_lora(policy.model, LoraConfig(rank=2), seed=0)
    with torch.no_grad():
        for weight in policy.model.parameters():
            weight += 0.01 if weight.requires_grad else 0.0
    policy.save(tmp_path / "saved")
    one, two = (
        x.evaluate(
            observations(2),
            instructions(2),
            {"tokens": np.random.default_rng(3).integers(0, 256, (2, 8, 7), np.int32)},
            sampling=Sampling(),
        ).log_prob
        for x in (policy, load(tmp_path / "saved"))
    )
    torch.testing.assert_close(two, one, rtol=0, atol=2e-4)
    saved, original = torch.load(tmp_path / "saved" / FILE, weights_only=True), film_weights()
    assert saved.keys() == original.keys()
    assert all(saved[name].shape == weight.shape for name, weight in original.items())
    used, unused = (f"vision_backbone.featurizer.blocks.{n}.block.attn.qkv" for n in (0, 2))
    assert not saved[f"{used}.lora_B.default.weight"].any()
    for kind in ("base_layer", "lora_A.default", "lora_B.default"):
        assert torch.equal(saved[f"{unused}.{kind}.weight"], original[f"{unused}.{kind}.weight"])


def test_it_decodes_in_parallel(directory: Path) -> None:
    with pytest.raises(PolicyError, match="has an action head or FiLM, which decode in parallel, got 'autoregressive'"):
        load(directory, decoding="autoregressive", block_steps=1)
