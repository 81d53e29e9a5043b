"""From a checkpoint's files to a network, and back; weights by their published names."""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import LlamaConfig

from understudy.durable import files
from understudy.policies.openvla import film_layers
from understudy.policies.openvla.checkpoint import (
    ACTION_HEAD,
    FILM,
    INDEX_FILE,
    NOISY_ACTION,
    PROPRIO,
    SCALE_HEAD,
    VALUE_HEAD,
    Checkpoint,
)
from understudy.policies.openvla.config import OpenVLAConfig
from understudy.policies.openvla.network import ActionHeadShape, OpenVLANetwork, fresh_rotary
from understudy.policies.openvla.vision import VitShape
from understudy.policies.protocol import PolicyError

SHARD_BYTES = 5 * 10**9
_TOWERS = ("vision_backbone.featurizer.", "vision_backbone.fused_featurizer.")
_OWN_FILES = (VALUE_HEAD, SCALE_HEAD)  # of ours, in safetensors
_PART_FILES = (PROPRIO, ACTION_HEAD, NOISY_ACTION)  # as OpenVLA-OFT writes them, which it reads again
_BESIDE = tuple(f"{name}." for name in (*_OWN_FILES, *_PART_FILES))  # weights that are not in the shards
_WEIGHT_SUFFIXES = (".safetensors", ".safetensors.index.json", ".bin", ".bin.index.json", ".pt")


def vision_shapes(checkpoint: Checkpoint) -> list[VitShape]:
    """The shapes of its one or two vision transformers."""
    fused = bool(checkpoint.config.get("use_fused_vision_backbone"))
    ids = checkpoint.config.get("timm_model_ids") or []
    if len(ids) != 1 + fused:
        raise PolicyError(f"config.json: timm_model_ids: expected {1 + fused}, got {ids}; copy the file again")
    shapes = [VitShape.of(checkpoint.shapes, prefix, timm_id) for prefix, timm_id in zip(_TOWERS, ids, strict=False)]
    if len({shape.num_patches for shape in shapes}) > 1:
        raise PolicyError(f"weights: expected transformers that see equally many patches, got {shapes}; unsupported")
    return shapes


def language_config(checkpoint: Checkpoint) -> LlamaConfig:
    text = dict(checkpoint.config.get("text_config") or {})
    if text.get("model_type") != "llama":
        raise PolicyError("config.json: text_config: expected model_type 'llama', got another; it is not supported")
    if "quantization_config" in text:
        raise PolicyError(
            "config.json: text_config: expected whole weights, got quantized ones; they cannot be trained"
        )
    language = LlamaConfig.from_dict(text)
    language._attn_implementation = "sdpa"
    return language


def action_ids(checkpoint: Checkpoint, language: LlamaConfig) -> tuple[int, int]:
    """The first token id of the bins and the one behind the last."""
    end = language.vocab_size - int(checkpoint.config.get("pad_to_multiple_of", 64))
    first = end - int(checkpoint.config.get("n_action_bins", 256))
    if first < 0:
        raise PolicyError(f"config.json: expected room for the bins in {language.vocab_size} tokens; copy it again")
    return first, end


def outline(checkpoint: Checkpoint, config: OpenVLAConfig, *, proprio_size: int | None) -> OpenVLANetwork:
    """The network on `meta`: its modules and the shapes of its weights, without their numbers."""
    action_head = checkpoint.part(ACTION_HEAD, ACTION_HEAD) if checkpoint.has_action_head else None
    language = language_config(checkpoint)
    with torch.device("meta"):
        network = OpenVLANetwork(
            vision_shapes(checkpoint),
            language,
            action_ids=action_ids(checkpoint, language),
            bidirectional=config.decoding == "parallel" and config.attention == "bidirectional",
            proprio_size=proprio_size,
            value_head=config.value_head,
            action_head=None if action_head is None else action_head_shape(action_head, checkpoint.has_diffusion),
            diffusion=checkpoint.has_diffusion,
            film=checkpoint.has_film,
        )
    choose_trained(network)
    return network


def choose_trained(network: OpenVLANetwork) -> None:
    """Train all weights but those that have no part in the result: with an action head, those that give tokens."""
    for name, parameter in network.named_parameters():
        unused = network.action_head is not None and name.startswith("language_model.lm_head.")
        parameter.requires_grad_(not unused)


def build(
    checkpoint: Checkpoint, config: OpenVLAConfig, *, proprio_size: int | None, device: torch.device
) -> OpenVLANetwork:
    """The network with the weights of the files; memory is taken once."""
    action_head = checkpoint.part(ACTION_HEAD, ACTION_HEAD) if checkpoint.has_action_head else None
    vision, language = vision_shapes(checkpoint), language_config(checkpoint)
    network = outline(checkpoint, config, proprio_size=proprio_size)
    wanted = {name: tuple(weight.shape) for name, weight in network.state_dict().items()}
    extras: dict[str, Tensor] = {}
    if proprio_size is not None:
        extras |= _named(PROPRIO, checkpoint.part(PROPRIO, "use_proprio"))
    if config.value_head:
        extras |= _named(VALUE_HEAD, checkpoint.head(VALUE_HEAD) or _constant(language.hidden_size, 0.0))
    if action_head is not None:
        extras |= _named(ACTION_HEAD, action_head)
        if checkpoint.has_diffusion:
            extras |= _named(NOISY_ACTION, checkpoint.part(NOISY_ACTION, NOISY_ACTION))
        else:
            fresh = _constant(language.hidden_size, math.log(config.l1_scale))
            extras |= _named(SCALE_HEAD, checkpoint.head(SCALE_HEAD) or fresh)
    there = {name: shape for name, shape in checkpoint.shapes.items() if not name.startswith(_BESIDE)}
    if checkpoint.has_film:  # its file has the whole of the vision
        there = {name: shape for name, shape in there.items() if not name.startswith(f"{FILM}.")}
        seen = film_layers.read(checkpoint.read_part(FILM, FILM))
        extras |= {name: weight for name, weight in seen.items() if not is_unused(name, vision)}
    there |= {name: tuple(weight.shape) for name, weight in extras.items()}
    _check_names(wanted, {name: shape for name, shape in there.items() if not is_unused(name, vision)})
    dtype = getattr(torch, config.dtype)
    state = {name: weight.to(device, dtype) for name, weight in extras.items()}
    state |= {name: weight.to(device, dtype) for name, weight in checkpoint.weights(wanted.keys() - extras.keys())}
    network.load_state_dict(state, assign=True)
    fresh_rotary(network, device)
    choose_trained(network)
    return network


def action_head_shape(weights: Mapping[str, Tensor], diffusion: bool) -> ActionHeadShape:
    """From the weights of an action head; `_check_names` compares all of them later."""
    prefix, kind = ("noise_predictor.mlp_resnet", "a diffusion head") if diffusion else ("model", "an L1 head")
    try:
        width, action_size = (weights[f"{prefix}.{layer}.weight"].shape[0] for layer in ("fc1", "fc2"))
    except KeyError as error:
        hint = "remove noisy_action_projector--*.pt" if diffusion else f"take a checkpoint with {kind}"
        raise PolicyError(f"{ACTION_HEAD}: expected the weights of {kind}, got no {error}; {hint}") from None
    blocks = re.compile(re.escape(prefix) + r"\.mlp_resnet_blocks\.(\d+)\.")
    numbers = {int(found[1]) for name in weights if (found := blocks.match(name))}
    return ActionHeadShape(action_size=action_size, width=width, num_blocks=len(numbers))


def _named(part: str, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {f"{part}.{name}": weight for name, weight in weights.items()}


def _constant(width: int, value: float) -> dict[str, Tensor]:
    """The weights of a linear head that says the same of everything."""
    return {"weight": torch.zeros(1, width), "bias": torch.full((1,), value)}


def is_unused(name: str, vision: list[VitShape]) -> bool:
    """Whether a weight of the files has no part in what the network computes."""
    for prefix, shape in zip(_TOWERS, vision, strict=False):
        if name.startswith(prefix):
            return shape.is_unused(name.removeprefix(prefix))
    return name.endswith("rotary_emb.inv_freq")


def write(directory: str | Path, checkpoint: Checkpoint, state: Mapping[str, Tensor], dtype: torch.dtype) -> None:
    """A directory like the one that the network came from, with these weights, and with those that it does not use."""
    directory = Path(directory)
    if directory.exists() and any(directory.iterdir()):
        raise PolicyError(f"{directory}: expected a new or empty directory, got files in it; choose another")
    new = directory.with_name(f"{directory.name}.new")
    shutil.rmtree(new, ignore_errors=True)
    new.mkdir(parents=True)
    for file in checkpoint.directory.iterdir():
        if file.is_file() and not file.name.endswith(_WEIGHT_SUFFIXES):
            shutil.copy2(file, new / file.name)
    for name in (*_OWN_FILES, *_PART_FILES):
        prefix = f"{name}."
        part = {one.removeprefix(prefix): _still(w, dtype) for one, w in state.items() if one.startswith(prefix)}
        if part and name in _OWN_FILES:
            save_file(part, new / f"{name}.safetensors", metadata={"format": "pt"})
        elif name in _PART_FILES:
            found = checkpoint.part_files(name)
            if part:
                torch.save(part, new / (found[0].name if found else f"{name}--latest_checkpoint.pt"))
            for file in () if part else found:  # a part that is not used
                shutil.copy2(file, new / file.name)
    beside = _BESIDE
    if checkpoint.has_film:
        (file,) = checkpoint.part_files(FILM)
        torch.save(film_layers.write(checkpoint.read_part(FILM, FILM), state, dtype), new / file.name)
        beside = (*_BESIDE, f"{FILM}.")  # in the shards they stay as they are, since nobody reads them
    _write_shards(new, checkpoint, {name: w for name, w in state.items() if not name.startswith(beside)}, dtype)
    if directory.exists():
        directory.rmdir()
    files.move_durably(new, directory)


def _write_shards(directory: Path, checkpoint: Checkpoint, state: Mapping[str, Tensor], dtype: torch.dtype) -> None:
    unused = {name for name in checkpoint.shapes if name not in state and not name.startswith(_BESIDE)}
    sizes = {name: weight.numel() * dtype.itemsize for name, weight in state.items()}
    sizes |= {name: _count(checkpoint.shapes[name]) * dtype.itemsize for name in unused}
    shards: list[list[str]] = [[]]
    filled = 0
    for name in sorted(sizes):
        if shards[-1] and filled + sizes[name] > SHARD_BYTES:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += sizes[name]
    weight_map: dict[str, str] = {}
    for number, names in enumerate(shards, 1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors" if len(shards) > 1 else "model.safetensors"
        kept = dict(checkpoint.weights(unused & set(names)))
        save_file(
            {name: _still(state[name] if name in state else kept[name], dtype) for name in names},
            directory / file,
            metadata={"format": "pt"},
        )
        weight_map |= dict.fromkeys(names, file)
    if len(shards) > 1:
        index: dict[str, Any] = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": weight_map}
        (directory / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n")


def _check_names(wanted: Mapping[str, tuple[int, ...]], found: Mapping[str, tuple[int, ...]]) -> None:
    for name, shape in wanted.items():
        if found.get(name) != shape:
            got = list(found[name]) if name in found else "nothing"
            raise PolicyError(f"weights: {name}: expected {list(shape)}, got {got}; they do not fit config.json")
    for name in found:
        if name not in wanted:
            raise PolicyError(f"weights: {name}: expected no such weight; it is a checkpoint of another network")


def _still(weight: Tensor, dtype: torch.dtype) -> Tensor:
    return weight.detach().to("cpu", dtype).contiguous()


def _count(shape: tuple[int, ...]) -> int:
    return int(torch.Size(shape).numel())
