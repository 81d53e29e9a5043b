"""Our network against others' code: transformers' DINOv2, SigLIP and Llama, and timm's transformers if it is there."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from torch.nn import functional

pytest.importorskip("transformers")

from tests.unit.policies.openvla.make_checkpoint import (
    DINO,
    HIDDEN,
    KEY,
    PADDING,
    PATCH,
    PICTURE,
    SIGLIP,
    SPEC,
    VOCABULARY,
    make_checkpoint,
    make_tokenizer,
    observations,
)
from transformers import (
    Dinov2WithRegistersConfig,
    Dinov2WithRegistersModel,
    LlamaConfig,
    LlamaForCausalLM,
    SiglipVisionConfig,
    SiglipVisionModel,
)

from understudy.policies import Sampling
from understudy.policies.openvla import OpenVLANetwork, OpenVLAPolicy
from understudy.policies.openvla.inputs import crop_center
from understudy.policies.openvla.loading import is_unused
from understudy.policies.openvla.vision import Vit, VitShape

GREEDY = Sampling(greedy=True)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("openvla") / "checkpoint")


@pytest.fixture(scope="module")
def weights(directory: Path) -> dict[str, torch.Tensor]:
    return {name: w for file in directory.glob("*.safetensors") for name, w in load_file(file).items()}


def below(weights: dict[str, torch.Tensor], prefix: str) -> dict[str, torch.Tensor]:
    return {name.removeprefix(prefix): weight for name, weight in weights.items() if name.startswith(prefix)}


def split_qkv(weights: dict[str, torch.Tensor], block: str) -> dict[str, torch.Tensor]:
    parts = {}
    for kind in ("weight", "bias"):
        for name, part in zip("qkv", weights[f"{block}.attn.qkv.{kind}"].chunk(3), strict=True):
            parts[f"{name}.{kind}"] = part
    return parts


def dino_features(weights: dict[str, torch.Tensor], images: torch.Tensor) -> torch.Tensor:
    """DINOv2 of transformers, with registers, filled by its own names, behind the block before the last."""
    model = Dinov2WithRegistersModel(
        Dinov2WithRegistersConfig(
            hidden_size=DINO,
            num_hidden_layers=3,
            num_attention_heads=16,
            mlp_ratio=2,
            image_size=PICTURE,
            patch_size=PATCH,
            num_register_tokens=4,
            layer_norm_eps=1e-6,
            hidden_act="gelu",
        )
    ).eval()
    place = torch.cat([torch.zeros(1, 1, DINO), weights["pos_embed"]], dim=1)  # the class token has none
    state = {
        "embeddings.cls_token": weights["cls_token"],
        "embeddings.register_tokens": weights["reg_token"],
        "embeddings.position_embeddings": place,
        "embeddings.mask_token": torch.zeros(1, DINO),
        "embeddings.patch_embeddings.projection.weight": weights["patch_embed.proj.weight"],
        "embeddings.patch_embeddings.projection.bias": weights["patch_embed.proj.bias"],
        "layernorm.weight": weights["norm.weight"],
        "layernorm.bias": weights["norm.bias"],
    }
    for n in range(3):
        ours, theirs = f"blocks.{n}", f"encoder.layer.{n}"
        for name, part in split_qkv(weights, ours).items():
            state[f"{theirs}.attention.{name[0]}_proj{name[1:]}"] = part
        for kind in ("weight", "bias"):
            state[f"{theirs}.attention.o_proj.{kind}"] = weights[f"{ours}.attn.proj.{kind}"]
            for part in ("norm1", "norm2", "mlp.fc1", "mlp.fc2"):
                state[f"{theirs}.{part}.{kind}"] = weights[f"{ours}.{part}.{kind}"]
        for number in "12":
            state[f"{theirs}.layer_scale{number}.lambda1"] = weights[f"{ours}.ls{number}.scale_factor"]
    model.load_state_dict(state)
    with torch.no_grad():
        return model(images, output_hidden_states=True).hidden_states[-2][:, 5:]


def siglip_features(weights: dict[str, torch.Tensor], images: torch.Tensor) -> torch.Tensor:
    """The same of SigLIP; OpenVLA's has the exact GELU, as timm's has."""
    model = SiglipVisionModel(
        SiglipVisionConfig(  # type: ignore[call-arg]
            hidden_size=SIGLIP,
            intermediate_size=2 * SIGLIP,
            num_hidden_layers=3,
            num_attention_heads=16,
            image_size=PICTURE,
            patch_size=PATCH,
            layer_norm_eps=1e-6,
            hidden_act="gelu",
            vision_use_head=False,
        )
    ).eval()
    prefix = "vision_model." if any(name.startswith("vision_model.") for name in model.state_dict()) else ""
    state = {
        "embeddings.position_embedding.weight": weights["pos_embed"][0],
        "embeddings.patch_embedding.weight": weights["patch_embed.proj.weight"],
        "embeddings.patch_embedding.bias": weights["patch_embed.proj.bias"],
        "post_layernorm.weight": weights["norm.weight"],
        "post_layernorm.bias": weights["norm.bias"],
    }
    for n in range(3):
        ours, theirs = f"blocks.{n}", f"encoder.layers.{n}"
        for name, part in split_qkv(weights, ours).items():
            state[f"{theirs}.self_attn.{name[0]}_proj{name[1:]}"] = part
        for kind in ("weight", "bias"):
            state[f"{theirs}.self_attn.out_proj.{kind}"] = weights[f"{ours}.attn.proj.{kind}"]
            for part, name in (("norm1", "layer_norm1"), ("norm2", "layer_norm2"), ("mlp.fc1",) * 2, ("mlp.fc2",) * 2):
                state[f"{theirs}.{name}.{kind}"] = weights[f"{ours}.{part}.{kind}"]
    model.load_state_dict({prefix + name: weight for name, weight in state.items()})
    with torch.no_grad():
        return model(images, output_hidden_states=True).hidden_states[-2]


@pytest.mark.parametrize("tower", ["featurizer", "fused_featurizer"])
def test_features_equal_those_of_transformers(weights: dict[str, torch.Tensor], tower: str) -> None:
    """Closely enough to tell the exact GELU from the one by tanh."""
    images = 2 * torch.randn(3, 3, PICTURE, PICTURE, generator=torch.Generator().manual_seed(0))
    given = below(weights, f"vision_backbone.{tower}.")
    theirs = (dino_features if tower == "featurizer" else siglip_features)(given, images)
    timm_id = "vit_large_patch14_reg4_dinov2.lvd142m" if tower == "featurizer" else "vit_so400m_patch14_siglip_224"
    shape = VitShape.of({name: tuple(weight.shape) for name, weight in given.items()}, "", timm_id)
    ours = Vit(shape)
    ours.load_state_dict({name: weight for name, weight in given.items() if not shape.is_unused(name)})
    with torch.no_grad():
        torch.testing.assert_close(ours(images), theirs, rtol=0, atol=1e-5)


class Reference:
    """The whole of OpenVLA from others' parts, one row at a time."""

    def __init__(self, weights: dict[str, torch.Tensor], *, bidirectional: bool):
        self.weights = weights
        self.bidirectional = bidirectional
        self.llama = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=VOCABULARY + PADDING,
                hidden_size=HIDDEN,
                intermediate_size=48,
                num_hidden_layers=2,
                num_attention_heads=2,
                pad_token_id=VOCABULARY,
            )
        ).eval()
        self.llama.load_state_dict(below(weights, "language_model."))

    def towers(self, dino: torch.Tensor, siglip: torch.Tensor) -> list[torch.Tensor]:
        """What each vision transformer says of a picture that is scaled as it wants it."""
        return [
            dino_features(below(self.weights, "vision_backbone.featurizer."), dino),
            siglip_features(below(self.weights, "vision_backbone.fused_featurizer."), siglip),
        ]

    def patches(self, image: Any) -> torch.Tensor:
        resized = Image.fromarray(image).resize((PICTURE, PICTURE), Image.Resampling.BICUBIC)
        scaled = torch.from_numpy(np.asarray(resized).copy()).permute(2, 0, 1)[None] / 255
        mean, std = (torch.tensor(x).reshape(1, 3, 1, 1) for x in ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)))
        features = torch.cat(self.towers((scaled - mean) / std, (scaled - 0.5) / 0.5), dim=-1)
        w = below(self.weights, "projector.")
        for layer in ("fc1", "fc2", "fc3"):
            features = functional.linear(features, w[f"{layer}.weight"], w[f"{layer}.bias"])
            features = features if layer == "fc3" else functional.gelu(features)
        return features

    def logits(self, images: list[Any], ids: list[int], *, empty: int) -> torch.Tensor:
        """Of all tokens; the last `empty` ones before the very last have no embedding."""
        with torch.no_grad():
            logits: torch.Tensor = self.llama.lm_head(self.hidden(images, ids, empty=empty))
            return logits

    def hidden(
        self,
        images: list[Any],
        ids: list[int],
        *,
        empty: int,
        noisy: torch.Tensor | None = None,
        beside: tuple[torch.Tensor, ...] = (),
    ) -> torch.Tensor:
        """The last hidden states, behind the final norm. `noisy` are embeddings in place of the empty ones, `beside`
        tokens behind the images."""
        embedded = self.llama.get_input_embeddings()(torch.tensor([ids])).detach()
        if empty:
            embedded[:, -1 - empty : -1] = 0 if noisy is None else noisy
        seen = torch.cat([*(self.patches(image) for image in images), *(one[None, None] for one in beside)], dim=1)
        whole = torch.cat([embedded[:, :1], seen, embedded[:, 1:]], dim=1)
        size = whole.shape[1]
        mask = torch.ones(size, size, dtype=torch.bool)
        mask = mask if self.bidirectional else mask.tril()
        with torch.no_grad():
            found: torch.Tensor = self.llama(
                inputs_embeds=whole, attention_mask=mask[None, None], output_hidden_states=True
            ).hidden_states[-1][0]
            return found


def prompt(instruction: str) -> list[int]:
    ids = make_tokenizer().encode(f"In: What action should the robot take to {instruction}?\nOut:").ids
    assert ids[0] == 1
    assert 0 not in ids
    return [*ids, make_tokenizer().token_to_id("\u2581")]  # type: ignore[list-item]


def test_parallel_decoding_equals_the_parts_of_others(directory: Path, weights: dict[str, torch.Tensor]) -> None:
    observation, said = observations(2), ["pick up the Bowl", "open the drawer of it"]
    for attention in ("bidirectional", "causal"):
        policy = OpenVLAPolicy.load(
            directory, SPEC, unnorm_key=KEY, cameras=("image", "wrist"), block_steps=2, attention=attention
        )
        reference = Reference(weights, bidirectional=attention == "bidirectional")
        acted = policy.act(observation, said, rngs=[np.random.default_rng(0)] * 2, sampling=GREEDY)
        for row in range(2):
            ids = [*prompt(said[row].lower()), *[1] * 14, 2]
            images = [observation["image"][row], observation["wrist"][row]]
            logits = reference.logits(images, ids, empty=14)[-16:-2, VOCABULARY - 256 : VOCABULARY]
            log_probs = logits.log_softmax(dim=-1)
            most_likely = log_probs.argmax(dim=-1)
            token_ids = most_likely + VOCABULARY - 256
            np.testing.assert_array_equal(acted.replay["tokens"][row].ravel(), VOCABULARY - 1 - token_ids.numpy())
            np.testing.assert_allclose(
                acted.log_prob[row].ravel(), log_probs.max(dim=-1).values.numpy(), rtol=0, atol=2e-4
            )


def test_autoregressive_decoding_equals_the_parts_of_others(directory: Path, weights: dict[str, torch.Tensor]) -> None:
    observation = observations(1)
    policy = OpenVLAPolicy.load(
        directory, SPEC, unnorm_key=KEY, cameras=("image",), block_steps=1, decoding="autoregressive"
    )
    acted = policy.act(observation, ["pick up the bowl"], rngs=[np.random.default_rng(0)], sampling=GREEDY)
    reference, ids = Reference(weights, bidirectional=False), prompt("pick up the bowl")
    for number in range(7):
        logits = reference.logits([observation["image"][0]], ids, empty=0)[-1, VOCABULARY - 256 : VOCABULARY]
        log_probs = logits.log_softmax(dim=-1)
        token_id = int(log_probs.argmax()) + VOCABULARY - 256
        assert acted.replay["tokens"][0, 0, number] == VOCABULARY - 1 - token_id
        assert acted.log_prob[0, 0, number] == pytest.approx(float(log_probs.max()), abs=2e-4)
        ids.append(token_id)


def test_timms_own_transformers_give_the_same_features(weights: dict[str, torch.Tensor]) -> None:
    timm = pytest.importorskip("timm.models.vision_transformer", reason="timm is not installed")
    images = torch.randn(2, 3, PICTURE, PICTURE, generator=torch.Generator().manual_seed(0))
    for prefix, width, special, timm_id in (
        (
            "vision_backbone.featurizer.",
            DINO,
            {"reg_tokens": 4, "no_embed_class": True, "init_values": 1e-5},
            "vit_large_patch14_reg4_dinov2.lvd142m",
        ),
        (
            "vision_backbone.fused_featurizer.",
            SIGLIP,
            {"class_token": False, "global_pool": ""},
            "vit_so400m_patch14_siglip_224",
        ),
    ):
        theirs = timm.VisionTransformer(
            img_size=PICTURE,
            patch_size=PATCH,
            embed_dim=width,
            depth=3,
            num_heads=16,
            mlp_ratio=2,
            num_classes=0,
            **special,
        ).eval()
        given = {name.replace("scale_factor", "gamma"): w for name, w in below(weights, prefix).items()}
        theirs.load_state_dict({name: weight for name, weight in given.items() if "attn_pool" not in name})
        shapes = {name: tuple(weight.shape) for name, weight in weights.items()}
        shape = VitShape.of(shapes, prefix, timm_id)
        ours = Vit(shape)
        kept = {name: w for name, w in below(weights, prefix).items() if not shape.is_unused(name)}
        ours.load_state_dict(kept)
        with torch.no_grad():
            expected = theirs.get_intermediate_layers(images, n={1})[0]
            torch.testing.assert_close(ours(images), expected, rtol=1e-4, atol=1e-5)


def test_a_crop_is_bilinear_from_corner_to_corner() -> None:
    """Against torch's grid_sample, which counts corners the same way; whole numbers are met within one."""
    image = np.random.default_rng(0).integers(0, 256, (24, 24, 3), np.uint8)
    line = torch.linspace(-1, 1, 24) * 0.9**0.5
    grid = torch.stack(torch.meshgrid(line, line, indexing="xy"), dim=-1)[None]
    given = torch.from_numpy(image).permute(2, 0, 1)[None].float()
    expected = functional.grid_sample(given, grid, align_corners=True)[0].permute(1, 2, 0).numpy()
    assert np.abs(crop_center(image, 0.9).astype(float) - expected).max() < 1.01
    assert np.abs(crop_center(image, 0.9).astype(float) - image).max() > 20


@pytest.mark.nightly  # a large model
def test_at_its_real_size_it_has_the_published_weights() -> None:
    """As openvla-7b has: 685, 6 and 291 of 7,541,237,184 numbers, those that are not used here among them."""
    dino = VitShape(
        width=1024,
        num_blocks=23,
        num_heads=16,
        mlp_width=4096,
        patch_size=14,
        num_patches=256,
        num_registers=4,
        class_token=True,
        layer_scale=True,
    )
    siglip = replace(
        dino, width=1152, num_blocks=26, mlp_width=4304, num_registers=0, class_token=False, layer_scale=False
    )
    with torch.device("meta"):
        network = OpenVLANetwork(
            [dino, siglip],
            LlamaConfig(vocab_size=32064, pad_token_id=32000),
            action_ids=(31744, 32000),
            bidirectional=True,
            proprio_size=None,
            value_head=False,
        )
    sizes = {name: weight.numel() for name, weight in network.state_dict().items()}
    for prefix, shape in (("vision_backbone.featurizer.", dino), ("vision_backbone.fused_featurizer.", siglip)):
        last = {name: size for name, size in sizes.items() if name.startswith(f"{prefix}blocks.0.")}
        sizes |= {name.replace("blocks.0.", f"blocks.{shape.num_blocks}."): size for name, size in last.items()}
        sizes |= {f"{prefix}norm.weight": shape.width, f"{prefix}norm.bias": shape.width}
    width, wide = siglip.width, siglip.mlp_width
    for name, out, into in (
        ("q", width, width),
        ("kv", 2 * width, width),
        ("proj", width, width),
        ("mlp.fc1", wide, width),
        ("mlp.fc2", width, wide),
    ):
        sizes |= {f"vision_backbone.fused_featurizer.attn_pool.{name}.weight": out * into}
        sizes |= {f"vision_backbone.fused_featurizer.attn_pool.{name}.bias": out}
    for name in ("latent", "norm.weight", "norm.bias"):
        sizes[f"vision_backbone.fused_featurizer.attn_pool.{name}"] = width
    counts = [
        sum(name.startswith(part) for name in sizes) for part in ("vision_backbone", "projector", "language_model")
    ]
    assert counts == [685, 6, 291]
    assert sum(sizes.values()) == 7_541_237_184
    unused = [name for name in sizes if name not in network.state_dict()]
    assert all(is_unused(name, [dino, siglip]) for name in unused)
    assert not any(is_unused(name, [dino, siglip]) for name in network.state_dict())
