"""VLAConfig: the shape of a small VLA."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from understudy.policies.protocol import PolicyError

MAX_CAMERAS = 3


@dataclass(frozen=True, kw_only=True)
class VLAConfig:
    """About 0.6M parameters by default. The size of the pictures is that of the world's cameras."""

    cameras: tuple[str, ...] | None = None  # fields of the observation, one to three; None: every camera there is
    use_proprio: tuple[str, ...] | None = None  # fields of the observation that become one token; None: no such token
    block_steps: int = 5  # actions decided at once
    num_bins: int = 256  # values of each number of an action
    patch: int = 8  # pixels of a patch's side
    shuffle: int = 2  # patches of the side of what becomes one token
    vision_hidden: int = 96
    vision_layers: int = 2
    vision_heads: int = 4
    hidden: int = 128  # of the text model
    layers: int = 2
    heads: int = 4
    mlp_ratio: int = 2  # of both models: how much wider their feed-forward parts are
    max_words: int = 16  # of an instruction
    value_head: bool = False  # whether it judges states too
    dtype: Literal["float32", "bfloat16"] = "float32"  # of products; weights are float32
    act_rows: int = 8  # of one forward pass in `act`, always: fewer are padded

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
        """Pictures that it looks at."""
        return len(self.cameras or ())

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_json(value: Mapping[str, Any]) -> VLAConfig:
        lists = {name: None if value[name] is None else tuple(value[name]) for name in ("cameras", "use_proprio")}
        return VLAConfig(**{**value, **lists})
