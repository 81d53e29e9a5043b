"""Continuation: blocks that continue the block before, by any method, for a batch of rows.

A block is the policy's answer to an observation. While it is computed, `delay` more actions of the block before are
executed. So these are the first actions of the continued block, and the policy's own follow. This is the same whether
the policy computes in a thread or the world waits for it, which is how a delay is simulated.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

import numpy as np

from understudy.core import AnyTree, Tree
from understudy.core import tree as trees
from understudy.policies.protocol import Acted, Array, BlockPolicy, PolicyError, Sampling
from understudy.policies.rtc.config import RTCConfig
from understudy.policies.rtc.guidance import Guidance, prefix_weights


class Continuation:
    """A block policy that continues. It keeps nothing: the caller keeps each row's block."""

    def __init__(self, policy: BlockPolicy, config: RTCConfig):
        guided = bool(getattr(policy, "takes_guidance", False))
        if config.method in ("rtc", "inpaint") and not guided:
            raise PolicyError(
                f"rtc/method: expected a policy that can be guided, such as a flow policy, for {config.method!r}, got "
                f"a {type(policy).__name__}; use 'blend'"
            )
        self.policy, self.config = policy, config
        self.method: Literal["rtc", "inpaint", "blend", "switch"]
        self.method = ("rtc" if guided else "blend") if config.method == "auto" else config.method
        self.block_steps = policy.block_steps
        self.n_action_steps = config.n_action_steps or -(-self.block_steps // 2)
        if self.n_action_steps > self.block_steps:
            raise PolicyError(
                f"rtc/n_action_steps: expected up to {self.block_steps}, the steps of a block, got "
                f"{self.n_action_steps}; lower it"
            )
        if config.inference_delay is not None and config.inference_delay > self.max_delay:
            raise PolicyError(
                f"rtc/inference_delay: expected up to {self.max_delay} with blocks of {self.block_steps} of which "
                f"{self.n_action_steps} are executed, got {config.inference_delay}; change n_action_steps (half a "
                f"block allows most), or train longer blocks"
            )

    @property
    def max_delay(self) -> int:
        """The largest delay, in steps, at which a block does not run out before the next one is there."""
        return min(self.n_action_steps, self.block_steps - self.n_action_steps)

    def act(
        self,
        observation: Tree,
        instructions: Sequence[str],
        previous: Sequence[AnyTree],
        *,
        used: int,
        delay: int,
        rngs: Sequence[np.random.Generator],
        sampling: Sampling,
    ) -> Acted:
        """Choose for each row; `previous` are the rows' blocks, None for a first one, of which `used` actions have been
        executed and the next `delay` will be. Log-probs and replay are those of the policy's own blocks."""
        left = self.block_steps - used
        horizon = left if self.config.execution_horizon is None else min(self.config.execution_horizon, left)
        delay = min(delay, left)
        horizon = max(horizon, delay)
        if all(block is None for block in previous):
            return self.policy.act(observation, instructions, rngs=rngs, sampling=sampling)
        shifted = [None if block is None else _shifted(block, used) for block in previous]
        has_previous = np.array([block is not None for block in shifted])
        some = next(block for block in shifted if block is not None)
        old = _stacked([some if block is None else block for block in shifted])
        options: dict[str, Any] = {}
        if self.method in ("rtc", "inpaint"):
            options["guidance"] = Guidance(
                previous=old,
                has_previous=has_previous,
                method=self.method,
                inference_delay=delay,
                execution_horizon=horizon,
                prefix_attention_schedule=self.config.prefix_attention_schedule,
                max_guidance_weight=self.config.max_guidance_weight,
            )
        acted = self.policy.act(observation, instructions, rngs=rngs, sampling=sampling, **options)
        # A few denoising steps leave a difference from the old block: it is blended over the overlap.
        schedule = self.config.prefix_attention_schedule if self.method in ("rtc", "blend") else "zeros"
        weights = prefix_weights(self.block_steps, delay, horizon, schedule)
        return replace(acted, action=_mixed(old, acted.action, has_previous[:, None] * weights))


def _shifted(block: Tree, used: int) -> Tree:
    """The block without its first actions; the last one is repeated, so that the shape stays."""

    def shift(leaf: Array) -> Array:
        return np.concatenate([leaf[used:], np.repeat(leaf[-1:], min(used, len(leaf)), axis=0)])

    return trees.map_leaves(shift, block)


def _stacked(blocks: Sequence[Tree]) -> Tree:
    flat = [trees.flatten(block) for block in blocks]
    return trees.unflatten({path: np.stack([one[path] for one in flat]) for path in flat[0]})


def _mixed(old: Tree, new: Tree, weights: Array) -> Tree:
    """The old actions where weights [B, H] are 1, the new ones where they are 0, and means between; of actions that are
    no floats, such as bins of a gripper, the one with more weight."""
    olds, news = trees.flatten(old), trees.flatten(new)

    def mix(path: str) -> Array:
        before, after = olds[path], np.asarray(news[path])
        weight = weights.reshape(*weights.shape, *[1] * (after.ndim - 2)).astype(np.float32)
        if after.dtype.kind != "f":
            return np.where(weight > 0.5, before, after)
        between = (weight * before + (1 - weight) * after).astype(after.dtype)
        return np.where(weight == 1, before, np.where(weight == 0, after, between))

    return trees.unflatten({path: mix(path) for path in news})
