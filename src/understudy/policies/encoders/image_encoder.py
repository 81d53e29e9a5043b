"""The choice of an image encoder, for RLPD and every other policy with cameras: `EncoderConfig.kind` names one.

A new one needs an entry here and its kind there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeAlias

import torch

from understudy.policies.config import EncoderConfig
from understudy.policies.encoders.image_encoder_base import ImageEncoder
from understudy.policies.encoders.resnet10 import ResNet10
from understudy.policies.encoders.small_cnn import SmallCNN

Shapes: TypeAlias = Mapping[str, tuple[int, ...]]  # [H, W, C] of each camera, by its path


def _small(config: EncoderConfig, shapes: Shapes, device: torch.device) -> ImageEncoder:
    return ImageEncoder(
        [SmallCNN((h, w, c), filters=config.filters, latent=config.latent) for h, w, c in shapes.values()]
    )


def _resnet10(config: EncoderConfig, shapes: Shapes, device: torch.device) -> ImageEncoder:
    return ImageEncoder(
        [ResNet10((h, w, c), num_maps=config.spatial_features, latent=config.latent) for h, w, c in shapes.values()]
    )


def _pretrained(config: EncoderConfig, shapes: Shapes, device: torch.device) -> ImageEncoder:
    from understudy.policies.encoders.pretrained import PretrainedEncoder  # only now: it needs transformers

    return PretrainedEncoder(config, shapes, device)


IMAGE_ENCODERS: Mapping[str, Callable[[EncoderConfig, Shapes, torch.device], ImageEncoder]] = {
    "small": _small,
    "resnet10": _resnet10,
    "pretrained": _pretrained,
}


def new_image_encoder(config: EncoderConfig, shapes: Shapes, device: torch.device) -> ImageEncoder:
    """The image encoder of this kind; weights that no checkpoint gives are undefined until they are filled."""
    return IMAGE_ENCODERS[config.kind](config, shapes, device)
