"""TokenPolicy: what is common to block policies that choose a token for each number of each action."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from understudy.core import ArraySpec, Spec
from understudy.policies.protocol import PolicyError, Sampling

TOKENS = "tokens"


class TokenPolicy:
    """The part of a BlockPolicy that follows from its config and its actions."""

    config: Any  # has block_steps and value_head
    actions: Any  # has size
    device: torch.device

    @property
    def block_steps(self) -> int:
        return int(self.config.block_steps)

    @property
    def log_prob_size(self) -> int:
        return int(self.actions.size)

    @property
    def replay_spec(self) -> Spec:
        return Spec({TOKENS: ArraySpec(shape=(self.block_steps, self.log_prob_size), dtype="int32")})  # bins

    @property
    def has_value(self) -> bool:
        return bool(self.config.value_head)

    @property
    def why_no_policy_gradient(self) -> str | None:
        """Its log-probs depend on its weights."""
        return None

    def _recorded(self, replay: Mapping[str, Any], num: int) -> Tensor:
        """The tokens int64 [num, H, D] that `act` has recorded."""
        if TOKENS not in replay:
            raise PolicyError(
                f"replay/{TOKENS}: expected what act() recorded, got {', '.join(replay) or 'nothing'}; store it"
            )
        shape = (num, self.block_steps, self.log_prob_size)
        tokens = torch.as_tensor(np.asarray(replay[TOKENS]), device=self.device).long()
        if tokens.shape != shape:
            raise PolicyError(
                f"replay/{TOKENS}: expected {list(shape)}, got {list(tokens.shape)}; "
                f"take them from the same rows as the observation"
            )
        return tokens


def weigh(logits: Tensor, tokens: Tensor, sampling: Sampling) -> tuple[Tensor, Tensor]:
    """Log-probs and entropies [...] of tokens [...] under logits [..., K], over the bins alone."""
    log_probs = torch.log_softmax(logits / sampling.temperature, dim=-1)
    entropy = -(log_probs.exp() * log_probs).sum(dim=-1)
    return log_probs.gather(-1, tokens[..., None]).squeeze(-1), entropy
