"""OpenVLANetwork: images, a prompt and perhaps proprioception to logits over the action bins, and perhaps a value.

The sequence is BOS, the patches of every image, one token of proprioception, the prompt, and the numbers of the
actions. The logits of a number stand at the token before it. With OpenVLA-OFT's L1 head, which decodes in parallel, a
number has a mean and the log of a scale instead of logits. With its diffusion head, the numbers' embeddings are those
of noisy numbers, a token of the time stands behind the images, and the result is the noise. Two ways to decode:

| decoding | the numbers' embeddings | attention | forwards |
|---|---|---|---|
| autoregressive (OpenVLA) | of the tokens that were drawn | causal | one for the prompt, one for each further number |
| parallel (OpenVLA-OFT) | zero, with the end-of-text token behind them | both ways, all tokens | one |
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AttentionInterface, LlamaConfig, LlamaForCausalLM
from transformers.cache_utils import DynamicCache
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from understudy.policies.mlp import OneOutput
from understudy.policies.openvla.diffusion import time_embedding
from understudy.policies.openvla.vision import Vit, VitShape

# ids int64 [B, T], prompt and numbers, padded on the right; is_token bool [B, T], False for padding, if there is any;
# at int64 [B, N], the tokens whose logits are wanted, counted as in ids, the first of which gives the value;
# images float [B, C, S, S]; empty bool [B, T], tokens whose embedding is zero, if any;
# proprio float [B, P] from -1 to 1, if used;
# seen float [B, S, width], what `look` gives, in place of images and proprio;
# noisy float [B, N] and time float [B], with a diffusion head
Tensors: TypeAlias = Mapping[str, Tensor]


_ATTENTION = "openvla"


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    dropout: float = 0.0,
    scaling: float | None = None,
    **unused: Any,
) -> tuple[Tensor, None]:
    """Attention by torch's kernels with the mask as it is given; without one, the layer says whether it is causal.

    For an attention that is its own, transformers makes no mask. For others it reads positions from the device in every
    pass, to find sequences that are packed into one row.
    """
    attend: Any = sdpa_attention_forward
    found: tuple[Tensor, None] = attend(
        module, query, key, value, attention_mask, dropout, scaling, is_causal=bool(module.is_causal)
    )
    return found


AttentionInterface.register(_ATTENTION, _attention)


class OpenVLANetwork(nn.Module):
    """The weights have the names of the published files; the projector of proprioception and the heads are optional."""

    def __init__(
        self,
        vision: Sequence[VitShape],
        language: LlamaConfig,
        *,
        action_ids: tuple[int, int],
        bidirectional: bool,
        proprio_size: int | None,
        value_head: bool,
        action_head: ActionHeadShape | None = None,
        diffusion: bool = False,
        film: bool = False,
    ):
        """`action_ids` are the first token id of the bins and the one behind the last; the highest id is bin 0."""
        super().__init__()
        self.vision_backbone = _VisionBackbone(vision, language.hidden_size if film else None)
        self.projector = _Projector(sum(shape.width for shape in vision), language.hidden_size, fused=len(vision) > 1)
        llama: Any = LlamaForCausalLM
        self.language_model = llama(language)
        self.proprio_projector = None if proprio_size is None else _ProprioProjector(proprio_size, language.hidden_size)
        self.value_head = OneOutput(language.hidden_size) if value_head else None
        self.action_head = None if action_head is None else _ActionHead(action_head, language.hidden_size, diffusion)
        self.scale_head = None if action_head is None or diffusion else OneOutput(language.hidden_size)
        self.noisy_action_projector = _ProprioProjector(1, language.hidden_size) if diffusion else None
        self._action_ids = action_ids
        self._bidirectional = bidirectional
        self.language_model.set_attn_implementation(_ATTENTION)
        for layer in self.language_model.model.layers:
            layer.self_attn.is_causal = not bidirectional

    def forward(self, tensors: Tensors, cache: DynamicCache | None = None) -> tuple[Tensor, Tensor | None]:
        """Float32 logits [B, N, bins] in the order of the bins, mean and log scale [B, N, 2], or noise [B, N]; and the
        value [B].

        A cache that is filled stands for images and prompt, and `tensors` then holds only what comes behind them.
        """
        ids, at = tensors["ids"], tensors["at"]
        embedded = self.language_model.model.embed_tokens(ids)
        seen = self.look(tensors, embedded) if "images" in tensors else tensors.get("seen")
        if "empty" in tensors:
            embedded = embedded.masked_fill(tensors["empty"][..., None], 0.0)
        if self.noisy_action_projector is not None and seen is not None:
            noisy = self.noisy_action_projector(tensors["noisy"][..., None].to(embedded.dtype))
            embedded = embedded.masked_scatter(tensors["empty"][..., None], noisy)
            time = time_embedding(tensors["time"], embedded.shape[-1]).to(embedded.dtype)
            seen = torch.cat([seen, time[:, None]], dim=1)
        visible = None
        if seen is not None:
            embedded = torch.cat([embedded[:, :1], seen, embedded[:, 1:]], dim=1)
            at = at + seen.shape[1]
            if self._bidirectional and "is_token" in tensors:
                visible = self._visible(functional.pad(tensors["is_token"], (seen.shape[1], 0), value=True))
        hidden = self.language_model.model(
            inputs_embeds=embedded,
            attention_mask=visible,
            past_key_values=cache,
            use_cache=cache is not None,
        ).last_hidden_state
        chosen = hidden.gather(1, at[..., None].expand(-1, -1, hidden.shape[-1]))
        value = None
        if self.value_head is not None:
            value = self.value_head(_like(chosen[:, 0], self.value_head)).float().sum(-1)  # not a view
        if self.action_head is not None:
            mean = self.action_head(chosen).float()
            if self.scale_head is None:
                return mean, value
            return torch.stack(
                [mean, self.scale_head(_like(chosen, self.scale_head)).float().squeeze(-1)], dim=-1
            ), value
        first, end = self._action_ids
        return self.language_model.lm_head(chosen)[..., first:end].float().flip(-1), value

    def look(self, tensors: Tensors, embedded: Tensor | None = None) -> Tensor:
        """The tokens [B, S, width] of images and proprioception; `embedded` are the embeddings of ids, if known."""
        told = None
        if self.vision_backbone.film:
            if embedded is None:
                embedded = self.language_model.model.embed_tokens(tensors["ids"])
            told = self._language(embedded, tensors)
        images = tensors["images"].to(self.projector.fc1.weight.dtype)
        seen: Tensor = self.projector(self.vision_backbone(images, told))
        if self.proprio_projector is not None:
            felt = self.proprio_projector(tensors["proprio"].to(seen.dtype))
            seen = torch.cat([seen, felt[:, None]], dim=1)
        return seen

    @staticmethod
    def _language(embedded: Tensor, tensors: Tensors) -> Tensor:
        """For FiLM: the mean of the embeddings [B, width] of the prompt and of the end of the text."""
        said = ~tensors["empty"]
        if "is_token" in tensors:
            said = said & tensors["is_token"]
        counts = said[..., None].to(embedded.dtype)
        return (embedded * counts).sum(dim=1) / counts.sum(dim=1)

    @staticmethod
    def _visible(is_token: Tensor) -> Tensor:
        """Which token sees which [B, 1, S, S], where all see all but padding; in memory it is [B, S].

        Rows without padding need no mask, and the fastest kernels of attention take none. Nor does causal attention,
        because padding stands behind everything else.
        """
        batch, length = is_token.shape
        return is_token[:, None, None, :].expand(batch, 1, length, length)


class _VisionBackbone(nn.Module):
    """Every image through each transformer; features side by side, images one after another."""

    def __init__(self, shapes: Sequence[VitShape], language_width: int | None):
        super().__init__()
        self.film = language_width is not None
        self.featurizer = Vit(shapes[0], language_width)
        self.fused_featurizer = Vit(shapes[1], language_width) if len(shapes) > 1 else None

    def forward(self, images: Tensor, language: Tensor | None = None) -> Tensor:
        """Images [B, n·k·3, S, S], n of them prepared for k transformers, to [B, n·patches, width]."""
        batch, channels = images.shape[:2]
        towers = [self.featurizer] if self.fused_featurizer is None else [self.featurizer, self.fused_featurizer]
        each = images.reshape(batch, channels // (3 * len(towers)), len(towers), 3, *images.shape[2:])
        features = [
            torch.cat([tower(each[:, image, index], language) for index, tower in enumerate(towers)], dim=-1)
            for image in range(each.shape[1])
        ]
        return torch.cat(features, dim=1)


class _Projector(nn.Module):
    def __init__(self, vision_width: int, width: int, *, fused: bool):
        super().__init__()
        middle = 4 * vision_width if fused else width
        self.fc1 = nn.Linear(vision_width, middle)
        self.fc2 = nn.Linear(middle, width)
        self.fc3 = nn.Linear(width, width) if fused else None

    def forward(self, features: Tensor) -> Tensor:
        projected: Tensor = self.fc2(functional.gelu(self.fc1(features)))
        return projected if self.fc3 is None else self.fc3(functional.gelu(projected))


@dataclass(frozen=True, kw_only=True)
class ActionHeadShape:
    """The shape of OpenVLA-OFT's L1 or diffusion head."""

    action_size: int  # numbers of an action
    width: int
    num_blocks: int


class _ActionHead(nn.Module):
    """All tokens of an action to its numbers, or to their noise: hidden states [B, H·D, width] to [B, H·D]."""

    def __init__(self, shape: ActionHeadShape, width: int, diffusion: bool):
        super().__init__()
        self.shape = shape
        network = _ResidualMlp(shape, width)
        self.model = None if diffusion else network
        self.noise_predictor = nn.ModuleDict({"mlp_resnet": network}) if diffusion else None

    def forward(self, hidden: Tensor) -> Tensor:
        batch, length, _ = hidden.shape
        network = self.model if self.noise_predictor is None else self.noise_predictor["mlp_resnet"]
        assert network is not None
        numbers: Tensor = network(hidden.reshape(batch, length // self.shape.action_size, -1))
        return numbers.reshape(batch, length)


class _ResidualMlp(nn.Module):
    def __init__(self, shape: ActionHeadShape, width: int):
        super().__init__()
        self.layer_norm1 = nn.LayerNorm(shape.action_size * width)
        self.fc1 = nn.Linear(shape.action_size * width, shape.width)
        self.mlp_resnet_blocks = nn.ModuleList(_ResidualBlock(shape.width) for _ in range(shape.num_blocks))
        self.layer_norm2 = nn.LayerNorm(shape.width)
        self.fc2 = nn.Linear(shape.width, shape.action_size)

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = functional.relu(self.fc1(self.layer_norm1(hidden)))
        for block in self.mlp_resnet_blocks:
            hidden = block(hidden)
        numbers: Tensor = self.fc2(self.layer_norm2(hidden))
        return numbers


class _ResidualBlock(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.ffn = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.ReLU())

    def forward(self, hidden: Tensor) -> Tensor:
        changed: Tensor = hidden + self.ffn(hidden)
        return changed


class _ProprioProjector(nn.Module):
    def __init__(self, size: int, width: int):
        super().__init__()
        self.fc1 = nn.Linear(size, width)
        self.fc2 = nn.Linear(width, width)

    def forward(self, proprio: Tensor) -> Tensor:
        projected: Tensor = self.fc2(functional.gelu(self.fc1(proprio)))
        return projected


def _like(hidden: Tensor, head: nn.Linear) -> Tensor:
    """In the head's dtype: one that is trained is float32 also where the network is bfloat16."""
    return hidden.to(head.weight.dtype)


def fresh_rotary(network: OpenVLANetwork, device: torch.device) -> None:
    """Make the rotary tables, which are in no file, on the device; a network built on `meta` has none."""
    model: Any = network.language_model.model
    with torch.device(device):
        model.rotary_emb = type(model.rotary_emb)(config=model.config)
