"""Rollout backend: runs and stores the episodes of a rank, in this process's workers and store or on a cluster."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, Protocol, TypeAlias

import numpy as np

from understudy.policies import Sampling
from understudy.processes.stop import StopRequest
from understudy.replay import Store
from understudy.replay.write.writer import Writer
from understudy.training.collection.block_rows import block_spec, write_rollouts
from understudy.training.collection.collector import TicketRunner
from understudy.training.collection.prefetching_collector import PrefetchingCollector
from understudy.training.collection.rollout import Rollout
from understudy.training.collection.task_start_plan import Ticket
from understudy.training.distributed.ranks import Ranks
from understudy.training.onpolicy.config import OnPolicyConfig
from understudy.training.onpolicy.policy_copy import PolicyCopy
from understudy.training.onpolicy.trainable_policy import TrainablePolicy
from understudy.training.runs.config import ConfigError
from understudy.training.runs.rollback_to_checkpoint import rollback
from understudy.training.runs.run import Run, RunError, policy_path

Array = np.ndarray[Any, Any]


class RolloutBackend(Protocol):
    """What a rank needs to run and store its episodes."""

    @property
    def runner(self) -> TicketRunner: ...

    @property
    def uses_local_policy(self) -> bool:
        """Whether this process's policy acts, so that it must hold all its weights."""
        ...

    @property
    def prefetches(self) -> bool:
        """Whether tickets of the next iteration are run while the policy learns from this one."""
        ...

    def open(self, policy: TrainablePolicy) -> None:
        """Get ready to store the episodes of a policy."""
        ...

    def publish(self, version: int, weights: Callable[[], Mapping[str, Array]]) -> None:
        """Run episodes with this version from now on. All ranks call this, and either all or none call `weights`, which
        returns them on the first rank."""
        ...

    def prefetch(self, tickets: Sequence[Ticket], sampling: Sampling) -> None:
        """Start with tickets of the next iteration, with the policy as it is now; only called if it `prefetches`."""
        ...

    def store(self, rollouts: Sequence[Rollout]) -> None:
        """Store episodes; when this returns, they are durable."""
        ...

    def commits(self) -> dict[str, int]:
        """The last commit of each store that this rank is responsible for, by name."""
        ...

    def rollback(self, commits: Mapping[str, int]) -> list[str]:
        """Soft-delete the episodes begun after these commits; returns sentences for the user."""
        ...

    def close(self) -> None: ...


# Creates the backend of a rank.
RolloutBackendFactory: TypeAlias = Callable[[Run, OnPolicyConfig, Ranks], RolloutBackend]


class LocalRolloutBackend:
    """Workers and a store of this rank's own.

    run/store/            the episodes of rank 0, rejected ones included
    run/stores/rank-1/    those of the other ranks
    """

    uses_local_policy = True

    def __init__(self, run: Run, config: OnPolicyConfig, ranks: Ranks, stop: StopRequest | None = None):
        if config.max_lag and config.engine.parallel == "fsdp":
            raise ConfigError(
                "max_lag: with FSDP each rank holds a shard of the weights while it learns, so that none can act "
                "meanwhile; use engine.parallel ddp, or --cluster"
            )
        self.prefetches = config.max_lag > 0
        self._config, self._device = config, str(ranks.device)
        self._trained: TrainablePolicy | None = None
        self._acting: PolicyCopy | None = None  # the policy that runs tickets while the other one is trained
        self._name = f"rank-{ranks.rank}"
        self._path = run.store if ranks.first else run.path / "stores" / self._name
        self._opened: tuple[Store, Writer] | None = None
        self._undo = ExitStack()
        self.runner = self._undo.enter_context(
            PrefetchingCollector(
                config.env,
                num_parallel_envs=max(config.workers.num_parallel_envs // ranks.size, 1),
                max_attempts=config.workers.max_attempts,
                max_steps=config.max_steps,
                task_affinity=config.workers.task_affinity,
                batch_wait_s=config.workers.batch_wait_ms / 1e3,
                clip_actions=config.clip_actions,
                stop=stop,
            )
        )

    def open(self, policy: TrainablePolicy) -> None:
        store = self._undo.enter_context(Store.open(self._path))
        self._opened = store, store.writer(self._name, block_spec(self.runner.step_spec, policy))
        if self.prefetches:
            self._trained = policy
            path = policy_path(self._config.policy)
            self._acting = PolicyCopy(self._config, path, self.runner.step_spec, device=self._device)
            self._acting.share_frozen_weights(policy.model)

    def _store_and_writer(self) -> tuple[Store, Writer]:
        assert self._opened is not None, "call open first"
        return self._opened

    def publish(self, version: int, weights: Callable[[], Mapping[str, Array]]) -> None:
        """Nothing to do: the policy that acts is the one that is trained."""

    def prefetch(self, tickets: Sequence[Ticket], sampling: Sampling) -> None:
        assert self._acting is not None
        assert self._trained is not None
        self.runner.wait_for_prefetched()
        self._acting.copy_weights(self._trained.version, self._trained.model)
        self.runner.prefetch(tickets, self._acting.policy, sampling)

    def store(self, rollouts: Sequence[Rollout]) -> None:
        write_rollouts(rollouts, self._store_and_writer()[1])

    def commits(self) -> dict[str, int]:
        return {self._name: self._store_and_writer()[0].last_commit}

    def rollback(self, commits: Mapping[str, int]) -> list[str]:
        if strange := sorted(name for name in commits if not name.startswith("rank-")):
            raise RunError(f"this run stores its episodes in {', '.join(strange)}; resume it with --cluster")
        store, _ = self._store_and_writer()
        return rollback(store, store.path, commits.get(self._name, 0), self._name)

    def close(self) -> None:
        self._undo.close()
