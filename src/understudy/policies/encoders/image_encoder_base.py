"""ImageEncoder: what every image encoder is to the encoder of observations."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from understudy.policies.mlp import init_linear, new_linear


class ImageEncoder(nn.Module):
    """Features of all cameras of an observation. `cameras` has one module per camera, in the observation's order."""

    digest: str | None = None  # of frozen weights that are not among the parameters

    def __init__(self, cameras: Sequence[nn.Module]):
        super().__init__()
        self.cameras = nn.ModuleList(cameras)

    def init_parameters(self, generator: torch.Generator) -> None:
        """Fill all weights that do not come from a checkpoint, camera by camera."""
        for camera in self.cameras:
            camera.init_parameters(generator)  # type: ignore[operator]  # a module of ours

    def forward(self, images: Sequence[Tensor]) -> list[Tensor]:
        """Features float32 [B, latent] of each camera's images uint8 [B, H, W, C]."""
        return [camera(one) for camera, one in zip(self.cameras, images, strict=True)]


class SpatialHead(nn.Module):
    """Learned spatial pooling and a bottleneck: [B, C, P] at P positions to [B, latent] from -1 to 1.

    Each channel is summed over positions with `num_maps` learned maps of its own, as HIL-SERL pools its ResNet.
    """

    def __init__(self, channels: int, positions: int, *, num_maps: int, latent: int):
        super().__init__()
        self.maps = nn.Parameter(torch.empty(channels, positions, num_maps))
        self.latent = new_linear(channels * num_maps, latent)

    @torch.no_grad()
    def init_parameters(self, generator: torch.Generator) -> None:
        bound = (3 / self.maps.shape[1]) ** 0.5
        self.maps.uniform_(-bound, bound, generator=generator)
        init_linear(self.latent, generator)

    def forward(self, features: Tensor) -> Tensor:
        pooled = torch.einsum("bcp,cpm->bcm", features, self.maps)
        return bottleneck(self.latent(pooled.flatten(1)))


def bottleneck(x: Tensor) -> Tensor:
    """LayerNorm without scale and shift, then tanh."""
    return torch.tanh(functional.layer_norm(x, x.shape[-1:]))
