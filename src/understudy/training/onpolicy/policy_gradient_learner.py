"""Policy gradient learner: trains a policy on one batch of groups, in one process or over many ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from understudy.algorithms.onpolicy.policy_gradient import PolicyGradient, PolicyGradientConfig, loss_inputs
from understudy.core import BlockBatch, Tree
from understudy.core import tree as trees
from understudy.policies import Evaluated, Sampling
from understudy.training.collection.block_rows import to_batch
from understudy.training.collection.rollout import Rollout
from understudy.training.distributed.config import EngineConfig
from understudy.training.distributed.engine import Engine
from understudy.training.distributed.row_exchange import exchange_rows
from understudy.training.onpolicy.rollout_exchange import RolloutExchange
from understudy.training.onpolicy.trainable_policy import TrainablePolicy

Array = np.ndarray[Any, Any]

REFERENCE_ROWS = 64  # per forward pass of the reference policy


@dataclass(kw_only=True)
class Learning:
    """How far a call of `learn` is."""

    norms: list[float] = field(default_factory=list)  # of the gradient, for each mini batch that is finished
    totals: dict[str, float] = field(default_factory=dict)  # of the metrics of this rank


class PolicyGradientLearner:
    """Trains `policy.model` in place. `reference` is the frozen policy that KL is measured from, if any."""

    def __init__(
        self,
        policy: TrainablePolicy,
        config: PolicyGradientConfig,
        engine: EngineConfig,
        exchange: RolloutExchange,
        sampling: Sampling,
        *,
        seed: int,
        reference: TrainablePolicy | None = None,
        progress: Callable[[str], None] = lambda doing: None,
    ):
        self.policy = policy
        self.algorithm = PolicyGradient(config)
        self.engine = Engine(policy.model, engine, exchange.ranks)
        policy.forward = self.engine.forward  # the policy acts in the precision it is trained in
        self._exchange = exchange
        self._ranks = exchange.ranks
        self._sampling = sampling
        self._seed = seed
        self._reference = reference
        self._progress = progress
        self.learning = Learning()  # how far `learn` is

    def learn(
        self, rollouts: Sequence[Rollout], number: int, check: Callable[[], None] = lambda: None
    ) -> dict[str, float]:
        """Update on the rollouts of all ranks; the number of the batch decides the order of its rows.

        `check` is called between two mini batches and may raise; if `learning` is saved then and restored later, the
        same call continues with the next mini batch.
        """
        batch = to_batch(rollouts)
        prepared = self.algorithm.prepare(batch, reference_log_prob=self._reference_log_prob(batch, rollouts))
        plan = self.algorithm.mini_batches(prepared, seed=_batch_seed(self._seed, number))
        mine = [
            self.algorithm.micro_batches(
                mini, rank=self._ranks.rank, world_size=self._ranks.size, lengths=self._lengths(batch)
            )
            for mini in plan
        ]
        need = np.unique(np.concatenate([part.rows for parts in mine for part in parts]))
        seen = self._exchange.observations(rollouts, need)
        learning = self.learning
        totals, norms = learning.totals, learning.norms
        for parts in mine[len(norms) :]:
            for index, part in enumerate(parts):
                evaluated = self._evaluate(self.policy, batch, seen, need, part.rows)
                loss, sums = self.algorithm.loss(evaluated, loss_inputs(prepared, part, self.policy.device))
                self.engine.backward(loss, last=index + 1 == len(parts))
                for name, value in sums.items():
                    totals[name] = totals.get(name, 0.0) + float(value)
                self._progress("learning")
            norms.append(self.engine.step())
            if len(norms) < len(mine):
                check()
        self.learning = Learning()
        self.policy.version += 1
        metrics = {**prepared.metrics, **self.algorithm.finish_metrics(self._ranks.sum(totals))}
        return {**metrics, "gradient": float(np.mean(norms)), "learning_rate": self.engine.learning_rate}

    def _evaluate(
        self, policy: TrainablePolicy, batch: BlockBatch, seen: Tree, known: Array, wanted: Array
    ) -> Evaluated:
        """Log-probs of rows `wanted` under a policy; `seen` holds the observations of rows `known`."""
        positions = np.searchsorted(known, wanted)
        return policy.evaluate(
            trees.map_leaves(lambda leaf: leaf[positions], seen),
            [batch.instruction[row] for row in wanted],
            {name: column[wanted] for name, column in batch.replay.items()},
            sampling=self._sampling,
        )

    def _reference_log_prob(self, batch: BlockBatch, rollouts: Sequence[Rollout]) -> Array | None:
        """Log-probs of all rows under the reference policy; each rank computes those of the rows that it holds."""
        if self._reference is None:
            return None
        here = self._exchange.rows_here(rollouts)
        seen = self._exchange.observations(rollouts, here)
        found = np.zeros((len(here), *batch.log_prob.shape[1:]), np.float32)
        for first in range(0, len(here), REFERENCE_ROWS):
            some = here[first : first + REFERENCE_ROWS]
            with torch.inference_mode():
                evaluated = self._evaluate(self._reference, batch, seen, here, some)
            found[first : first + len(some)] = evaluated.log_prob.float().cpu().numpy()
            self._progress("evaluating the reference policy")
        columns = {"log_prob": found} if len(here) else {}
        return exchange_rows(self._ranks, here, columns, np.arange(len(batch))).columns["log_prob"]

    def _lengths(self, batch: BlockBatch) -> Array | None:
        """Number of tokens of each row, if micro batches are limited by tokens."""
        if self.algorithm.config.max_tokens is None:
            return None
        return np.array([self.policy.num_tokens(text) for text in batch.instruction])


def _batch_seed(seed: int, number: int) -> int:
    """One seed from the run's seed and the number of a batch."""
    return int(np.random.SeedSequence([seed, number]).generate_state(1, np.uint64)[0] >> 1)
