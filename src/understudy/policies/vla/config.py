"""VLAConfig: the options of a small VLA. Importing it does not import torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from understudy.policies.protocol import PolicyError

MAX_CAMERAS = 3


@dataclass(frozen=True, kw_only=True)
class VLAConfig:
    """The network of a small VLA, by default about 0.6M parameters. Images have the size of the world's cameras."""

    cameras: tuple[str, ...] | None = None
    """Paths of one to three camera fields of the observation. None takes every camera."""
    use_proprio: tuple[str, ...] | None = None
    """Paths of the state fields that become one proprioception token. None adds no such token."""
    block_steps: int = 5
    """Number of actions decided at once."""
    num_bins: int = 256
    """Number of bins into which each number of an action is divided."""
    patch: int = 8
    """Side of an image patch, in pixels."""
    shuffle: int = 2
    """Side of the square of patches that becomes one token, in patches."""
    vision_hidden: int = 96
    """Width of the vision model."""
    vision_layers: int = 2
    """Number of layers of the vision model."""
    vision_heads: int = 4
    """Number of attention heads of the vision model."""
    hidden: int = 128
    """Width of the language model."""
    layers: int = 2
    """Number of layers of the language model."""
    heads: int = 4
    """Number of attention heads of the language model."""
    mlp_ratio: int = 2
    """Width of the feed-forward layers of both models, as a multiple of their own."""
    max_words: int = 16
    """Largest number of words of an instruction."""
    value_head: bool = False
    """Whether the model has a value head, which PPO needs."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Number format of matrix products. Weights are float32."""
    act_rows: int = 8
    """Number of rows of every forward pass in `act`. Fewer rows are padded, so that results do not depend on them."""

    def __post_init__(self) -> None:
        for name in (
            "block_steps",
            "patch",
            "shuffle",
            "vision_hidden",
            "vision_layers",
            "vision_heads",
            "hidden",
            "layers",
            "heads",
            "mlp_ratio",
            "max_words",
            "act_rows",
        ):
            if getattr(self, name) < 1:
                raise PolicyError(f"{name}: expected a number from 1, got {getattr(self, name)}")
        if self.num_bins < 2:
            raise PolicyError(f"num_bins: expected a number from 2, got {self.num_bins}")
        if self.cameras is not None and not 1 <= len(set(self.cameras)) == len(self.cameras) <= MAX_CAMERAS:
            raise PolicyError(f"cameras: expected one to three different names, got {self.cameras}")
        if self.use_proprio is not None and not self.use_proprio:
            raise PolicyError("use_proprio: expected names of state fields, got none; use None")
        for heads, hidden in (("vision_heads", "vision_hidden"), ("heads", "hidden")):
            if getattr(self, hidden) % getattr(self, heads):
                raise PolicyError(
                    f"{heads}: expected a divisor of {hidden} ({getattr(self, hidden)}), got {getattr(self, heads)}"
                )
        if self.hidden // self.heads % 2:
            raise PolicyError(f"heads: expected an even size of each, got {self.hidden} / {self.heads}")
        if self.dtype not in ("float32", "bfloat16"):
            raise PolicyError(f"dtype: expected 'float32' or 'bfloat16', got {self.dtype!r}")

    @property
    def num_images_in_input(self) -> int:
        """Number of camera images in the input."""
        return len(self.cameras or ())

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_json(value: Mapping[str, Any]) -> VLAConfig:
        lists = {name: None if value[name] is None else tuple(value[name]) for name in ("cameras", "use_proprio")}
        return VLAConfig(**{**value, **lists})
