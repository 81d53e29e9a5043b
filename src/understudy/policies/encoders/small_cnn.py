"""The small image encoder: strided 3x3 convolutions, each camera with weights of its own."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from understudy.policies.encoders.image_encoder_base import bottleneck
from understudy.policies.mlp import init_conv, init_linear, new_linear, uninitialized


class SmallCNN(nn.Module):
    """One camera: each convolution halves the image, and a linear layer makes `latent` features of what is left."""

    def __init__(self, shape: tuple[int, int, int], *, filters: Sequence[int], latent: int):
        super().__init__()
        height, width, channels = shape
        for number, num_filters in enumerate(filters):
            self.add_module(f"conv_{number}", uninitialized(nn.Conv2d, channels, num_filters, 3, stride=2, padding=1))
            height, width, channels = (height + 1) // 2, (width + 1) // 2, num_filters
        self.add_module("latent", new_linear(height * width * channels, latent))

    def init_parameters(self, generator: torch.Generator) -> None:
        for layer in self.children():
            if isinstance(layer, nn.Conv2d):
                init_conv(layer, generator)
            elif isinstance(layer, nn.Linear):
                init_linear(layer, generator)

    def forward(self, images: Tensor) -> Tensor:
        """[B, latent] of uint8 [B, H, W, C]."""
        *convs, latent = self.children()
        x = images.float().mul_(1 / 255).sub_(0.5).permute(0, 3, 1, 2)  # stays as it lies in memory: channels last
        for conv in convs:
            x = torch.relu(conv(x))
        return bottleneck(latent(x.flatten(1)))
