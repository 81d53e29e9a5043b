"""VisionTransformer and TextTransformer: the two networks of a small VLA, as SigLIP and Llama are built.

The layers and the names of the weights are those of transformers' `SiglipVisionModel` and `LlamaModel`, and a test
compares the outputs. They are written out here because importing transformers takes each process more CPU time than
importing torch, and because small networks wait more for Python than for arithmetic.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

NORM_EPS = 1e-6
ROTARY_BASE = 10000.0
INIT_STD = 0.02


class VisionTransformer(nn.Module):
    """Images float [B, 3, S, S] in, one token for each patch out: [B, patches, width]. Every patch sees every other."""

    def __init__(self, *, image_size: int, patch: int, width: int, layers: int, heads: int, mlp_width: int):
        super().__init__()
        self.embeddings = _PatchEmbedding(image_size, patch, width)
        self.encoder = nn.ModuleDict(
            {"layers": nn.ModuleList(VisionLayer(width, heads, mlp_width) for _ in range(layers))}
        )
        self.post_layernorm = nn.LayerNorm(width, NORM_EPS)
        self.checkpointed = False

    def forward(self, pixels: Tensor) -> Tensor:
        hidden: Tensor = self.embeddings(pixels)
        layers: Any = self.encoder["layers"]
        tokens: Tensor = self.post_layernorm(_through(layers, hidden, checkpointed=self.checkpointed))
        return tokens


class TextTransformer(nn.Module):
    """Embedded tokens [B, T, width] and which sees which, bool [B, 1, T, T], in; [B, T, width] out."""

    rotation: Tensor

    def __init__(self, *, num_words: int, num_tokens: int, width: int, layers: int, heads: int, mlp_width: int):
        super().__init__()
        self.embed_tokens = nn.Embedding(num_words, width)
        self.layers = nn.ModuleList(TextLayer(width, heads, mlp_width) for _ in range(layers))
        self.norm = nn.RMSNorm(width, NORM_EPS)
        self.register_buffer("rotation", rotation_of(num_tokens, width // heads), persistent=False)
        self.checkpointed = False
        for part in self.modules():
            if isinstance(part, nn.Linear | nn.Embedding):
                nn.init.normal_(part.weight, std=INIT_STD)

    def forward(self, hidden: Tensor, mask: Tensor) -> Tensor:
        tokens: Tensor = self.norm(_through(self.layers, hidden, mask, self.rotation, checkpointed=self.checkpointed))
        return tokens


class VisionLayer(nn.Module):
    """Attention and a feed-forward network, each after a layer norm and added to its input."""

    def __init__(self, width: int, heads: int, mlp_width: int):
        super().__init__()
        self.layer_norm1 = nn.LayerNorm(width, NORM_EPS)
        self.self_attn = _VisionAttention(width, heads)
        self.layer_norm2 = nn.LayerNorm(width, NORM_EPS)
        self.mlp = _VisionMLP(width, mlp_width)

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = hidden + self.self_attn(self.layer_norm1(hidden))
        change: Tensor = self.mlp(self.layer_norm2(hidden))
        return hidden + change


class TextLayer(nn.Module):
    """Attention with rotated positions and a gated feed-forward network, each after an RMS norm."""

    def __init__(self, width: int, heads: int, mlp_width: int):
        super().__init__()
        self.self_attn = _TextAttention(width, heads)
        self.mlp = _TextMLP(width, mlp_width)
        self.input_layernorm = nn.RMSNorm(width, NORM_EPS)
        self.post_attention_layernorm = nn.RMSNorm(width, NORM_EPS)

    def forward(self, hidden: Tensor, mask: Tensor, rotation: Tensor) -> Tensor:
        hidden = hidden + self.self_attn(self.input_layernorm(hidden), mask, rotation)
        change: Tensor = self.mlp(self.post_attention_layernorm(hidden))
        return hidden + change


class _PatchEmbedding(nn.Module):
    def __init__(self, image_size: int, patch: int, width: int):
        super().__init__()
        self.patch_embedding = nn.Conv2d(3, width, kernel_size=patch, stride=patch)
        self.position_embedding = nn.Embedding((image_size // patch) ** 2, width)
        nn.init.normal_(self.patch_embedding.weight, std=(3 * patch**2) ** -0.5)
        nn.init.normal_(self.position_embedding.weight, std=width**-0.5)
        assert self.patch_embedding.bias is not None
        nn.init.zeros_(self.patch_embedding.bias)

    def forward(self, pixels: Tensor) -> Tensor:
        patches: Tensor = self.patch_embedding(pixels.to(self.patch_embedding.weight.dtype))
        return patches.flatten(2).transpose(1, 2) + self.position_embedding.weight


class _VisionAttention(nn.Module):
    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.k_proj, self.v_proj, self.q_proj, self.out_proj = (_xavier(width, width) for _ in range(4))

    def forward(self, hidden: Tensor) -> Tensor:
        query, key, value = (_split(part(hidden), self.heads) for part in (self.q_proj, self.k_proj, self.v_proj))
        seen: Tensor = self.out_proj(_merge(functional.scaled_dot_product_attention(query, key, value)))
        return seen


class _VisionMLP(nn.Module):
    def __init__(self, width: int, mlp_width: int):
        super().__init__()
        self.fc1 = _xavier(width, mlp_width)
        self.fc2 = _xavier(mlp_width, width)

    def forward(self, hidden: Tensor) -> Tensor:
        change: Tensor = self.fc2(functional.gelu(self.fc1(hidden), approximate="tanh"))
        return change


class _TextAttention(nn.Module):
    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(width, width, bias=False) for _ in range(4))

    def forward(self, hidden: Tensor, mask: Tensor, rotation: Tensor) -> Tensor:
        query, key, value = (_split(part(hidden), self.heads) for part in (self.q_proj, self.k_proj, self.v_proj))
        query, key = (rotate(part, rotation).to(value.dtype) for part in (query, key))
        seen: Tensor = self.o_proj(_merge(functional.scaled_dot_product_attention(query, key, value, attn_mask=mask)))
        return seen


class _TextMLP(nn.Module):
    def __init__(self, width: int, mlp_width: int):
        super().__init__()
        self.gate_proj = nn.Linear(width, mlp_width, bias=False)
        self.up_proj = nn.Linear(width, mlp_width, bias=False)
        self.down_proj = nn.Linear(mlp_width, width, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        change: Tensor = self.down_proj(functional.silu(self.gate_proj(hidden)) * self.up_proj(hidden))
        return change


def rotation_of(num_tokens: int, size: int) -> Tensor:
    """Cosines and sines of the angles by which the pairs of numbers of a head turn at each position, [2, T, size]."""
    speeds = ROTARY_BASE ** (-torch.arange(0, size, 2, dtype=torch.float32) / size)
    angles = torch.arange(num_tokens, dtype=torch.float32)[:, None] * speeds
    return torch.stack([angles.cos(), angles.sin()]).repeat(1, 1, 2)


def rotate(heads: Tensor, rotation: Tensor) -> Tensor:
    """Queries or keys [B, heads, T, size], turned; number i is paired with number i + size / 2."""
    first, second = heads.chunk(2, dim=-1)
    return heads * rotation[0] + torch.cat([-second, first], dim=-1) * rotation[1]


def _through(layers: Iterable[nn.Module], hidden: Tensor, *others: Tensor, checkpointed: bool) -> Tensor:
    for layer in layers:
        if checkpointed and torch.is_grad_enabled():
            hidden = checkpoint(layer, hidden, *others, use_reentrant=False)
        else:
            hidden = layer(hidden, *others)
    return hidden


def _split(hidden: Tensor, heads: int) -> Tensor:
    """[B, T, heads x size] to [B, heads, T, size]."""
    return hidden.view(*hidden.shape[:-1], heads, -1).transpose(1, 2)


def _merge(heads: Tensor) -> Tensor:
    return heads.transpose(1, 2).flatten(2)


def _xavier(size: int, to: int) -> nn.Linear:
    layer = nn.Linear(size, to)
    nn.init.xavier_uniform_(layer.weight)
    nn.init.zeros_(layer.bias)
    return layer
