"""Stage: where a run's episodes are lived and kept. Here, in this process's own workers and store, or elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, Protocol, TypeAlias

import numpy as np

from understudy.policies import BlockPolicy, Sampling
from understudy.replay import Store
from understudy.training.collection import Collector, Rollout, Ticket, block_spec, write
from understudy.training.collection.collector import Living
from understudy.training.distributed.ranks import Ranks
from understudy.training.onpolicy.config import OnPolicyConfig
from understudy.training.runs.rollback import set_aside
from understudy.training.runs.run import Run, RunError

Array = np.ndarray[Any, Any]


class Stage(Protocol):
    """What a rank needs of whoever lives and keeps its episodes."""

    @property
    def living(self) -> Living: ...

    @property
    def acts_here(self) -> bool:
        """Whether it is this process's policy that acts, so that it must have all its weights."""
        ...

    def open(self, policy: BlockPolicy) -> None:
        """Be ready to keep what a policy lives."""
        ...

    def publish(self, version: int, weights: Callable[[], Mapping[str, Array]]) -> None:
        """From now on, episodes are lived with this version. All ranks call this, and all call `weights`, or none."""
        ...

    def ahead(self, tickets: Callable[[], Sequence[Ticket]], sampling: Sampling) -> None:
        """Who may can begin with the tickets that will be asked for next, with the policy that is published."""
        ...

    def keep(self, rollouts: Sequence[Rollout]) -> None:
        """Store them; what it has returned from is durable."""
        ...

    def commits(self) -> dict[str, int]:
        """How far each store that this rank answers for has come, by name."""
        ...

    def set_aside(self, commits: Mapping[str, int]) -> list[str]:
        """Delete, softly, what was lived after these commits; says so."""
        ...

    def close(self) -> None: ...


# Makes a rank's stage.
Staging: TypeAlias = Callable[[Run, OnPolicyConfig, Ranks], Stage]


class HereStage:
    """Workers and a store of this rank's own.

    run/store/            rank 0's episodes, those that were dropped too
    run/stores/rank-1/    those of the others
    """

    acts_here = True

    def __init__(self, run: Run, config: OnPolicyConfig, ranks: Ranks):
        self._name = f"rank-{ranks.rank}"
        self._place = run.store if ranks.first else run.path / "stores" / self._name
        self._undo = ExitStack()
        self.living = self._undo.enter_context(
            Collector(
                config.env,
                num_parallel_envs=max(config.workers.num_parallel_envs // ranks.size, 1),
                max_attempts=config.workers.max_attempts,
                max_steps=config.max_steps,
                task_affinity=config.workers.task_affinity,
                clip_actions=config.clip_actions,
            )
        )

    def open(self, policy: BlockPolicy) -> None:
        self._store = self._undo.enter_context(Store.open(self._place))
        self._writer = self._store.writer(self._name, block_spec(self.living.step_spec, policy))

    def publish(self, version: int, weights: Callable[[], Mapping[str, Array]]) -> None:
        """The policy that acts is the one that is trained."""

    def ahead(self, tickets: Callable[[], Sequence[Ticket]], sampling: Sampling) -> None:
        """There is one thread, and it is about to learn."""

    def keep(self, rollouts: Sequence[Rollout]) -> None:
        write(rollouts, self._writer)

    def commits(self) -> dict[str, int]:
        return {self._name: self._store.last_commit}

    def set_aside(self, commits: Mapping[str, int]) -> list[str]:
        if strange := sorted(name for name in commits if not name.startswith("rank-")):
            raise RunError(f"this run keeps its episodes in {', '.join(strange)}; go on with it with --cluster")
        return set_aside(self._store, self._store.path, commits.get(self._name, 0), self._name)

    def close(self) -> None:
        self._undo.close()
