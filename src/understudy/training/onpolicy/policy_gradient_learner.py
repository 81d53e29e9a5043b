"""Policy gradient learner: trains a policy on one batch of groups, in one process or over many ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from understudy.algorithms.onpolicy.policy_gradient import (
    MiniBatch,
    PolicyGradient,
    PolicyGradientConfig,
    PreparedBatch,
    loss_inputs,
)
from understudy.core import BlockBatch, Tree
from understudy.core import tree as trees
from understudy.policies import Evaluated, Sampling, transfer
from understudy.training.collection.block_rows import to_batch
from understudy.training.collection.rollout import Rollout
from understudy.training.distributed.config import EngineConfig
from understudy.training.distributed.engine import Engine
from understudy.training.distributed.errors import NonFiniteError
from understudy.training.distributed.row_exchange import exchange_rows
from understudy.training.onpolicy.reference_policy import ReferencePolicy
from understudy.training.onpolicy.rollout_exchange import RolloutExchange
from understudy.training.onpolicy.trainable_policy import TrainablePolicy

Array = np.ndarray[Any, Any]


@dataclass(kw_only=True)
class Learning:
    """How far a call of `learn` is."""

    norms: list[float] = field(default_factory=list)  # of the gradient, for each mini batch that is finished
    totals: dict[str, float] = field(default_factory=dict)  # of the metrics of this rank
    log_prob: Array | None = None  # [N, H, D] of all rows before the first update, if they are recomputed


@dataclass(frozen=True, kw_only=True, eq=False)
class _Data:
    """A batch, and the observations of the rows that this rank trains on."""

    batch: BlockBatch
    seen: Tree  # of rows `known`
    known: Array  # [K] int64, ascending


class PolicyGradientLearner:
    """Trains `policy.model` in place. `reference` is the policy that KL is measured from, if any."""

    def __init__(
        self,
        policy: TrainablePolicy,
        config: PolicyGradientConfig,
        engine: EngineConfig,
        exchange: RolloutExchange,
        sampling: Sampling,
        *,
        seed: int,
        progress: Callable[[str], None] = lambda doing: None,
        failures: Path | None = None,
    ):
        """`failures` is where a batch is written whose gradient is not finite."""
        self.policy = policy
        self.algorithm = PolicyGradient(config)
        self.engine = Engine(policy.model, engine, exchange.ranks)
        policy.forward = self.engine.forward  # the policy acts in the precision it is trained in
        self._exchange = exchange
        self._ranks = exchange.ranks
        self._sampling = sampling
        self._seed = seed
        self.reference: ReferencePolicy | None = None
        self._progress = progress
        self._failures = failures
        self.learning = Learning()  # how far `learn` is

    def learn(
        self, rollouts: Sequence[Rollout], number: int, check: Callable[[], None] = lambda: None
    ) -> dict[str, float]:
        """Update on the rollouts of all ranks; the number of the batch decides the order of its rows.

        `check` is called between two mini batches and may raise; if `learning` is saved then and restored later, the
        same call continues with the next mini batch.
        """
        batch = to_batch(rollouts)
        plan = self.algorithm.mini_batches(batch, seed=_batch_seed(self._seed, number))
        mine = [
            self.algorithm.micro_batches(
                mini, rank=self._ranks.rank, world_size=self._ranks.size, lengths=self._lengths(batch)
            )
            for mini in plan
        ]
        need = np.unique(np.concatenate([part.rows for parts in mine for part in parts]))
        seen = self._exchange.observations(rollouts, need)
        data = _Data(batch=batch, seen=self.policy.prepared(seen), known=need)
        learning = self.learning
        first_epoch = [part for parts in mine[: len(mine) // self.algorithm.config.ppo_epochs] for part in parts]
        if self.algorithm.recomputes(self.engine.config.precision) and not learning.norms:
            learning.log_prob = self._log_probs(self.policy, data, first_epoch, "evaluating the batch")
        reference = None
        if self.reference is not None:
            with self.reference.evaluating() as policy:
                reference = self._log_probs(policy, data, first_epoch, "evaluating the reference policy")
        prepared = self.algorithm.prepare(batch, reference_log_prob=reference, log_prob=learning.log_prob)
        for parts in mine[len(learning.norms) :]:
            self._update(parts, data, prepared)
            if len(learning.norms) < len(mine):
                check()
        totals, norms = learning.totals, learning.norms
        self.learning = Learning()
        self.policy.version += 1
        metrics = {**prepared.metrics, **self.algorithm.finish_metrics(self._ranks.sum(totals))}
        return {**metrics, "gradient": float(np.mean(norms)), "learning_rate": self.engine.learning_rate}

    def _update(self, parts: Sequence[MiniBatch], data: _Data, prepared: PreparedBatch) -> None:
        """One step of the optimizer. The host waits for the device at its end alone."""
        names: list[str] = []
        sums: list[Tensor] = []
        for index, part in enumerate(parts):
            evaluated = self._evaluate(self.policy, data, part.rows)
            loss, more = self.algorithm.loss(evaluated, loss_inputs(prepared, part, self.policy.device))
            self.engine.backward(loss, last=index + 1 == len(parts))
            names = list(more)
            sums.append(torch.stack(list(more.values())))
            self._progress("learning")
        try:
            norm = self.engine.step()
        except NonFiniteError as error:
            raise NonFiniteError(f"{error}; {self._write_failure(parts, data, prepared, sums)}") from None
        totals = self.learning.totals
        for row in transfer.to_array(torch.stack(sums)):
            for name, value in zip(names, row, strict=True):
                totals[name] = totals.get(name, 0.0) + float(value)
        self.learning.norms.append(norm)

    def _write_failure(
        self, parts: Sequence[MiniBatch], data: _Data, prepared: PreparedBatch, sums: Sequence[Tensor]
    ) -> str:
        """Write the rows of this rank in a mini batch whose gradient is not finite; returns a sentence about them."""
        if self._failures is None:
            return "give the learner a directory for such batches to see this one"
        rows = np.concatenate([part.rows for part in parts])
        at = np.searchsorted(data.known, rows)
        batch = data.batch
        columns = {
            "row": rows,
            "micro_batch": np.repeat(np.arange(len(parts)), [len(part) for part in parts]),
            "weight": np.concatenate([part.weight for part in parts]),
            "instruction": np.array([batch.instruction[row] for row in rows]),
            "sampler_log_prob": batch.log_prob[rows],
            "old_log_prob": prepared.old_log_prob[rows],
            "advantage": prepared.advantage[rows],
            "executed": batch.executed[rows],
            "finite": np.array([np.isfinite(transfer.to_array(one)).all() for one in sums]),  # by micro batch
            **{f"replay/{name}": column[rows] for name, column in batch.replay.items()},
            **{f"observation/{path}": leaf[at] for path, leaf in trees.flatten(data.seen).items()},
        }
        self._failures.mkdir(parents=True, exist_ok=True)
        path = self._failures / f"update-{self.engine.num_updates + 1:06d}-rank-{self._ranks.rank}.npz"
        np.savez(path, **columns)
        return f"{path} holds the {len(rows)} rows of the mini batch; `finite`: which micro batches had a finite loss"

    def _evaluate(self, policy: TrainablePolicy, data: _Data, wanted: Array) -> Evaluated:
        """Log-probs of rows `wanted` under a policy."""
        positions = np.searchsorted(data.known, wanted)
        return policy.evaluate(
            trees.map_leaves(lambda leaf: leaf[positions], data.seen),
            [data.batch.instruction[row] for row in wanted],
            {name: column[wanted] for name, column in data.batch.replay.items()},
            sampling=self._sampling,
        )

    def _log_probs(self, policy: TrainablePolicy, data: _Data, parts: Sequence[MiniBatch], doing: str) -> Array:
        """Log-probs of all rows under a policy. Each rank evaluates those that it trains on first, in the same shapes:
        kernels round differently for other numbers of rows and other padding."""
        rows, found = [], []
        for part in parts:
            with torch.no_grad():
                log_prob = transfer.to_array(self._evaluate(policy, data, part.rows).log_prob.float())
            own = part.value_weight > 0  # another rank may evaluate what is padding here
            rows.append(part.rows[own])
            found.append(log_prob[own])
            self._progress(doing)
        mine = np.concatenate(rows)
        columns = {"log_prob": np.concatenate(found)} if len(mine) else {}
        return exchange_rows(self._ranks, mine, columns, np.arange(len(data.batch))).columns["log_prob"]

    def _lengths(self, batch: BlockBatch) -> Array | None:
        """Number of tokens of each row, if micro batches are limited by tokens."""
        if self.algorithm.config.max_tokens is None:
            return None
        return np.array([self.policy.num_tokens(text) for text in batch.instruction])


def _batch_seed(seed: int, number: int) -> int:
    """One seed from the run's seed and the number of a batch."""
    return int(np.random.SeedSequence([seed, number]).generate_state(1, np.uint64)[0] >> 1)
