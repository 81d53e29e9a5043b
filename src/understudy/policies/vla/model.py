"""VLAModel: images, words and proprioception in; a distribution over each number of a block of actions out.

    image [S, S, 3] - VisionTransformer - PixelUnshuffle - Linear -+
    words [W] ------------- embedding of the text model -----------+- TextTransformer -+- last H x A: logits over bins
    proprioception [P] ---------- Linear --------------------------+                   +- token before: value
    H x A learned queries -----------------------------------------+

All tokens of a block are decided in one pass. Attention is causal over images, words and proprioception, as in a
language model; the queries attend to all of them and to each other. The bins are the last entries of the text model's
vocabulary, and their logits are the products with its embeddings of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from understudy.policies.encoders.words import PADDING
from understudy.policies.mlp import OneOutput
from understudy.policies.protocol import PolicyError
from understudy.policies.vla.config import VLAConfig
from understudy.policies.vla.transformer import INIT_STD, TextTransformer, VisionTransformer

WORDS, PROPRIO = "words", "proprio"

Tensors = Mapping[str, Tensor]  # image/CAMERA uint8 [B, S, S, 3]; words int64 [B, W]; proprio float32 [B, P], if any


def image(camera: str) -> str:
    """The name of a camera's images among the tensors."""
    return f"image/{camera}"


class VLAModel(nn.Module):
    """The network alone. `config.cameras` are names."""

    base_mask: Tensor

    def __init__(self, config: VLAConfig, *, image_size: int, proprio_size: int, action_size: int, num_words: int):
        super().__init__()
        side = image_size // config.patch
        if image_size % config.patch or side % config.shuffle:
            raise PolicyError(
                f"patch: expected images whose side is a multiple of patch x shuffle "
                f"({config.patch * config.shuffle}), got {image_size}; choose another patch, or size of the cameras"
            )
        self.config = config
        self._side = side
        self._shape = (config.block_steps, action_size)
        num_queries = config.block_steps * action_size
        num_image_tokens = config.num_images_in_input * (side // config.shuffle) ** 2
        self._words_at = slice(num_image_tokens, num_image_tokens + config.max_words)
        num_prefix = num_image_tokens + config.max_words + (proprio_size > 0)
        self._num_prefix = num_prefix
        self.num_tokens = num_prefix + num_queries  # of one row
        self.vision = VisionTransformer(
            image_size=image_size,
            patch=config.patch,
            width=config.vision_hidden,
            layers=config.vision_layers,
            heads=config.vision_heads,
            mlp_width=config.mlp_ratio * config.vision_hidden,
        )
        self.shuffle = nn.PixelUnshuffle(config.shuffle)
        self.connector = nn.Linear(config.vision_hidden * config.shuffle**2, config.hidden, bias=False)
        self.text = TextTransformer(
            num_words=num_words + config.num_bins,
            num_tokens=self.num_tokens,
            width=config.hidden,
            layers=config.layers,
            heads=config.heads,
            mlp_width=config.mlp_ratio * config.hidden,
        )
        self.proprio = nn.Linear(proprio_size, config.hidden) if proprio_size else None
        self.queries = nn.Parameter(torch.randn(num_queries, config.hidden) * INIT_STD)
        self.value = (
            nn.Sequential(nn.Linear(config.hidden, config.hidden), nn.SiLU(), OneOutput(config.hidden))
            if config.value_head
            else None
        )
        self.register_buffer("base_mask", _mask(num_prefix, num_queries), persistent=False)

    def forward(self, tensors: Tensors) -> tuple[Tensor, Tensor | None]:
        """Logits float32 [B, H, A, K], and value float32 [B] if it has that head."""
        words = tensors[WORDS]
        with self._precision(words.device):
            parts = [*self._images(tensors), self.text.embed_tokens(words)]
            if self.proprio is not None:
                parts.append(self.proprio(tensors[PROPRIO])[:, None])
            parts.append(self.queries.expand(len(words), -1, -1))
            hidden = self.text(torch.cat(parts, dim=1), self._attention(words))
            bins = self.text.embed_tokens.weight[-self.config.num_bins :]
            # Contiguous: of a slice, torch would compute other last bits without gradients (bmm) than with them (mm).
            actions = hidden[:, self._num_prefix :].contiguous().view(len(words), *self._shape, -1)
            logits = nn.functional.linear(actions, bins)  # no view: FSDP2 puts its hooks on what is returned
            value = None if self.value is None else self.value(hidden[:, self._num_prefix - 1]).sum(dim=-1)
        return logits.float(), None if value is None else value.float()

    def _precision(self, device: torch.device) -> AbstractContextManager[Any]:
        """The config's bfloat16, or else the precision that the caller computes in, such as that of an engine."""
        if self.config.dtype == "bfloat16":
            return torch.autocast(device.type, torch.bfloat16)
        return nullcontext()

    def checkpoint_gradients(self, on: bool) -> None:
        """Keep fewer activations for the backward pass and compute them again: less memory, more time."""
        self.vision.checkpointed = self.text.checkpointed = on

    def _images(self, tensors: Tensors) -> list[Tensor]:
        """The tokens of each camera; the images of all cameras go through the vision model in one batch."""
        cameras = self.config.cameras or ()
        pixels = torch.cat([tensors[image(camera)] for camera in cameras])
        scaled = pixels.permute(0, 3, 1, 2).to(torch.float32).div(127.5).sub(1.0)
        patches = self.vision(scaled)  # [N B, patches, C]
        grid = self.shuffle(patches.transpose(1, 2).reshape(len(pixels), -1, self._side, self._side))
        tokens = self.connector(grid.flatten(2).transpose(1, 2))
        return list(tokens.chunk(len(cameras)))

    def _attention(self, words: Tensor) -> Tensor:
        """Which token sees which, bool [B, 1, T, T]; no token attends to the padding after an instruction."""
        mask = self.base_mask.repeat(len(words), 1, 1, 1)
        mask[..., self._words_at] &= (words != PADDING)[:, None, None, :]
        return mask


def _mask(num_prefix: int, num_queries: int) -> Tensor:
    """Bool [1, T, T]: the prefix attends to what comes before, the queries to everything."""
    total = num_prefix + num_queries
    seen = torch.ones(total, total, dtype=torch.bool).tril()
    seen[num_prefix:] = True
    return seen[None]
