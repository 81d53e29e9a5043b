"""ResNet-10 with GroupNorm and learned spatial pooling, as HIL-SERL uses it; trained from scratch, one per camera."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from understudy.policies.encoders.image_encoder_base import SpatialHead
from understudy.policies.mlp import init_conv, uninitialized

IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
FILTERS = (64, 128, 256, 512)  # of the four blocks; all but the first halve the image
NUM_GROUPS = 4


class ResNet10(nn.Module):
    """One camera: a 7x7 convolution, four residual blocks, spatial pooling and a bottleneck."""

    def __init__(self, shape: tuple[int, int, int], *, num_maps: int, latent: int):
        super().__init__()
        height, width, channels = shape
        colour = channels == 3
        mean, std = (IMAGENET_MEAN, IMAGENET_STD) if colour else ((0.5,) * channels, (0.25,) * channels)
        self.register_buffer("_mean", torch.tensor(mean).view(-1, 1, 1), persistent=False)
        self.register_buffer("_std", torch.tensor(std).view(-1, 1, 1), persistent=False)
        self.conv = uninitialized(nn.Conv2d, channels, FILTERS[0], 7, stride=2, padding=3, bias=False)
        self.norm = nn.GroupNorm(NUM_GROUPS, FILTERS[0])
        sizes = (FILTERS[0], *FILTERS)
        self.blocks = nn.ModuleList(
            ResidualBlock(num_in, num_out, stride=1 if number == 0 else 2)
            for number, (num_in, num_out) in enumerate(zip(sizes, FILTERS, strict=False))
        )
        for _ in range(2 + len(FILTERS) - 1):  # the first convolution, the pooling, and all blocks but the first
            height, width = (height + 1) // 2, (width + 1) // 2
        self.head = SpatialHead(FILTERS[-1], height * width, num_maps=num_maps, latent=latent)

    def init_parameters(self, generator: torch.Generator) -> None:
        for layer in self.modules():
            if isinstance(layer, nn.Conv2d):
                init_conv(layer, generator)
            elif isinstance(layer, nn.GroupNorm):
                layer.reset_parameters()
        self.head.init_parameters(generator)

    def forward(self, images: Tensor) -> Tensor:
        """[B, latent] of uint8 [B, H, W, C]."""
        x = images.float().mul_(1 / 255).permute(0, 3, 1, 2)
        x = torch.relu(self.norm(self.conv((x - self._mean) / self._std)))
        x = functional.max_pool2d(x, 3, stride=2, padding=1)
        for block in self.blocks:
            x = block(x)
        features: Tensor = self.head(x.flatten(2))
        return features

    _mean: Tensor
    _std: Tensor


class ResidualBlock(nn.Module):
    """Two 3x3 convolutions with GroupNorm beside a shortcut."""

    def __init__(self, num_in: int, num_out: int, *, stride: int):
        super().__init__()
        self.conv_0 = uninitialized(nn.Conv2d, num_in, num_out, 3, stride=stride, padding=1, bias=False)
        self.norm_0 = nn.GroupNorm(NUM_GROUPS, num_out)
        self.conv_1 = uninitialized(nn.Conv2d, num_out, num_out, 3, padding=1, bias=False)
        self.norm_1 = nn.GroupNorm(NUM_GROUPS, num_out)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or num_in != num_out:
            projection = uninitialized(nn.Conv2d, num_in, num_out, 1, stride=stride, bias=False)
            self.shortcut = nn.Sequential(projection, nn.GroupNorm(NUM_GROUPS, num_out))

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.norm_0(self.conv_0(x)))
        return torch.relu(self.shortcut(x) + self.norm_1(self.conv_1(y)))
