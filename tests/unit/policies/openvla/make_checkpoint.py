"""A checkpoint of OpenVLA in miniature: the files and the weight names of the Hub, tiny widths, random weights."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from tokenizers import Regex, Tokenizer, models, pre_tokenizers, processors

from understudy.core import ArraySpec, Spec, StepSpec
from understudy.policies.openvla import OpenVLAPolicy

PICTURE, PATCH = 16, 8  # 4 patches
DINO, SIGLIP, HIDDEN = 32, 48, 32
VOCABULARY, PADDING, BINS = 320, 64, 256
L1_WIDTH = 24  # of an L1 head
FILM_RANK = 32  # of the adapters in a file with FiLM
KEY = "libero_spatial_no_noops"
WORDS = (
    "In",
    "Out",
    "What",
    "action",
    "should",
    "the",
    "robot",
    "take",
    "to",
    "pick",
    "up",
    "bowl",
    "and",
    "put",
    "it",
    "on",
    "plate",
    "open",
    "drawer",
    "of",
    ":",
    "?",
    "\n",
    "\u2581",
)

SPEC = StepSpec(
    observation=Spec(
        {
            "image": ArraySpec(shape=(20, 20, 3), dtype="uint8"),
            "wrist": ArraySpec(shape=(20, 20, 3), dtype="uint8"),
            "hand": ArraySpec(shape=(3,), dtype="float32"),
            "grip": ArraySpec(shape=(2,), dtype="float32"),
        }
    ),
    action=Spec(ArraySpec(shape=(7,), dtype="float32", low=-1.0, high=1.0)),
)


def statistics(scale: float = 1.0) -> dict[str, Any]:
    size = 7
    low = [-0.1 * scale * (1 + n) for n in range(size)]
    high = [0.05 * scale * (2 + n) for n in range(size)]
    return {
        "action": {
            "mean": [0.0] * size,
            "std": [1.0] * size,
            "min": [-9.0] * size,
            "max": [9.0] * size,
            "q01": low,
            "q99": high,
            "mask": [True] * (size - 1) + [False],
        },
        "proprio": {"q01": [-1.0, -2.0, 0.0, 0.0, -0.5], "q99": [1.0, 2.0, 4.0, 0.5, 0.5]},
        "num_trajectories": 3,
    }


def config() -> dict[str, Any]:
    return {
        "architectures": ["OpenVLAForActionPrediction"],
        "model_type": "openvla",
        "arch_specifier": "no-align+fused-gelu-mlp",
        "auto_map": {"AutoConfig": "configuration_prismatic.OpenVLAConfig"},
        "hf_llm_id": "meta-llama/Llama-2-7b-hf",
        "image_resize_strategy": "resize-naive",
        "image_sizes": [PICTURE, PICTURE],
        "llm_backbone_id": "llama2-7b-pure",
        "norm_stats": {"bridge_orig": statistics(0.5), KEY: statistics(9.0)},
        "n_action_bins": BINS,
        "pad_to_multiple_of": PADDING,
        "pad_token_id": VOCABULARY,
        "timm_model_ids": ["vit_large_patch14_reg4_dinov2.lvd142m", "vit_so400m_patch14_siglip_224"],
        "timm_override_act_layers": [None, None],
        "torch_dtype": "bfloat16",
        "transformers_version": "4.40.1",
        "use_fused_vision_backbone": True,
        "vision_backbone_id": "dinosiglip-vit-so-224px",
        "text_config": {
            "model_type": "llama",
            "pad_token_id": VOCABULARY,
            "torch_dtype": "bfloat16",
            "vocab_size": VOCABULARY + PADDING,
            "hidden_size": HIDDEN,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
        },
    }


def preprocessor() -> dict[str, Any]:
    return {
        "image_processor_type": "PrismaticImageProcessor",
        "image_resize_strategy": "resize-naive",
        "input_sizes": [[3, PICTURE, PICTURE]] * 2,
        "interpolations": ["bicubic", "bicubic"],
        "means": [[0.485, 0.456, 0.406], [0.5, 0.5, 0.5]],
        "stds": [[0.229, 0.224, 0.225], [0.5, 0.5, 0.5]],
        "use_fused_vision_backbone": True,
    }


def tower(prefix: str, width: int, *, dino: bool) -> dict[str, tuple[int, ...]]:
    """Three blocks, of which two are used, and the parts that are in the files and not used."""
    shapes: dict[str, tuple[int, ...]] = {
        "patch_embed.proj.weight": (width, 3, PATCH, PATCH),
        "patch_embed.proj.bias": (width,),
        "pos_embed": (1, (PICTURE // PATCH) ** 2, width),
        "norm.weight": (width,),
        "norm.bias": (width,),
    }
    if dino:
        shapes |= {"cls_token": (1, 1, width), "reg_token": (1, 4, width)}
    else:
        shapes |= {"attn_pool.latent": (1, 1, width), "attn_pool.q.weight": (width, width)}
    for n in range(3):
        for norm in ("norm1", "norm2"):
            shapes |= {f"blocks.{n}.{norm}.weight": (width,), f"blocks.{n}.{norm}.bias": (width,)}
        for name, out, into in (
            ("attn.qkv", 3 * width, width),
            ("attn.proj", width, width),
            ("mlp.fc1", 2 * width, width),
            ("mlp.fc2", width, 2 * width),
        ):
            shapes |= {f"blocks.{n}.{name}.weight": (out, into), f"blocks.{n}.{name}.bias": (out,)}
        if dino:
            shapes |= {f"blocks.{n}.ls1.scale_factor": (width,), f"blocks.{n}.ls2.scale_factor": (width,)}
    return {f"vision_backbone.{prefix}.{name}": shape for name, shape in shapes.items()}


def weight_shapes() -> dict[str, tuple[int, ...]]:
    vision = DINO + SIGLIP
    shapes = tower("featurizer", DINO, dino=True) | tower("fused_featurizer", SIGLIP, dino=False)
    for name, out, into in (
        ("fc1", 4 * vision, vision),
        ("fc2", HIDDEN, 4 * vision),
        ("fc3", HIDDEN, HIDDEN),
    ):
        shapes |= {f"projector.{name}.weight": (out, into), f"projector.{name}.bias": (out,)}
    shapes |= {
        "language_model.lm_head.weight": (VOCABULARY + PADDING, HIDDEN),
        "language_model.model.embed_tokens.weight": (VOCABULARY + PADDING, HIDDEN),
        "language_model.model.norm.weight": (HIDDEN,),
    }
    for n in range(2):
        layer = f"language_model.model.layers.{n}"
        shapes |= {f"{layer}.self_attn.{name}_proj.weight": (HIDDEN, HIDDEN) for name in "qkvo"}
        shapes |= {f"{layer}.mlp.{name}_proj.weight": (48, HIDDEN) for name in ("gate", "up")}
        shapes[f"{layer}.mlp.down_proj.weight"] = (HIDDEN, 48)
        shapes |= {f"{layer}.{name}_layernorm.weight": (HIDDEN,) for name in ("input", "post_attention")}
    return shapes


def random_weights(seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, shape in weight_shapes().items():
        drawn = torch.randn(shape, generator=generator)
        if "norm" in name or "scale_factor" in name:
            weights[name] = 1 + 0.1 * drawn if name.endswith(("weight", "factor")) else 0.1 * drawn
        else:
            weights[name] = drawn * (0.7 / shape[-1] ** 0.5 if len(shape) > 1 else 0.1)
    weights["language_model.lm_head.weight"] *= 4  # so that some bins are likelier than others
    return weights


def make_checkpoint(
    directory: Path,
    *,
    seed: int = 0,
    proprio: bool = False,
    l1_head: bool = False,
    diffusion: bool = False,
    film: bool = False,
    dtype: torch.dtype = torch.float32,
) -> Path:
    """Write it; two shards and an index, as the large ones have."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config()))
    (directory / "preprocessor_config.json").write_text(json.dumps(preprocessor()))
    (directory / "dataset_statistics.json").write_text(json.dumps({KEY: statistics()}))
    make_tokenizer().save(str(directory / "tokenizer.json"))
    (directory / "modeling_prismatic.py").write_text("raise RuntimeError('code of a checkpoint was run')\n")
    (directory / "configuration_prismatic.py").write_text("raise RuntimeError('code of a checkpoint was run')\n")
    weights = {name: weight.to(dtype) for name, weight in random_weights(seed).items()}
    names = sorted(weights)
    weight_map = {}
    for number, part in enumerate((names[::2], names[1::2]), 1):
        file = f"model-0000{number}-of-00002.safetensors"
        save_file({name: weights[name] for name in part}, directory / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    if proprio:
        generator = torch.Generator().manual_seed(seed + 1)
        shapes = {
            "fc1.weight": (HIDDEN, 5),
            "fc1.bias": (HIDDEN,),
            "fc2.weight": (HIDDEN, HIDDEN),
            "fc2.bias": (HIDDEN,),
        }
        state = {f"module.{name}": torch.randn(shape, generator=generator) for name, shape in shapes.items()}
        torch.save(state, directory / "proprio_projector--150000_checkpoint.pt")
    if l1_head:
        torch.save(l1_head_weights(seed), directory / "action_head--150000_checkpoint.pt")
    if diffusion:
        head = {name.replace("model.", "noise_predictor.mlp_resnet."): w for name, w in l1_head_weights(seed).items()}
        torch.save(head, directory / "action_head--150000_checkpoint.pt")
        torch.save(noisy_action_weights(seed), directory / "noisy_action_projector--150000_checkpoint.pt")
    if film:
        torch.save(film_weights(seed), directory / "vision_backbone--150000_checkpoint.pt")
    return directory


def film_weights(seed: int = 0) -> dict[str, torch.Tensor]:
    """Of a vision backbone with FiLM, as OpenVLA-OFT saves it: blocks in wrappers, adapters at linear layers."""
    generator = torch.Generator().manual_seed(seed + 3)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator) / shape[-1] ** 0.5

    weights = {}
    for name, weight in random_weights(seed + 1).items():
        if not name.startswith("vision_backbone."):
            continue
        wrapped = re.sub(r"\.blocks\.(\d+)\.", r".blocks.\1.block.", name)
        layer, _, kind = wrapped.rpartition(".")
        if not layer.endswith(("qkv", ".proj", "fc1", "fc2", "attn_pool.q")) or "patch_embed" in layer:
            weights[wrapped] = weight
            continue
        weights[f"{layer}.base_layer.{kind}"] = weight
        if kind == "weight":
            weights[f"{layer}.lora_A.default.weight"] = 0.3 * drawn(FILM_RANK, weight.shape[1])
            weights[f"{layer}.lora_B.default.weight"] = 0.3 * drawn(weight.shape[0], FILM_RANK)
    for tower_name, width in (("featurizer", DINO), ("fused_featurizer", SIGLIP)):
        for n in range(3):
            for part in ("scale", "shift"):
                layer = f"vision_backbone.{tower_name}.blocks.{n}.{part}"
                weights |= {f"{layer}.weight": drawn(width, HIDDEN), f"{layer}.bias": 0.1 * drawn(width)}
    return weights


def noisy_action_weights(seed: int = 0) -> dict[str, torch.Tensor]:
    """Of the projector of noisy numbers, as DDP saves it."""
    generator = torch.Generator().manual_seed(seed + 4)
    shapes = {"fc1.weight": (HIDDEN, 1), "fc1.bias": (HIDDEN,), "fc2.weight": (HIDDEN, HIDDEN), "fc2.bias": (HIDDEN,)}
    return {f"module.{name}": 0.3 * torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def l1_head_weights(seed: int = 0) -> dict[str, torch.Tensor]:
    """Of OpenVLA-OFT's L1 head, by the names that it has in DDP."""
    generator = torch.Generator().manual_seed(seed + 2)
    shapes: dict[str, tuple[int, ...]] = {
        "layer_norm1.weight": (7 * HIDDEN,),
        "fc1.weight": (L1_WIDTH, 7 * HIDDEN),
        "layer_norm2.weight": (L1_WIDTH,),
        "fc2.weight": (7, L1_WIDTH),
    }
    for n in range(2):
        shapes |= {f"mlp_resnet_blocks.{n}.ffn.0.weight": (L1_WIDTH,)}
        shapes |= {f"mlp_resnet_blocks.{n}.ffn.1.weight": (L1_WIDTH, L1_WIDTH)}
    weights = {}
    for name, shape in shapes.items():
        drawn = torch.randn(shape, generator=generator)
        weights[name] = 1 + 0.1 * drawn if len(shape) == 1 else drawn / shape[-1] ** 0.5
        weights[name.replace("weight", "bias")] = 0.1 * torch.randn(shape[:1], generator=generator)
    return {f"module.model.{name}": weight for name, weight in weights.items()}


def make_tokenizer() -> Tokenizer:
    vocabulary = {"<unk>": 0, "<s>": 1, "</s>": 2}
    for word in WORDS:
        vocabulary.setdefault(word, len(vocabulary))
    while len(vocabulary) < VOCABULARY:
        vocabulary[f"<{len(vocabulary)}>"] = len(vocabulary)
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"\w+|[^\w ]"), "removed", invert=True)
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return tokenizer


def observations(num: int, seed: int = 0) -> dict[str, np.ndarray[Any, Any]]:
    rng = np.random.default_rng(seed)
    return {
        "image": rng.integers(0, 256, (num, 20, 20, 3), np.uint8),
        "wrist": rng.integers(0, 256, (num, 20, 20, 3), np.uint8),
        "hand": rng.normal(size=(num, 3)).astype(np.float32),
        "grip": rng.normal(size=(num, 2)).astype(np.float32),
    }


INSTRUCTIONS = ("pick up the bowl", "open the drawer of it and put the bowl on the plate", "pick up the plate")


def instructions(num: int) -> list[str]:
    return [INSTRUCTIONS[row % len(INSTRUCTIONS)] for row in range(num)]


def rngs(num: int, seed: int = 0) -> list[np.random.Generator]:
    return [np.random.default_rng([seed, row]) for row in range(num)]


def load(directory: Path, **options: Any) -> OpenVLAPolicy:
    return OpenVLAPolicy.load(directory, SPEC, **{"unnorm_key": KEY, "cameras": ("image",), **options})
