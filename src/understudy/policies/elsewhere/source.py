"""PolicySource: a policy named by text, for another interpreter to build; PlainPolicy: what it must be there."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from understudy.policies.protocol import Array, PolicyError


@dataclass(frozen=True, kw_only=True)
class PolicySource:
    """What builds the policy, `factory(**options)`, and the interpreter and variables of the process it lives in."""

    factory: str  # "module:name" of something that gives a PlainPolicy
    options: Mapping[str, Any] = field(default_factory=dict)  # plain JSON values
    python: str | None = None  # an interpreter, such as openpi/.venv/bin/python, that has numpy; None: this one
    env: Mapping[str, str] = field(default_factory=dict)  # on top of this process's own variables

    def __post_init__(self) -> None:
        module, colon, name = self.factory.partition(":")
        if not (module and colon and name):
            raise PolicyError(f"factory: expected 'module:name', such as my_vla:Policy, got {self.factory!r}")
        try:
            plain = json.loads(json.dumps(dict(self.options)))
        except (TypeError, ValueError) as error:
            raise PolicyError(
                f"options: expected plain JSON values, got {error}; pass numbers, text and lists"
            ) from None
        object.__setattr__(self, "options", plain)
        if not all(isinstance(x, str) for pair in self.env.items() for x in pair):
            raise PolicyError(f"env: expected names and values that are text, got {dict(self.env)!r}; convert them")
        object.__setattr__(self, "env", dict(self.env))

    @property
    def label(self) -> str:
        """The short name, for messages."""
        return self.factory.rpartition(":")[2]


class PlainPolicy(Protocol):
    """A block policy in the other interpreter: dicts of numpy arrays, by the paths of their fields; nothing of ours.

    What is one array and no dict has the path ''. Log-probs, entropies and values are float32.

    Row i is drawn with `rngs[i]` and comes to the same bits whatever the other rows are, as of every block policy.
    """

    block_steps: int
    log_prob_size: int
    replay_spec: Mapping[str, tuple[Sequence[int], str]]  # such as {"tokens": ((8, 7), "int32")}, of one row
    has_value: bool

    def act(
        self,
        observation: Mapping[str, Array],
        instructions: Sequence[str],
        *,
        rngs: Sequence[np.random.Generator],
        temperature: float,
        greedy: bool,
    ) -> Mapping[str, Any]:
        """Action [B, H, ...] (or a dict of such by path), replay (a dict), log_prob [B, H, D], perhaps value [B]."""
        ...

    def evaluate(
        self,
        observation: Mapping[str, Array],
        instructions: Sequence[str],
        replay: Mapping[str, Array],
        *,
        temperature: float,
    ) -> Mapping[str, Any]:
        """log_prob and entropy [B, H, D], and perhaps value [B]."""
        ...

    def load(self, path: str) -> None:
        """Take the weights from a file or directory; needed only by who gives paths."""
        ...

    def set_parameters(self, parameters: Mapping[str, Array]) -> None:
        """Take these weights, by name; needed only by who gives arrays."""
        ...
