"""Learner: one batch of whole groups to the next version of a policy, by one process or by many ranks alike."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import nn

from understudy.algorithms.onpolicy.policy_gradient import PolicyGradient, PolicyGradientConfig, loss_inputs
from understudy.core import BlockBatch, Tree
from understudy.core import tree as trees
from understudy.policies import BlockPolicy, Evaluated, Sampling
from understudy.training.collection import Rollout, to_batch
from understudy.training.distributed.config import EngineConfig
from understudy.training.distributed.engine import Engine
from understudy.training.distributed.row_exchange import exchange_rows
from understudy.training.onpolicy.rollout_exchange import Shared

Array = np.ndarray[Any, Any]

REFERENCE_ROWS = 64  # asked of the reference at a time


class Trainable(BlockPolicy, Protocol):
    """A block policy whose network can be trained in place."""

    version: int
    model: nn.Module
    forward: Callable[..., Any]  # the model, or what wraps it
    device: torch.device

    def num_tokens(self, instruction: str) -> int:
        """Of one row in a forward pass."""
        ...

    def parameters(self, weights: Mapping[str, Array] | None = None) -> Tree:
        """All arrays of the artefact; `weights` are the model's, if it has not all of them here."""
        ...

    def save(self, path: Path, weights: Mapping[str, Any] | None = None) -> None: ...


class Learner:
    """Trains `policy.model` in place. `reference` is a policy that is not trained, if KL is asked for."""

    def __init__(
        self,
        policy: Trainable,
        config: PolicyGradientConfig,
        engine: EngineConfig,
        shared: Shared,
        sampling: Sampling,
        *,
        seed: int,
        reference: Trainable | None = None,
        progress: Callable[[str], None] = lambda doing: None,
    ):
        self.policy = policy
        self.algorithm = PolicyGradient(config)
        self.engine = Engine(policy.model, engine, shared.ranks)
        policy.forward = self.engine.forward  # it acts in the precision that it is trained in
        self._shared = shared
        self._ranks = shared.ranks
        self._sampling = sampling
        self._seed = seed
        self._reference = reference
        self._progress = progress

    def learn(self, rollouts: Sequence[Rollout], number: int) -> dict[str, float]:
        """Update from the rollouts of all ranks; `number` is that of the batch, which decides its order."""
        batch = to_batch(rollouts)
        prepared = self.algorithm.prepare(batch, reference_log_prob=self._reference_log_prob(batch, rollouts))
        plan = self.algorithm.mini_batches(prepared, seed=_mixed(self._seed, number))
        mine = [
            self.algorithm.micro_batches(
                mini, rank=self._ranks.rank, world_size=self._ranks.size, lengths=self._lengths(batch)
            )
            for mini in plan
        ]
        need = np.unique(np.concatenate([part.rows for parts in mine for part in parts]))
        seen = self._shared.observations(rollouts, need)
        totals: dict[str, float] = {}
        norms = []
        for parts in mine:
            for index, part in enumerate(parts):
                evaluated = self._evaluate(self.policy, batch, seen, need, part.rows)
                loss, sums = self.algorithm.loss(evaluated, loss_inputs(prepared, part, self.policy.device))
                self.engine.backward(loss, last=index + 1 == len(parts))
                for name, value in sums.items():
                    totals[name] = totals.get(name, 0.0) + float(value)
                self._progress("learning")
            norms.append(self.engine.step())
        self.policy.version += 1
        metrics = {**prepared.metrics, **self.algorithm.finish_metrics(self._ranks.sum(totals))}
        return {**metrics, "gradient": float(np.mean(norms)), "learning_rate": self.engine.learning_rate}

    def _evaluate(self, policy: Trainable, batch: BlockBatch, seen: Tree, known: Array, wanted: Array) -> Evaluated:
        """What a policy thinks of rows `wanted`, of whose observations those of rows `known` are in `seen`."""
        places = np.searchsorted(known, wanted)
        return policy.evaluate(
            trees.map_leaves(lambda leaf: leaf[places], seen),
            [batch.instruction[row] for row in wanted],
            {name: column[wanted] for name, column in batch.replay.items()},
            sampling=self._sampling,
        )

    def _reference_log_prob(self, batch: BlockBatch, rollouts: Sequence[Rollout]) -> Array | None:
        """What the reference thinks of all rows: each rank asks its own about those that it has."""
        if self._reference is None:
            return None
        here = self._shared.rows_here(rollouts)
        seen = self._shared.observations(rollouts, here)
        found = np.zeros((len(here), *batch.log_prob.shape[1:]), np.float32)
        for first in range(0, len(here), REFERENCE_ROWS):
            some = here[first : first + REFERENCE_ROWS]
            with torch.inference_mode():
                evaluated = self._evaluate(self._reference, batch, seen, here, some)
            found[first : first + len(some)] = evaluated.log_prob.float().cpu().numpy()
            self._progress("asking the reference")
        columns = {"log_prob": found} if len(here) else {}
        return exchange_rows(self._ranks, here, columns, np.arange(len(batch))).columns["log_prob"]

    def _lengths(self, batch: BlockBatch) -> Array | None:
        """Tokens of each row, if micro batches are made by them."""
        if self.algorithm.config.max_tokens is None:
            return None
        return np.array([self.policy.num_tokens(text) for text in batch.instruction])


def _mixed(seed: int, number: int) -> int:
    """One seed of two numbers."""
    return int(np.random.SeedSequence([seed, number]).generate_state(1, np.uint64)[0] >> 1)
