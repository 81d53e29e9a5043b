"""OpenVLAConfig: what a checkpoint of OpenVLA does not say of itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from understudy.policies.protocol import PolicyError


@dataclass(frozen=True, kw_only=True)
class OpenVLAConfig:
    """Defaults are those of OpenVLA-OFT with action tokens, without proprioception, seen from one camera."""

    unnorm_key: str | None = None  # the data set whose statistics scale the actions; None: the only one there is
    cameras: tuple[str, ...] | None = None  # fields of the observation, in the order of training; None: the only one
    use_proprio: tuple[str, ...] | None = None  # fields that, one after another, are what the projector was trained on
    decoding: Literal["parallel", "autoregressive"] = "parallel"  # OpenVLA-OFT's way, or OpenVLA's
    attention: Literal["bidirectional", "causal"] = "bidirectional"  # of parallel decoding, among all tokens
    block_steps: int = 8  # actions decided at once, as in training (action_chunks_len); 1 if autoregressive
    center_crop: bool = False  # for checkpoints that were fine-tuned with image_aug
    mirror: bool = False  # left and right: OpenVLA's LIBERO data are mirrored
    libero_gripper: bool = False  # the last number from 0 (closed) to 1 (open) becomes LIBERO's 1 (closed) or -1
    value_head: bool = False  # whether it judges states too: a linear layer on the token before the actions
    dtype: Literal["float32", "bfloat16"] = "float32"  # of the weights
    act_rows: int = 1  # of one forward pass in `act`, always: fewer are padded

    def __post_init__(self) -> None:
        for name in ("block_steps", "act_rows"):
            if getattr(self, name) < 1:
                raise PolicyError(f"{name}: expected a number from 1, got {getattr(self, name)}")
        for name, choices in (
            ("decoding", ("parallel", "autoregressive")),
            ("attention", ("bidirectional", "causal")),
            ("dtype", ("float32", "bfloat16")),
        ):
            if getattr(self, name) not in choices:
                raise PolicyError(f"{name}: expected {' or '.join(map(repr, choices))}, got {getattr(self, name)!r}")
        if self.decoding == "autoregressive" and (self.block_steps != 1 or self.use_proprio is not None):
            raise PolicyError(
                f"decoding: 'autoregressive' goes with block_steps=1 and without use_proprio, got {self.block_steps} "
                f"and {self.use_proprio}; OpenVLA was trained on one action at a time, and on pictures alone"
            )
        if self.cameras is not None and not 1 <= len(set(self.cameras)) == len(self.cameras):
            raise PolicyError(f"cameras: expected different names, at least one, got {self.cameras}")
        if self.use_proprio is not None and not self.use_proprio:
            raise PolicyError("use_proprio: expected names of state fields, got none; use None")

    @property
    def num_images_in_input(self) -> int:
        """Pictures that it looks at."""
        return len(self.cameras or ("the only one",))

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_json(value: Mapping[str, Any]) -> OpenVLAConfig:
        lists = {name: None if value[name] is None else tuple(value[name]) for name in ("cameras", "use_proprio")}
        return OpenVLAConfig(**{**value, **lists})
