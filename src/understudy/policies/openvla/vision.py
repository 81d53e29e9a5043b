"""The two vision transformers of OpenVLA, with the names that timm gave their weights.

timm itself is not needed: a checkpoint's weights say all of a transformer's shape but the number of heads, and that is
16 in every one that OpenVLA was published with. Features are those behind the block before the last, without class and
register tokens and without the final norm; the last block, the final norm and the pooling head are in the files and
have no part in it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from understudy.policies.protocol import PolicyError

HEADS = {
    "vit_large_patch14_reg4_dinov2.lvd142m": 16,
    "vit_so400m_patch14_siglip_224": 16,
    "vit_so400m_patch14_siglip_384": 16,
}
_NORM_EPSILON = 1e-6


@dataclass(frozen=True, kw_only=True)
class VitShape:
    """The shape of one transformer, as far as its features need it."""

    width: int
    num_blocks: int  # that are used: one less than the file has
    num_heads: int
    mlp_width: int
    patch_size: int
    num_patches: int
    num_registers: int
    class_token: bool
    layer_scale: bool

    @staticmethod
    def of(shapes: Mapping[str, tuple[int, ...]], prefix: str, timm_id: str) -> VitShape:
        """From the shapes of the weights below `prefix`."""
        if timm_id not in HEADS:
            raise PolicyError(
                f"timm_model_ids: expected one of {', '.join(HEADS)}, got {timm_id!r}; it is not supported"
            )

        def shape(name: str) -> tuple[int, ...]:
            if f"{prefix}{name}" not in shapes:
                raise PolicyError(f"weights: expected {prefix}{name}, got nothing; it is no checkpoint of OpenVLA")
            return shapes[f"{prefix}{name}"]

        width, _, patch_size, _ = shape("patch_embed.proj.weight")
        numbers = {int(x[1]) for name in shapes if (x := re.match(rf"{re.escape(prefix)}blocks\.(\d+)\.", name))}
        if len(numbers) < 2 or numbers != set(range(len(numbers))):
            raise PolicyError(
                f"weights: expected {prefix}blocks.0 and so on, got {sorted(numbers)}; copy the files again"
            )
        if width % HEADS[timm_id]:
            raise PolicyError(f"weights: {prefix}: expected a width that {HEADS[timm_id]} heads share, got {width}")
        return VitShape(
            width=width,
            num_blocks=len(numbers) - 1,
            num_heads=HEADS[timm_id],
            mlp_width=shape("blocks.0.mlp.fc1.weight")[0],
            patch_size=patch_size,
            num_patches=shape("pos_embed")[1],
            num_registers=shape("reg_token")[1] if f"{prefix}reg_token" in shapes else 0,
            class_token=f"{prefix}cls_token" in shapes,
            layer_scale=f"{prefix}blocks.0.ls1.scale_factor" in shapes,
        )

    def is_unused(self, name: str) -> bool:
        """Whether a weight of the file, named without its prefix, has no part in the features."""
        return name.startswith((f"blocks.{self.num_blocks}.", "norm.", "fc_norm.", "attn_pool.", "head."))


class Vit(nn.Module):
    """Images [B, 3, S, S] to features [B, patches, width]; with FiLM, also given language [B, language_width]."""

    def __init__(self, shape: VitShape, language_width: int | None = None):
        """`language_width`: of the language that is mixed into every block (FiLM); None mixes none in."""
        super().__init__()
        self.shape = shape
        self.patch_embed = _PatchEmbed(shape)
        self.pos_embed = nn.Parameter(torch.zeros(1, shape.num_patches, shape.width))
        if shape.class_token:
            self.cls_token = nn.Parameter(torch.zeros(1, 1, shape.width))
        if shape.num_registers:
            self.reg_token = nn.Parameter(torch.zeros(1, shape.num_registers, shape.width))
        self.blocks = nn.ModuleList(_Block(shape, language_width) for _ in range(shape.num_blocks))

    def forward(self, images: Tensor, language: Tensor | None = None) -> Tensor:
        tokens = self.patch_embed(images) + self.pos_embed  # class and register tokens have no position in the image
        special = [self.cls_token] if self.shape.class_token else []
        special += [self.reg_token] if self.shape.num_registers else []
        num_special = sum(token.shape[1] for token in special)
        tokens = torch.cat([*(token.expand(len(tokens), -1, -1) for token in special), tokens], dim=1)
        for block in self.blocks:
            tokens = block(tokens, language)
        patches: Tensor = tokens[:, num_special:]
        return patches


class _PatchEmbed(nn.Module):
    def __init__(self, shape: VitShape):
        super().__init__()
        self.proj = nn.Conv2d(3, shape.width, kernel_size=shape.patch_size, stride=shape.patch_size)

    def forward(self, images: Tensor) -> Tensor:
        patches: Tensor = self.proj(images)
        return patches.flatten(2).transpose(1, 2)


class _Block(nn.Module):
    def __init__(self, shape: VitShape, language_width: int | None):
        super().__init__()
        self.norm1 = nn.LayerNorm(shape.width, eps=_NORM_EPSILON)
        self.attn = _Attention(shape)
        self.ls1 = _LayerScale(shape.width) if shape.layer_scale else nn.Identity()
        self.norm2 = nn.LayerNorm(shape.width, eps=_NORM_EPSILON)
        self.mlp = _Mlp(shape)
        self.ls2 = _LayerScale(shape.width) if shape.layer_scale else nn.Identity()
        self.scale = None if language_width is None else nn.Linear(language_width, shape.width)
        self.shift = None if language_width is None else nn.Linear(language_width, shape.width)

    def forward(self, tokens: Tensor, language: Tensor | None) -> Tensor:
        tokens = tokens + self.ls1(self.attn(self.norm1(tokens)))
        if self.scale is not None and self.shift is not None:
            tokens = tokens * (1 + self.scale(language)[:, None]) + self.shift(language)[:, None]
        changed: Tensor = tokens + self.ls2(self.mlp(self.norm2(tokens)))
        return changed


class _Attention(nn.Module):
    def __init__(self, shape: VitShape):
        super().__init__()
        self.num_heads = shape.num_heads
        self.qkv = nn.Linear(shape.width, 3 * shape.width)
        self.proj = nn.Linear(shape.width, shape.width)

    def forward(self, tokens: Tensor) -> Tensor:
        batch, length, width = tokens.shape
        parts = self.qkv(tokens).reshape(batch, length, 3, self.num_heads, width // self.num_heads)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        seen = functional.scaled_dot_product_attention(query, key, value)
        gathered: Tensor = self.proj(seen.transpose(1, 2).reshape(batch, length, width))
        return gathered


class _Mlp(nn.Module):
    def __init__(self, shape: VitShape):
        super().__init__()
        self.fc1 = nn.Linear(shape.width, shape.mlp_width)
        self.fc2 = nn.Linear(shape.mlp_width, shape.width)

    def forward(self, tokens: Tensor) -> Tensor:
        changed: Tensor = self.fc2(functional.gelu(self.fc1(tokens)))
        return changed


class _LayerScale(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.scale_factor = nn.Parameter(torch.ones(width))

    def forward(self, tokens: Tensor) -> Tensor:
        return tokens * self.scale_factor
