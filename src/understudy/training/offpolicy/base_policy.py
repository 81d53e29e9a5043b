"""Base policy: a frozen block policy whose action is a field of each observation; an actor learns to change it.

BasePolicyWorld adds the field while episodes are run, `add_base_actions` to demonstrations that were recorded before.
The policy only acts: it may be of any registered kind, and need not give gradients.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch

from understudy.core import ArraySpec, Episode, Spec, SpecError, StepSpec, Tree
from understudy.core import tree as trees
from understudy.core.spec import describe
from understudy.durable.files import rename_durably
from understudy.envs.world import World
from understudy.envs.wrapper import WorldWrapper
from understudy.policies.actions import Actions
from understudy.policies.protocol import BlockPolicy, Sampling
from understudy.policies.rlpd.actor import BASE_ACTION
from understudy.replay import Reader, Store

Array: TypeAlias = np.ndarray[Any, Any]

DEMONSTRATIONS = "deleted is null and kind = 'demonstration'"
MAX_ROWS = 64  # that the policy acts for in one call
_STREAM = 3  # joined to an episode's seed for the policy's generator; worlds use 0 and 1, collectors 2


class BasePolicyWorld(WorldWrapper):
    """`world`, with the action that a policy would take as a further field of its observation, from -1 to 1.

    The policy decides on a block, and gives its actions one after the other whatever is executed; then it decides
    again.
    """

    def __init__(self, world: World, policy: BlockPolicy, sampling: Sampling | None = None):
        super().__init__(world)
        self.step_spec = with_base_action(world.step_spec)
        self._blocks = _Blocks(policy, world.step_spec.action, sampling or Sampling())
        self._rng = np.random.default_rng()
        self._instruction = ""
        self._left: Array = np.zeros((0, 0), np.float32)  # the actions of the block that are left, from -1 to 1

    def reset_without_observation(
        self, *, seed: int | None = None, options: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        info = super().reset_without_observation(seed=seed, options=options)
        self._rng = np.random.default_rng([info["seed"], _STREAM])
        self._instruction = info["instruction"] or ""
        self._left = self._left[:0]
        return info

    def step_without_observation(self, action: Tree) -> tuple[float, bool, bool, dict[str, Any]]:
        found = super().step_without_observation(action)
        self._left = self._left[1:]
        return found

    def observe(self) -> Tree:
        observation = _as_dict(self._world.observe())
        if not len(self._left):
            one = trees.map_leaves(lambda leaf: np.asarray(leaf)[None], observation)
            (self._left,) = self._blocks.decide(one, self._instruction, [self._rng])
        return {**observation, BASE_ACTION: self._left[0].copy()}


def with_base_action(spec: StepSpec) -> StepSpec:
    """The spec of steps whose observation has a base action."""
    observation = _as_dict(spec.observation.tree)
    if BASE_ACTION in observation:
        raise SpecError(f"observation/{BASE_ACTION}: expected no such field, because it is added; rename yours")
    size = Actions(spec.action).size
    added = ArraySpec(shape=(size,), dtype="float32", low=-1.0, high=1.0)
    return replace(spec, observation=Spec({**observation, BASE_ACTION: added}))


def without_base_action(spec: StepSpec) -> StepSpec:
    """The spec of the world itself."""
    observation = {name: leaf for name, leaf in _as_dict(spec.observation.tree).items() if name != BASE_ACTION}
    return replace(spec, observation=Spec(observation))


def add_base_actions(
    source: Path,
    target: Path,
    policy: BlockPolicy,
    spec: StepSpec,
    *,
    seed: int,
    progress: Callable[[int], None] = lambda number: None,
) -> int:
    """Copy the demonstrations of a store into a new one, with the base action of each step; returns how many.

    `spec` is that of the world itself. After a crash there is the whole new store or none. `progress` is called with
    the number of episodes so far.
    """
    unfinished = target.with_name(f"{target.name}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    blocks = _Blocks(policy, spec.action, Sampling())
    with Reader(source) as reader, Store.open(unfinished) as store:
        records = list(reader.episodes(DEMONSTRATIONS))
        if not records:
            raise SpecError(f"{source}: expected demonstrations, got none; record some with `understudy record`")
        writer = store.writer("demonstrations", with_base_action(spec))
        for number, record in enumerate(records):
            episode = _with_base_actions(reader.read(record.id), blocks, (seed, record.id, _STREAM))
            writer.begin(episode.info)
            for step in episode.steps():
                writer.append(step)
            writer.end(episode.last_observation)
            progress(number + 1)
        writer.flush()
    rename_durably(unfinished, target)
    return len(records)


def _with_base_actions(episode: Episode, blocks: _Blocks, seed: Sequence[int]) -> Episode:
    observation = _as_dict(episode.observation)
    starts = range(0, len(episode) + 1, blocks.policy.block_steps)
    found: list[Array] = []
    for at in range(0, len(starts), MAX_ROWS):
        rows = list(starts[at : at + MAX_ROWS])
        part = trees.map_leaves(lambda column: np.asarray(column)[rows], observation)  # noqa: B023 (called at once)
        rngs = [np.random.default_rng([*seed, row]) for row in rows]
        found += blocks.decide(part, episode.info.instruction or "", rngs)
    base = np.concatenate(found)[: len(episode) + 1]
    return replace(episode, observation={**observation, BASE_ACTION: base})


class _Blocks:
    """Decides on blocks of actions from -1 to 1."""

    def __init__(self, policy: BlockPolicy, action: Spec, sampling: Sampling):
        self.policy = policy
        self._actions = Actions(action)
        self._sampling = sampling

    def decide(self, observation: Tree, instruction: str, rngs: Sequence[np.random.Generator]) -> list[Array]:
        """A block [H, D] for each row of a batch of observations."""
        rows = len(rngs)
        acted = self.policy.act(observation, [instruction] * rows, rngs=rngs, sampling=self._sampling)
        flat = trees.map_leaves(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), acted.action)
        unit = self._actions.to_unit(flat, torch.device("cpu")).numpy()
        return list(unit.reshape(rows, self.policy.block_steps, -1))


def _as_dict(tree: Any) -> dict[str, Any]:
    if not isinstance(tree, Mapping):
        raise SpecError(
            f"observation: expected fields with names, got {describe(tree)}; a base action is added to them"
        )
    return dict(tree)
