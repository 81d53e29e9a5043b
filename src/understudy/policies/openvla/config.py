"""OpenVLAConfig: what an OpenVLA checkpoint does not say of itself. Importing it does not import torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal, TypeAlias, get_args

from understudy.policies.protocol import PolicyError

Normalization: TypeAlias = Literal["bounds_q99", "bounds"]
Resize: TypeAlias = Literal["processor", "jpeg_lanczos"]

L1_SCALE = 0.05  # of numbers from -1 to 1
DIFFUSION_STEPS = 50  # of the noise that a diffusion head was trained with; no file of a checkpoint says another number


@dataclass(frozen=True, kw_only=True)
class OpenVLAConfig:
    """How an OpenVLA checkpoint is used. Defaults fit OpenVLA-OFT with action tokens, one camera, no proprio."""

    unnorm_key: str | None = None
    """Name of the data set whose statistics scale the actions. None takes the only one in the checkpoint."""
    normalization: Normalization | None = None
    """What is -1 and 1 in actions and proprioception: the 1st and 99th percentile of the data set (bounds_q99) or its
    lowest and highest number (bounds), as in training. None takes the percentiles where the statistics have them."""
    cameras: tuple[str, ...] | None = None
    """Paths of the camera fields of the observation, in the order of training. None takes the only camera."""
    use_proprio: tuple[str, ...] | None = None
    """Paths of the state fields that form the input of the checkpoint's proprioception projector, in order."""
    decoding: Literal["parallel", "autoregressive"] = "parallel"
    """How action tokens are decoded: parallel (OpenVLA-OFT) or autoregressive (OpenVLA)."""
    attention: Literal["bidirectional", "causal"] = "bidirectional"
    """Attention among all tokens in parallel decoding: bidirectional or causal."""
    block_steps: int = 8
    """Number of actions decided at once, as in training (action_chunks_len); 1 if decoding is autoregressive."""
    center_crop: bool = False
    """Whether images are cropped to their center, for checkpoints that were fine-tuned with image_aug."""
    mirror: bool = False
    """Whether images are mirrored left to right, as in OpenVLA's LIBERO data."""
    resize: Resize = "processor"
    """How images are brought to the size of the checkpoint: as its preprocessor_config.json says (processor), or
    compressed as JPEG and resized by Lanczos, as in OpenVLA's LIBERO data and evaluations (jpeg_lanczos)."""
    libero_gripper: bool = False
    """Whether the last number, from 0 (closed) to 1 (open), becomes LIBERO's 1 (closed) or -1 (open)."""
    value_head: bool = False
    """Whether a linear value head is added on the token before the actions, which PPO needs."""
    l1_scale: float = L1_SCALE
    """First scale of the Laplace distribution around what an L1 head predicts, for numbers from -1 to 1; it is trained,
    and a checkpoint that has a trained one keeps it."""
    num_diffusion_steps: int = DIFFUSION_STEPS
    """Number of denoising steps of a diffusion head, from 1 to 50; each is a pass through the language model."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Number format of the weights."""
    act_rows: int | None = None
    """Number of rows of every forward pass in `act`. Fewer rows are padded, so that results do not depend on them.
    None: 8 on a GPU, which takes hardly longer for them than for one, and 1 on the CPU."""
    pad_prompts_to: int | None = None
    """Prompts are padded to a multiple of so many tokens, so that rows with different prompts share a forward pass. It
    has no effect in `act` if decoding is autoregressive. None: 32 on a GPU, and 1, no padding, on the CPU."""

    def __post_init__(self) -> None:
        for name in ("block_steps", "act_rows", "pad_prompts_to"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise PolicyError(f"{name}: expected a number from 1, got {getattr(self, name)}")
        if not 1 <= self.num_diffusion_steps <= DIFFUSION_STEPS:
            wanted = f"1 to {DIFFUSION_STEPS}, which it was trained with"
            raise PolicyError(f"num_diffusion_steps: expected {wanted}, got {self.num_diffusion_steps}")
        if not 0 < self.l1_scale < math.inf:
            raise PolicyError(f"l1_scale: expected more than 0, got {self.l1_scale}")
        for name, choices in (
            ("decoding", ("parallel", "autoregressive")),
            ("attention", ("bidirectional", "causal")),
            ("dtype", ("float32", "bfloat16")),
            ("resize", get_args(Resize)),
            ("normalization", (None, *get_args(Normalization))),
        ):
            if getattr(self, name) not in choices:
                raise PolicyError(f"{name}: expected {' or '.join(map(repr, choices))}, got {getattr(self, name)!r}")
        if self.decoding == "autoregressive" and (self.block_steps != 1 or self.use_proprio is not None):
            raise PolicyError(
                f"decoding: 'autoregressive' goes with block_steps=1 and without use_proprio, got {self.block_steps} "
                f"and {self.use_proprio}; OpenVLA was trained on one action at a time, and on images alone"
            )
        if self.decoding == "autoregressive" and self.attention != OpenVLAConfig.attention:
            raise PolicyError(
                f"attention: has no effect on decoding 'autoregressive', which is always causal, "
                f"got {self.attention!r}; leave it out"
            )
        if self.cameras is not None and not 1 <= len(set(self.cameras)) == len(self.cameras):
            raise PolicyError(f"cameras: expected different names, at least one, got {self.cameras}")
        if self.use_proprio is not None and not self.use_proprio:
            raise PolicyError("use_proprio: expected names of state fields, got none; use None")

    @property
    def num_images_in_input(self) -> int:
        """Number of camera images in the input."""
        return len(self.cameras or ("the only one",))

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_json(value: Mapping[str, Any]) -> OpenVLAConfig:
        lists = {name: None if value[name] is None else tuple(value[name]) for name in ("cameras", "use_proprio")}
        return OpenVLAConfig(**{**value, **lists})
