"""The options of encoders, actors, classifiers and adapters. Importing them does not import torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal

from understudy.policies.protocol import PolicyError
from understudy.policies.rlpd.gripper import Gripper

ALL_LINEAR = "all-linear"


@dataclass(frozen=True, kw_only=True)
class EncoderConfig:
    """Which fields of the observation a network sees, and the network that turns images into features."""

    inputs: tuple[str, ...] | None = None
    """Paths of the observation's fields that the network sees. None takes all fields."""
    image_size: tuple[int, int] | None = None
    """Height and width that cameras are resized to, in batches and when acting. None takes them as they are."""
    kind: Literal["small", "resnet10", "pretrained"] = "small"
    """The image encoder: small (strided 3x3 convolutions), resnet10 (ResNet-10 with GroupNorm, as in HIL-SERL), or
    pretrained (a vision encoder of transformers from a local directory)."""
    filters: tuple[int, ...] = (16, 32, 32, 32)
    """Number of filters of each 3x3 convolution of the small encoder. Each convolution halves height and width."""
    latent: int = 64
    """Number of features that each camera contributes."""
    spatial_features: int = 8
    """Number of learned spatial maps that pool each channel of resnet10 and of pretrained."""
    pretrained: str | None = None
    """Local directory of a transformers checkpoint (config.json and safetensors), for the kind pretrained."""
    frozen: bool = True
    """Whether the pretrained encoder keeps its weights. If not, it is trained and published with the policy."""

    def __post_init__(self) -> None:
        if self.kind not in ("small", "resnet10", "pretrained"):
            raise PolicyError(f"kind: expected 'small', 'resnet10' or 'pretrained', got {self.kind!r}")
        if not self.filters or min(self.filters) < 1:
            raise PolicyError(f"filters: expected at least one positive number, got {self.filters}")
        for name in ("latent", "spatial_features"):
            if getattr(self, name) < 1:
                raise PolicyError(f"{name}: expected a positive number, got {getattr(self, name)}")
        if self.kind == "pretrained" and not self.pretrained:
            raise PolicyError("pretrained: the kind 'pretrained' needs a directory, got none; name a local checkpoint")
        self._refuse_without_effect()

    def _refuse_without_effect(self) -> None:
        """An option that this kind of encoder does not read must keep its default."""
        read_by = {
            "filters": ("small",),
            "spatial_features": ("resnet10", "pretrained"),
            "pretrained": ("pretrained",),
            "frozen": ("pretrained",),
        }
        default = {field.name: field.default for field in fields(self)}
        for name, kinds in read_by.items():
            if self.kind not in kinds and getattr(self, name) != default[name]:
                raise PolicyError(
                    f"{name}: has no effect on the kind {self.kind!r}; "
                    f"leave it out, or set kind to {' or '.join(map(repr, kinds))}"
                )

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_json(value: Mapping[str, Any]) -> EncoderConfig:
        """The config that `asdict` was taken of; fields that are missing have their defaults."""
        inputs = value["inputs"]
        size = value.get("image_size")
        lists = {
            "inputs": None if inputs is None else tuple(inputs),
            "image_size": None if size is None else tuple(size),
            "filters": tuple(value["filters"]),
        }
        return EncoderConfig(**{**value, **lists})


@dataclass(frozen=True, kw_only=True)
class ActorConfig:
    """The network of an actor."""

    encoder: EncoderConfig = EncoderConfig()
    hidden: tuple[int, ...] = (256, 256)
    """Number of units of each hidden layer."""
    log_std: tuple[float, float] = (-5.0, 2.0)
    """Lowest and highest natural logarithm of the action's standard deviation before tanh."""
    gripper: Gripper | None = None
    """A gripper with a few values, such as {"values": [-1, 1]}, which a critic of its own chooses from. None treats it
    like the other numbers of the action."""
    residual_scale: float | None = None
    """Largest change of the base policy's action that the actor can make, as a share of half the range of each number,
    more than 0 and at most 2. None gives whole actions, without a base policy."""

    def __post_init__(self) -> None:
        if not self.hidden or min(self.hidden) < 1:
            raise PolicyError(f"hidden: expected at least one positive number, got {self.hidden}")
        if not self.log_std[0] < self.log_std[1]:
            raise PolicyError(f"log_std: expected a lower and a higher bound, got {self.log_std}")
        if self.residual_scale is not None and not 0.0 < self.residual_scale <= 2.0:
            raise PolicyError(f"residual_scale: expected more than 0 and at most 2, got {self.residual_scale}")

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_json(value: Mapping[str, Any]) -> ActorConfig:
        gripper = value["gripper"]
        return ActorConfig(
            encoder=EncoderConfig.from_json(value["encoder"]),
            hidden=tuple(value["hidden"]),
            log_std=(value["log_std"][0], value["log_std"][1]),
            gripper=None if gripper is None else Gripper(**{**gripper, "values": tuple(gripper["values"])}),
            residual_scale=value.get("residual_scale"),
        )


@dataclass(frozen=True, kw_only=True)
class ClassifierConfig:
    """The network of a success classifier."""

    encoder: EncoderConfig = EncoderConfig()
    hidden: tuple[int, ...] = (256,)
    """Number of units of each hidden layer."""

    def __post_init__(self) -> None:
        if not self.hidden or min(self.hidden) < 1:
            raise PolicyError(f"hidden: expected at least one positive number, got {self.hidden}")

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_json(value: Mapping[str, Any]) -> ClassifierConfig:
        return ClassifierConfig(encoder=EncoderConfig.from_json(value["encoder"]), hidden=tuple(value["hidden"]))


@dataclass(frozen=True, kw_only=True)
class ValueConfig:
    """The network of a value model, besides its encoder."""

    hidden: tuple[int, ...] = (128, 128)
    """Number of units of each hidden layer."""
    num_bins: int = 201
    """Number of bins of the returns from -1 to 0."""
    word_size: int = 16
    """Number of features of a word; an instruction is the mean of its words."""

    def __post_init__(self) -> None:
        if not self.hidden or min(self.hidden) < 1:
            raise PolicyError(f"hidden: expected at least one positive number, got {self.hidden}")
        for name, least in (("num_bins", 2), ("word_size", 1)):
            if getattr(self, name) < least:
                raise PolicyError(f"{name}: expected a number from {least}, got {getattr(self, name)}")

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_json(value: Mapping[str, Any]) -> ValueConfig:
        return ValueConfig(**{**value, "hidden": tuple(value["hidden"])})


@dataclass(frozen=True, kw_only=True)
class LoraConfig:
    """The size of a LoRA adapter, and the layers that get one."""

    rank: int = 32
    """Rank of the adapter's matrices."""
    alpha: float = 16.0
    """Scale of the adapter: its output is multiplied by alpha / rank."""
    dropout: float = 0.0
    """Probability of dropping an input of the adapter in training. On-policy learning needs 0 (docs/openvla.md)."""
    targets: str | tuple[str, ...] = ALL_LINEAR
    """Names of the linear layers that get an adapter, such as q_proj v_proj; all-linear is every one but the heads."""

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise PolicyError(f"rank: expected a number from 1, got {self.rank}")
        if not self.alpha > 0:
            raise PolicyError(f"alpha: expected more than 0, got {self.alpha}")
        if not 0 <= self.dropout < 1:
            raise PolicyError(f"dropout: expected a share from 0 to below 1, got {self.dropout}")
        if isinstance(self.targets, str) and self.targets != ALL_LINEAR:
            raise PolicyError(f"targets: expected {ALL_LINEAR!r} or a tuple of names, got {self.targets!r}")
        if not self.targets:
            raise PolicyError(f"targets: expected names of layers, got none; use {ALL_LINEAR!r}")
