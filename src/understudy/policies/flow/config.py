"""FlowConfig: the options of a small flow policy. Importing it does not import torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from understudy.policies.config import EncoderConfig
from understudy.policies.protocol import PolicyError


@dataclass(frozen=True, kw_only=True)
class FlowConfig:
    """The network of a small flow policy, by default about 0.6M parameters besides those of the image encoder."""

    encoder: EncoderConfig = field(default_factory=EncoderConfig)
    block_steps: int = 5
    """Number of actions decided at once."""
    hidden: int = 256
    """Width of the network that gives the velocity."""
    layers: int = 4
    """Number of its residual blocks."""
    word_size: int = 32
    """Number of features of a word; an instruction is the mean of its words."""
    max_words: int = 16
    """Largest number of words of an instruction."""
    num_inference_steps: int = 5
    """Number of Euler steps from noise to a block of actions."""
    noise_level: float = 0.0
    """Noise of each Euler step of a sampled block, relative to that of Flow-SDE; 0 takes the steps without noise. GRPO,
    RLOO, REINFORCE++ and PPO need more than 0."""
    noise_bounds: tuple[float, float] | None = None
    """Lowest and highest standard deviation of the noise of each Euler step, where a network learns it (Flow-Noise).
    None has no such network, and noise_level decides. GRPO, RLOO, REINFORCE++ and PPO need one of the two."""
    value_head: bool = False
    """Whether the model has a value head, which PPO needs."""
    advantage: bool = False
    """Whether the model is told if a block is good or bad, for `understudy improve --by recap`."""
    guidance: float = 1.0
    """How far a policy with `advantage` moves from what it does without knowing towards what is good, when it acts: 0
    not at all, 1 all the way, more goes beyond it."""
    act_rows: int = 8
    """Number of rows of every forward pass in `act`. Fewer rows are padded, so that results do not depend on them."""

    def __post_init__(self) -> None:
        for name in (
            "block_steps",
            "hidden",
            "layers",
            "word_size",
            "max_words",
            "num_inference_steps",
            "act_rows",
        ):
            if getattr(self, name) < 1:
                raise PolicyError(f"{name}: expected a number from 1, got {getattr(self, name)}")
        if not 0 <= self.noise_level <= 1:
            raise PolicyError(f"noise_level: expected a number from 0 to 1, got {self.noise_level}; pi_RL uses 0.5")
        if self.noise_bounds is not None:
            low, high = self.noise_bounds
            if not 0 < low < high < math.inf:
                raise PolicyError(
                    f"noise_bounds: expected a lower and a higher number above 0, got {low} and {high}; pi_RL uses "
                    f"0.08 and 0.16"
                )
            if self.noise_level:
                raise PolicyError(
                    f"noise_level: has no effect with noise_bounds, because a network gives the noise, got "
                    f"{self.noise_level}; leave out one of the two"
                )
        if not 0 <= self.guidance < math.inf:
            raise PolicyError(f"guidance: expected a number from 0, got {self.guidance}; 1 to 2.5 are usual")
        if self.guidance != FlowConfig.guidance and not self.advantage:
            raise PolicyError(
                f"guidance: has no effect on a policy without advantage, got {self.guidance}; leave it out, or train "
                f"with `understudy improve --by recap`"
            )

    def to_json(self) -> dict[str, Any]:
        """Without what only some policies have: the files of all others are as they were before there were any."""
        left_out = set() if self.advantage else {"advantage", "guidance"}
        left_out |= set() if self.noise_bounds else {"noise_bounds"}
        return {name: value for name, value in asdict(self).items() if name not in left_out}

    @staticmethod
    def from_json(value: Mapping[str, Any]) -> FlowConfig:
        bounds = value.get("noise_bounds")
        changed = {
            "encoder": EncoderConfig.from_json(value["encoder"]),
            "noise_bounds": None if bounds is None else tuple(bounds),
        }
        return FlowConfig(**{**value, **changed})

    @property
    def has_noisy_steps(self) -> bool:
        """Whether the steps of a sampled block have noise, so that its log-probs depend on the weights."""
        return self.noise_level > 0 or self.noise_bounds is not None
