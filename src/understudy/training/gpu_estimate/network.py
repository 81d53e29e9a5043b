"""Network: what a run trains, as modules on torch's device `meta`, which has shapes and no numbers.

| policy of the run | where its shape is from |
|---|---|
| a policy file (small VLA, flow policy, or of another package) | the file |
| the directory of an OpenVLA checkpoint | its JSON and the headers of its weights |
| neither is on this machine | `--network`: the shape of a published one |
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from understudy.core.suggestion import did_you_mean
from understudy.policies.openvla.config import OpenVLAConfig
from understudy.policies.protocol import Sampling
from understudy.training.distributed.module_blocks import checkpoint_activations, find_blocks
from understudy.training.gpu_estimate.network_size import NetworkSize
from understudy.training.gpu_estimate.traced_fsdp import shard_numel
from understudy.training.onpolicy.config import OnPolicyConfig
from understudy.training.onpolicy.policy_files import add_adapter, load_policy
from understudy.training.runs.config import ConfigError
from understudy.training.runs.run import policy_path

OPENVLA_7B = "openvla-7b"
PUBLISHED = (OPENVLA_7B,)
PROMPT_TOKENS = 32  # to which a GPU pads OpenVLA's prompts; those of LIBERO are no longer
_ACTION_SIZE = 7  # numbers of an action of OpenVLA's data
_PROPRIO_SIZE = 8  # numbers of LIBERO's state as OpenVLA-OFT has it
_META = torch.device("meta")


class Forward(Protocol):
    """Evaluates so many rows and returns something to differentiate.

    `module` is called in place of the network: an engine, for example, that has moved it to another `device`.
    """

    def __call__(
        self, rows: int, *, module: Callable[..., Any] | None = None, device: torch.device = ...
    ) -> Tensor: ...


@dataclass(frozen=True, kw_only=True, eq=False)
class Network:
    """The network of a run, with its adapter and checkpointing as its config says."""

    name: str
    model: nn.Module  # on meta
    forward: Forward
    block_steps: int  # steps of the world that one decision is for
    tokens: int  # of one row
    act_rows: int  # of one pass in which it acts
    act_passes: int  # passes for one decision: several where numbers or denoising steps follow each other
    act_flops: float  # of one decision, in forward passes of `forward`
    autocast: bool  # whether the network itself asks for bfloat16

    def size(self, shards: int = 1) -> NetworkSize:
        """Its numbers of parameters, if FSDP shards them over so many ranks."""
        blocks = find_blocks(self.model, ())
        mine = [(shard_numel(value, shards), value) for value in self.model.parameters()]
        return NetworkSize(
            parameters=_count(self.model.parameters()),
            trained=_count(self.model.parameters(), trained=True),
            parameter_bytes=sum(value.numel() * value.element_size() for value in self.model.parameters()),
            largest_block=max((_count(block.parameters()) for block in blocks), default=0),
            shard_bytes=sum(number * value.element_size() for number, value in mine),
            shard_trained=sum(number for number, value in mine if value.requires_grad),
            gathered=shards * sum(number for number, _ in mine),
            mixed_dtypes=len({value.dtype for value in self.model.parameters()}) > 1,
        )


def build_network(
    config: OnPolicyConfig, *, published: str | None = None, prompt_tokens: int = PROMPT_TOKENS
) -> Network:
    """The network that a run of this config trains. `published` is used in place of the config's policy."""
    if published is not None and published not in PUBLISHED:
        advice = did_you_mean(published, PUBLISHED, f"known are {', '.join(PUBLISHED)}")
        raise ConfigError(f"network: there is no {published!r}; {advice}")
    if published is None and not policy_exists(config):
        raise ConfigError(
            f"policy: {config.policy} is not on this machine; if it is a published OpenVLA or OpenVLA-OFT, say "
            f"--network {OPENVLA_7B}"
        )
    is_openvla = published is not None or policy_path(config.policy).is_dir()
    network = _openvla(config, published, prompt_tokens) if is_openvla else _of_file(config)
    for value in network.model.parameters():  # as the engine does
        if value.requires_grad:
            value.data = value.data.float()
    if config.engine.gradient_checkpointing:
        checkpoint_activations(find_blocks(network.model, config.engine.blocks))
    return network


def policy_exists(config: OnPolicyConfig) -> bool:
    try:
        return policy_path(config.policy).exists()
    except ConfigError:
        return False


# ---- OpenVLA


def _openvla(config: OnPolicyConfig, published: str | None, prompt_tokens: int) -> Network:
    from understudy.policies.openvla import loading  # only now: it needs transformers
    from understudy.policies.openvla.checkpoint import Checkpoint
    from understudy.policies.openvla.tokens import statistics_of

    openvla = config.openvla
    openvla = replace(openvla, value_head=openvla.value_head or config.algorithm.adv_estimator == "gae")
    action_size, proprio_size = _ACTION_SIZE, None if openvla.use_proprio is None else _PROPRIO_SIZE
    if published is not None:
        name, model = published, published_openvla(openvla, proprio_size=proprio_size)
        patches = 256
    else:
        name = config.policy
        checkpoint = Checkpoint.open(policy_path(config.policy))
        _, statistics = statistics_of(checkpoint.statistics, openvla.unnorm_key)
        action_size = len(statistics["action"].get("q01", statistics["action"].get("min", ())))
        if proprio_size is not None:
            proprio_size = len(statistics["proprio"].get("q01", statistics["proprio"].get("min", ())))
        model = loading.outline(checkpoint, openvla, proprio_size=proprio_size)
        patches = loading.vision_shapes(checkpoint)[0].num_patches
    model.to(getattr(torch, openvla.dtype))
    add_adapter(model, config)
    parallel = openvla.decoding == "parallel"
    count = openvla.block_steps * action_size
    behind = count + 1 if parallel else count - 1
    length = prompt_tokens + behind
    towers = 1 if model.vision_backbone.fused_featurizer is None else 2
    side = round(patches**0.5) * model.vision_backbone.featurizer.shape.patch_size

    def forward(rows: int, *, module: Callable[..., Any] | None = None, device: torch.device = _META) -> Tensor:
        tensors: dict[str, Tensor] = {
            "ids": torch.zeros(rows, length, dtype=torch.int64, device=device),
            "at": torch.zeros(rows, count, dtype=torch.int64, device=device),
            "images": torch.zeros(rows, openvla.num_images_in_input * towers * 3, side, side, device=device),
        }
        if parallel:  # rows of several tasks have prompts of several lengths, so that there is padding
            tensors["is_token"] = torch.zeros(rows, length, dtype=torch.bool, device=device)
            tensors["empty"] = torch.zeros(rows, length, dtype=torch.bool, device=device)
        if proprio_size is not None:
            tensors["proprio"] = torch.zeros(rows, proprio_size, device=device)
        logits, value = (module or model)(tensors)
        return _sum([logits.float().log_softmax(-1), value])

    return Network(
        name=name,
        model=model,
        forward=forward,
        block_steps=openvla.block_steps,
        tokens=openvla.num_images_in_input * patches + int(proprio_size is not None) + length,
        act_rows=openvla.act_rows or 8,
        act_passes=1 if parallel else count + 1,
        act_flops=1.0 if parallel else 2.0,  # the prompt, one number after the other, and all again for log-probs
        autocast=False,
    )


def published_openvla(config: OpenVLAConfig, *, proprio_size: int | None, max_blocks: int = 32) -> Any:
    """OpenVLA 7B on `meta`: DINOv2 large and SigLIP so400m at 224 pixels, and Llama 2 7B. OpenVLA-OFT is the same.

    Tests leave out blocks: with `max_blocks`, each of the three transformers has no more.
    """
    from transformers import LlamaConfig

    from understudy.policies.openvla.loading import choose_trained
    from understudy.policies.openvla.network import OpenVLANetwork
    from understudy.policies.openvla.vision import VitShape

    dino = VitShape(
        width=1024,
        num_blocks=min(23, max_blocks),
        num_heads=16,
        mlp_width=4096,
        patch_size=14,
        num_patches=256,
        num_registers=4,
        class_token=True,
        layer_scale=True,
    )
    siglip = replace(
        dino,
        width=1152,
        num_blocks=min(26, max_blocks),
        mlp_width=4304,
        num_registers=0,
        class_token=False,
        layer_scale=False,
    )
    options: dict[str, Any] = {"vocab_size": 32064, "hidden_size": 4096, "intermediate_size": 11008}
    options |= {"num_attention_heads": 32, "num_key_value_heads": 32}
    language = LlamaConfig(**options, num_hidden_layers=min(32, max_blocks))
    language._attn_implementation = "sdpa"
    with _META:
        network = OpenVLANetwork(
            [dino, siglip],
            language,
            action_ids=(31744, 32000),
            bidirectional=config.decoding == "parallel" and config.attention == "bidirectional",
            proprio_size=proprio_size,
            value_head=config.value_head,
        )
    choose_trained(network)
    return network


# ---- policy files


class _SeenError(Exception):
    """The inputs of a network, thrown by what stands in its place."""


def _of_file(config: OnPolicyConfig) -> Network:
    policy: Any = load_policy(replace(config, device="cpu"), policy_path(config.policy), None, adapted=True)
    fields = policy.spec.observation.flat
    autocast = getattr(policy.config, "dtype", None) == "bfloat16"
    model: nn.Module = policy.model

    def forward(rows: int, *, module: Callable[..., Any] | None = None, device: torch.device = _META) -> Tensor:
        given = tree_map(lambda one: one.to(device) if isinstance(one, Tensor) else one, _inputs(policy, fields, rows))
        return _sum(tree_leaves((module or model)(given)))

    if autocast:  # torch has no autocast for meta; the trace has one
        model.config = replace(policy.config, dtype="float32")
    model.to(_META)
    steps = int(getattr(policy.config, "num_inference_steps", 1))
    return Network(
        name=Path(config.policy).name,
        model=model,
        forward=forward,
        block_steps=policy.block_steps,
        tokens=policy.num_tokens(""),
        act_rows=policy.config.act_rows,
        act_passes=steps,
        act_flops=1.0,
        autocast=autocast,
    )


def _inputs(policy: Any, fields: Any, rows: int) -> Any:
    """What the policy gives its network for so many rows: the network's place is taken for one call."""

    def look(*args: Any) -> Any:
        raise _SeenError(*args)

    observation = {path: np.zeros((rows, *leaf.fixed_shape), leaf.dtype) for path, leaf in fields.items()}
    replay = {path: np.zeros((rows, *leaf.fixed_shape), leaf.dtype) for path, leaf in policy.replay_spec.flat.items()}
    told = " ".join(list(policy.words.known)[:1])
    try:
        policy.evaluate(observation, [told] * rows, replay, sampling=Sampling(), module=look)
    except _SeenError as seen:
        return seen.args[0]
    raise AssertionError("a policy evaluates with its network")


def _sum(values: list[Any]) -> Tensor:
    found = [value.float().sum() for value in values if isinstance(value, Tensor) and value.is_floating_point()]
    return torch.stack(found)


def _count(parameters: Any, *, trained: bool = False) -> int:
    return sum(value.numel() for value in parameters if value.requires_grad or not trained)
