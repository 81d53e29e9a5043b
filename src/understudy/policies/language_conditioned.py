"""LanguageConditionedPolicy: what is common to block policies that are one file and know the words of instructions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
import torch
from torch import Tensor, nn

from understudy.core import Spec, StepSpec, Tree
from understudy.core import tree as trees
from understudy.policies import policy_file
from understudy.policies.encoders.words import Words
from understudy.policies.protocol import Array, PolicyError
from understudy.policies.stats import Stats


class LanguageConditionedPolicy:
    """The part of a policy that follows from its model, its config, its words and its spec."""

    kind: ClassVar[str]  # in the file
    version: int
    config: Any  # has `to_json`
    words: Words
    stats: Stats
    spec: StepSpec  # of its inputs and outputs
    model: nn.Module

    def parameters(self, weights: Mapping[str, Array] | None = None) -> Tree:
        """All arrays, as they are published and saved: a nested dict of float32, in memory of its own.

        `weights` are the model's, by its own names, where it holds only a part of each of them itself (FSDP).
        """
        if weights is None:
            weights = {name: weight.detach().cpu().numpy() for name, weight in self.model.state_dict().items()}
        flat = {f"weights/{name.replace('.', '/')}": np.array(weight) for name, weight in weights.items()}
        return trees.unflatten({**flat, **{name: np.array(array) for name, array in self.stats.flat().items()}})

    def description(self) -> dict[str, Any]:
        """Plain JSON that, with `parameters`, is the whole policy."""
        return {
            "kind": self.kind,
            "version": self.version,
            "config": self.config.to_json(),
            "words": list(self.words.known),
            "observation": self.spec.observation.to_json(),
            "action": self.spec.action.to_json(),
        }

    @classmethod
    def of(cls, parameters: Tree, description: Mapping[str, Any], *, device: str | torch.device = "cpu") -> Self:
        """The policy that `parameters` and `description` were taken of."""
        raise NotImplementedError

    def save(self, path: str | Path, weights: Mapping[str, Array] | None = None) -> None:
        """Write one safetensors file; a crash leaves the old file or the new one. `weights`: see `parameters`."""
        policy_file.write(path, self.description(), self.parameters(weights))

    @classmethod
    def load(cls, path: str | Path, spec: StepSpec | None = None, *, device: str | torch.device = "cpu") -> Self:
        """Read a file. Given the Spec of a world, refuse a policy that was trained for another."""
        return policy_file.load(
            path,
            cls.kind,
            lambda parameters, description: cls.of(parameters, description, device=device),
            lambda policy: None if spec is None else policy.check_world(spec),
        )

    def check_world(self, spec: StepSpec) -> None:
        """Refuse a world that this policy cannot act in."""
        policy_file.check_world(self.spec, spec)


def described_spec(description: Mapping[str, Any]) -> StepSpec:
    """The spec of a policy's inputs and outputs, from its description."""
    return StepSpec(
        observation=Spec.from_json(description["observation"]), action=Spec.from_json(description["action"])
    )


def fill(model: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Load weights into a model; refuse those of another."""
    own = model.state_dict()
    policy_file.check_weights(weights, {name.replace(".", "/"): weight for name, weight in own.items()})
    model.load_state_dict({name: weights[name.replace(".", "/")] for name in own})


def check_rows(instructions: Sequence[str], rngs: Sequence[np.random.Generator]) -> int:
    """The number of rows that `act` is asked for; refuse none, and rows without a generator."""
    num = len(instructions)
    if num < 1:
        raise PolicyError("instructions: expected at least one, got none; give one for each observation")
    if len(rngs) != num:
        raise PolicyError(f"rngs: expected {num} generators, one for each instruction, got {len(rngs)}")
    return num


def padded_batches(num: int, size: int) -> list[Tensor]:
    """Row numbers in batches of one size, padded with the last row: so the bits of a row do not depend on `num`."""
    return [torch.arange(first, first + size).clamp(max=num - 1) for first in range(0, num, size)]
