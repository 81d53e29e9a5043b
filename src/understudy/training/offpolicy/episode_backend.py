"""Stage: where the episodes of a run in one thread are lived and kept. Here, in this process, or elsewhere."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Protocol, TypeAlias

from understudy.core import StepSpec
from understudy.envs.registry import open_world
from understudy.envs.world import World
from understudy.policies import ActorPolicy
from understudy.replay import Store
from understudy.training.data.run_episode import Rolled
from understudy.training.offpolicy.actor import Actor
from understudy.training.offpolicy.demo_online_mixture import Shards
from understudy.training.offpolicy.rlpd import RLPDConfig, judge_in, make_takeover
from understudy.training.runs.evaluate import EvaluationConfig, Judged
from understudy.training.runs.health import Health
from understudy.training.runs.rollback import set_aside
from understudy.training.runs.run import Run, RunError

NAME = "local"  # of the actor; chance in its episodes comes from it, wherever they are lived

Commit: TypeAlias = int | dict[str, int]  # of the run's own store, or of each shard by its name


class Stage(Protocol):
    """What a run needs of whoever lives and keeps its episodes. The calls come in this order, `live` many times."""

    @property
    def step_spec(self) -> StepSpec:
        """Of the world."""
        ...

    @property
    def commit(self) -> Commit:
        """How far the store is."""
        ...

    def set_aside(self, commit: Commit) -> list[str]:
        """Delete, softly, what was lived after a commit; says so. Before `begin`, and only if a run goes on."""
        ...

    def begin(self, health: Health) -> None:
        """Be ready to live episodes; `health` is told how it goes."""

    @property
    def experience(self) -> Path | Shards:
        """Where the learner finds what is lived."""
        ...

    def live(self, policy: ActorPolicy | None, number: int) -> Rolled:
        """The episode of a number; when this returns, it is durable and can be read."""
        ...

    def judge(self, policy: ActorPolicy, config: EvaluationConfig, films: Path) -> Judged:
        """Play held-out episodes; see Judge."""
        ...

    def close(self) -> None: ...


class LocalStage:
    """A world and a store in this process."""

    def __init__(self, run: Run, config: RLPDConfig):
        self._config = config
        self._path = run.store
        self._undo = ExitStack()
        try:
            self._world: World = self._undo.enter_context(open_world(config.env))
            self._store = self._undo.enter_context(Store.open(run.store))
        except BaseException:
            self._undo.close()
            raise

    @property
    def step_spec(self) -> StepSpec:
        return self._world.step_spec

    @property
    def commit(self) -> Commit:
        return self._store.last_commit

    @property
    def experience(self) -> Path | Shards:
        return self._path

    def set_aside(self, commit: Commit) -> list[str]:
        if isinstance(commit, dict):
            raise RunError(
                f"{self._path.parent}: what it lived is on {', '.join(commit)}; go on with "
                f"`understudy resume {self._path.parent} --cluster here`"
            )
        return set_aside(self._store, self._path, commit, NAME)

    def begin(self, health: Health) -> None:
        writer = self._store.writer(NAME, self.step_spec)
        takeover = make_takeover(self._config, self._world)
        self._actor = Actor(self._config, self._world, writer, name=NAME, takeover=takeover, health=health)
        self._judge = judge_in(self._world, health.progress)

    def live(self, policy: ActorPolicy | None, number: int) -> Rolled:
        return self._actor.live(policy, number)

    def judge(self, policy: ActorPolicy, config: EvaluationConfig, films: Path) -> Judged:
        return self._judge(policy, config, films)

    def close(self) -> None:
        self._undo.close()
