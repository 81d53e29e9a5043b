"""Builds a trajectory [T, B, ...] from the results of single steps [B, ...], as RLinf's rollout worker does.

rollout = EmbodiedRolloutResult(max_episode_length=80)
rollout.append_transitions(curr_obs=obs, next_obs=next_obs)
rollout.append_step_result(ChunkStepResult(actions=actions, rewards=rewards, dones=dones))
buffer.add_trajectories([rollout.to_trajectory()])
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np

from understudy.compat.rlinf.tensors import is_tensor, torch
from understudy.compat.rlinf.trajectory import Trajectory
from understudy.core import SpecError
from understudy.core.spec import describe


@dataclass(kw_only=True)
class ChunkStepResult:
    """What one step of B environments gave, [B, ...] each. A field that is None is not there."""

    actions: Any = None
    prev_logprobs: Any = None
    prev_values: Any = None
    dones: Any = None
    truncations: Any = None
    terminations: Any = None
    rewards: Any = None
    forward_inputs: dict[str, Any] = field(default_factory=dict)
    versions: Any = None
    intervene_flags: Any = None


class EmbodiedRolloutResult:
    """Collects step results and transitions. A field that only some steps have gets the rows of those."""

    def __init__(self, max_episode_length: int = 0, model_weights_id: str = ""):
        self.max_episode_length = max_episode_length
        self.model_weights_id = model_weights_id
        self._steps: dict[str, list[Any]] = {}
        self._transitions: dict[str, list[Any]] = {}

    def append_step_result(self, result: ChunkStepResult) -> None:
        for entry in fields(result):
            value = getattr(result, entry.name)
            if value is not None and not (isinstance(value, Mapping) and not value):
                self._steps.setdefault(entry.name, []).append(value)

    def append_transitions(self, curr_obs: Mapping[str, Any], next_obs: Mapping[str, Any]) -> None:
        self._transitions.setdefault("curr_obs", []).append(curr_obs)
        self._transitions.setdefault("next_obs", []).append(next_obs)

    def to_trajectory(self) -> Trajectory:
        """The steps so far; flags of resets and last values may give a field rows more than there are steps."""
        trajectory = Trajectory(max_episode_length=self.max_episode_length, model_weights_id=self.model_weights_id)
        for name, values in (self._steps | self._transitions).items():
            setattr(trajectory, name, _stack(values, name))
        return trajectory


def _stack(values: list[Any], path: str) -> Any:
    """The values of the steps along a new first dimension; those of cameras that are None stay None."""
    first = values[0]
    if isinstance(first, Mapping):
        for n, value in enumerate(values):
            if not isinstance(value, Mapping) or value.keys() != first.keys():
                raise SpecError(f"{path}: expected {describe(first)} in each step, got {describe(value)} in step {n}")
        return {name: _stack([value[name] for value in values], f"{path}/{name}") for name in first}
    if first is None:
        return None
    if is_tensor(first):
        return torch().stack([value.detach().cpu() for value in values])
    return np.stack(values) if isinstance(first, np.ndarray) else values
