"""Steering: a frozen policy whose noise an actor chooses (DSRL), in the world and in the learner.

SteeredWorld turns the noise that an actor chooses into actions while episodes are run; observations and what is
recorded stay those of the world itself. FrozenPolicy is the same policy as the learner calls it, for batches.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import numpy as np

from understudy.core import NO_VERSION, StepSpec, Tree
from understudy.core import tree as trees
from understudy.envs.world import World
from understudy.envs.wrapper import WorldWrapper
from understudy.policies.protocol import BlockPolicy, NoisePolicy, Sampling
from understudy.training.data.run_episode import Act
from understudy.training.runs.config import ConfigError

if TYPE_CHECKING:  # the config of a run is read without torch
    from understudy.policies.actions import Actions

Array: TypeAlias = np.ndarray[Any, Any]

GREEDY = Sampling(greedy=True)  # the noise that is given decides on the block, and nothing else is drawn


class SteeredWorld(WorldWrapper):
    """`world`, in which a policy acts with noise that is chosen for each of its blocks.

    The actions of a block are executed one after the other. As soon as something else was executed, such as a human's
    action, the rest of the block is left out.
    """

    def __init__(self, world: World, policy: BlockPolicy, noise_bound: float):
        super().__init__(world)
        self._policy = taking_noise(policy)
        self.noise_bound = noise_bound
        self._instruction = ""
        self._left: list[Tree] = []  # the actions of the block that are left
        self._version = NO_VERSION  # of who chose its noise

    @property
    def noise_shape(self) -> tuple[int, ...]:
        return self._policy.noise_shape

    @property
    def noise_spec(self) -> StepSpec:
        """What an actor sees and chooses here."""
        from understudy.algorithms.offpolicy.dsrl import noise_spec  # only now: it needs torch

        return noise_spec(self.step_spec, self.noise_shape, self.noise_bound)

    def steered(self, choose_noise: Act) -> Act:
        """What chooses noise for an observation as what chooses actions in this world."""

        def act(observation: Tree) -> tuple[Tree, int]:
            if not self._left:
                noise, self._version = choose_noise(observation)
                self._left = self._block(observation, np.asarray(noise))
            return self._left[0], self._version

        return act

    def normal_noise(self, rng: np.random.Generator) -> Act:
        """The noise that the policy draws itself, for `steered`."""
        return lambda _: (rng.standard_normal(self.noise_shape, np.float32), NO_VERSION)

    def reset_without_observation(
        self, *, seed: int | None = None, options: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        info = super().reset_without_observation(seed=seed, options=options)
        self._instruction = info["instruction"] or ""
        self._left = []
        return info

    def step_without_observation(self, action: Tree) -> tuple[float, bool, bool, dict[str, Any]]:
        found = super().step_without_observation(action)
        as_planned = self._left and trees.equal(action, self._left[0])
        self._left = self._left[1:] if as_planned else []
        return found

    def _block(self, observation: Tree, noise: Array) -> list[Tree]:
        one = trees.map_leaves(lambda leaf: np.asarray(leaf)[None], observation)
        rng = np.random.default_rng(0)  # nothing is drawn
        acted = self._policy.act(one, [self._instruction], rngs=[rng], sampling=GREEDY, noise=noise[None])
        return [
            trees.map_leaves(lambda leaf: np.asarray(leaf[0, step]), acted.action)  # noqa: B023 (called at once)
            for step in range(self._policy.block_steps)
        ]


@dataclass(frozen=True, kw_only=True, eq=False)
class FrozenPolicy:
    """A policy as a function of noise, for a learner (NoiseToBlock)."""

    policy: NoisePolicy
    actions: Actions
    instruction: str  # of the run's task

    @property
    def block_steps(self) -> int:
        return self.policy.block_steps

    @property
    def noise_shape(self) -> tuple[int, ...]:
        return self.policy.noise_shape

    def __call__(self, observation: Tree, noise: Array) -> Array:
        """Blocks [B, H, D] from -1 to 1 for observations [B, ...] and noise [B, *noise_shape]."""
        import torch  # only now: the config of a run is read without torch

        num = len(noise)
        rng = np.random.default_rng(0)  # nothing is drawn
        acted = self.policy.act(observation, [self.instruction] * num, rngs=[rng] * num, sampling=GREEDY, noise=noise)
        flat = trees.map_leaves(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), acted.action)
        unit: Array = self.actions.to_unit(flat, torch.device("cpu")).numpy()
        return unit.reshape(num, self.block_steps, -1)


def frozen_policy(policy: BlockPolicy, spec: StepSpec, instruction: str, *, batch_size: int) -> FrozenPolicy:
    """The policy of a run in a world with this spec."""
    from understudy.policies.actions import Actions

    chosen: Any = taking_noise(policy)
    if hasattr(chosen, "with_act_rows"):  # one pass for a batch; no bits need to be those of the world
        chosen = chosen.with_act_rows(batch_size)
    return FrozenPolicy(policy=chosen, actions=Actions(spec.action), instruction=instruction)


def taking_noise(policy: BlockPolicy) -> NoisePolicy:
    """The policy, if its noise can be chosen."""
    if getattr(policy, "noise_shape", None) is None:
        raise ConfigError(
            f"base_policy: expected a policy whose noise can be chosen, such as a flow policy, got "
            f"{type(policy).__name__}, which takes none; train a flow policy, or change its actions with "
            f"--sac.actor.residual-scale 0.5 in place of --sac.noise-bound"
        )
    return cast(NoisePolicy, policy)
