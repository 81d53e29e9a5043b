"""A vision encoder of transformers from a local directory, shared by all cameras, with a pooling head for each.

Nothing is downloaded, no code of the checkpoint is run, and weights are read from safetensors alone. A frozen encoder
is no part of the published parameters or of the optimizer: a digest of its files stands for it, and every process loads
the same directory. A trained one is published like any other weights.
"""

from __future__ import annotations

import copy
import hashlib
import inspect
import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from understudy.policies.config import EncoderConfig
from understudy.policies.encoders.image_encoder_base import ImageEncoder, SpatialHead
from understudy.policies.protocol import PolicyError

DEFAULT_MEAN = DEFAULT_STD = (0.5, 0.5, 0.5)  # where the checkpoint has no preprocessor_config.json


class PretrainedEncoder(ImageEncoder):
    """One backbone for all cameras and a `SpatialHead` for each."""

    def __init__(self, config: EncoderConfig, shapes: Mapping[str, tuple[int, ...]], device: torch.device):
        directory = _directory(config)
        for path, (_, _, channels) in shapes.items():
            if channels not in (1, 3):
                raise PolicyError(
                    f"observation/{path}: expected 1 or 3 channels for a pretrained encoder, got {channels}; "
                    f"leave it out of the encoder's inputs, or choose another kind"
                )
        stamp = _stamp(directory)
        backbone = _frozen(directory, stamp, str(device)) if config.frozen else load_backbone(directory)
        size = _image_size(backbone)
        with torch.no_grad():
            like = _positions(backbone, torch.zeros(1, 3, *size, device=next(backbone.parameters()).device))
        _, channels, positions = like.shape
        heads = [
            SpatialHead(channels, positions, num_maps=config.spatial_features, latent=config.latent) for _ in shapes
        ]
        super().__init__(heads)
        self.frozen = config.frozen
        self.digest = _digest(directory, stamp) if config.frozen else None
        self._size = size
        self._shared = [backbone]  # in a list, so that frozen weights are no part of this module's parameters
        if not config.frozen:
            self.backbone = backbone
            _leave_unused_out(backbone, size)
        mean, std = _normalization(directory)
        self.register_buffer("_mean", torch.tensor(mean).view(-1, 1, 1), persistent=False)
        self.register_buffer("_std", torch.tensor(std).view(-1, 1, 1), persistent=False)

    def __deepcopy__(self, memo: dict[int, Any]) -> PretrainedEncoder:
        """A frozen backbone is shared by all copies."""
        if self.frozen:
            memo[id(self._shared[0])] = self._shared[0]
        copied = PretrainedEncoder.__new__(PretrainedEncoder)
        memo[id(self)] = copied
        copied.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return copied

    def forward(self, images: Sequence[Tensor]) -> list[Tensor]:
        features = []
        for head, one in zip(self.cameras, images, strict=True):
            with torch.set_grad_enabled(torch.is_grad_enabled() and not self.frozen):
                positions = _positions(self._shared[0], self._prepared(one))
            features.append(head(positions))
        return features

    def _prepared(self, images: Tensor) -> Tensor:
        """uint8 [B, H, W, C] as the checkpoint's preprocessing makes it: float32 [B, 3, height, width]."""
        x = images.float().mul_(1 / 255).permute(0, 3, 1, 2)
        if x.shape[-2:] != self._size:
            x = functional.interpolate(x, self._size, mode="bilinear", antialias=True, align_corners=False)
        return (x.expand(-1, 3, -1, -1) - self._mean) / self._std

    _mean: Tensor
    _std: Tensor


def load_backbone(directory: Path) -> nn.Module:
    """The vision encoder in a directory; of a model of images and text, its vision half."""
    try:
        from transformers import AutoModel
    except ImportError as error:
        raise PolicyError(
            f"encoder/pretrained: needs transformers ({error}); run: pip install 'understudy-robotics[vla]'"
        ) from error
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)  # a pooling head that the files lack gets the same weights everywhere, and is not used
            model: Any = AutoModel.from_pretrained(
                str(directory),
                local_files_only=True,
                trust_remote_code=False,
                use_safetensors=True,
                dtype=torch.float32,
            )
    except (OSError, ValueError, KeyError) as error:
        raise PolicyError(
            f"encoder/pretrained: {directory}: expected a checkpoint of a vision encoder, got {error}"
        ) from error
    vision: nn.Module = getattr(model, "vision_model", model)
    if "pixel_values" not in inspect.signature(vision.forward).parameters:
        raise PolicyError(
            f"encoder/pretrained: {directory}: expected a vision encoder, got {type(model).__name__}; "
            f"choose a checkpoint that takes images"
        )
    return vision.eval()


@lru_cache(maxsize=4)
def _frozen(directory: Path, stamp: tuple[tuple[str, int, int], ...], device: str) -> nn.Module:
    """Loaded once per process, however many policies use it."""
    return load_backbone(directory).requires_grad_(False).to(device)


def _positions(backbone: nn.Module, pixels: Tensor) -> Tensor:
    """Features [B, C, P] at P positions: of patches and class tokens, or of the cells of a feature map."""
    hidden: Tensor = backbone(pixel_values=pixels).last_hidden_state
    return hidden.flatten(2) if hidden.ndim == 4 else hidden.transpose(1, 2)


def _leave_unused_out(backbone: nn.Module, size: tuple[int, int]) -> None:
    """Weights that no feature depends on, such as those of a pooling head, take no gradient."""
    parameters = [parameter for parameter in backbone.parameters() if parameter.requires_grad]
    features = _positions(backbone, torch.zeros(1, 3, *size)).sum()
    gradients = torch.autograd.grad(features, parameters, allow_unused=True)
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.requires_grad_(gradient is not None)


def _image_size(backbone: nn.Module) -> tuple[int, int]:
    """Height and width that the encoder was trained with; 224 pixels if it does not say."""
    size: Any = getattr(backbone.config, "image_size", None) or 224
    return (size, size) if isinstance(size, int) else (int(size[0]), int(size[1]))


def _normalization(directory: Path) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation of each colour, from preprocessor_config.json if there is one."""
    path = directory / "preprocessor_config.json"
    if not path.is_file():
        return DEFAULT_MEAN, DEFAULT_STD
    try:
        found = json.loads(path.read_text())
        mean, std = (tuple(float(x) for x in found[name]) for name in ("image_mean", "image_std"))
        if len(mean) != 3 or len(std) != 3:
            raise ValueError("expected three colours")
    except (ValueError, KeyError, TypeError) as error:
        raise PolicyError(
            f"encoder/pretrained: {path}: expected image_mean and image_std of three colours, got {error!r}"
        ) from error
    return mean, std


def _directory(config: EncoderConfig) -> Path:
    directory = Path(config.pretrained or "").expanduser().resolve()
    if not (directory / "config.json").is_file() or not list(directory.glob("*.safetensors")):
        raise PolicyError(
            f"encoder/pretrained: expected a directory with config.json and safetensors, got {directory}; "
            f"copy the checkpoint to this path on every machine that learns or acts"
        )
    return directory


def _files(directory: Path) -> list[Path]:
    """All files that the features depend on."""
    names = ("config.json", "preprocessor_config.json")
    return [path for path in sorted(directory.iterdir()) if path.name in names or path.suffix == ".safetensors"]


def _stamp(directory: Path) -> tuple[tuple[str, int, int], ...]:
    """Name, size and time of each file: whether what was loaded before is still what is there."""
    stats = [(path.name, path.stat()) for path in _files(directory)]
    return tuple((name, stat.st_size, stat.st_mtime_ns) for name, stat in stats)


@lru_cache(maxsize=16)
def _digest(directory: Path, stamp: tuple[tuple[str, int, int], ...]) -> str:
    """SHA-256 of all files that the features depend on."""
    found = hashlib.sha256()
    for path in _files(directory):
        found.update(f"{path.name}:{path.stat().st_size}:".encode())
        with path.open("rb") as file:
            while part := file.read(2**20):
                found.update(part)
    return found.hexdigest()
