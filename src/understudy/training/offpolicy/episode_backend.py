"""Episode backend: runs and stores the episodes of a local run, in this process or in another one."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Protocol, TypeAlias

from understudy.core import StepSpec
from understudy.envs.world import World
from understudy.policies import ActorPolicy
from understudy.processes.stop import StopRequest
from understudy.replay import Store
from understudy.training.data.run_episode import EpisodeResult
from understudy.training.offpolicy.actor import Actor
from understudy.training.offpolicy.demo_online_mixture import Shards
from understudy.training.offpolicy.rlpd import RLPDConfig, evaluator_for, make_takeover
from understudy.training.runs.evaluate import EvaluationConfig, EvaluationResult, Evaluator
from understudy.training.runs.health import Health
from understudy.training.runs.rollback_to_checkpoint import rollback
from understudy.training.runs.run import Run, RunError

NAME = "local"  # of the actor; its episodes' randomness depends on it, wherever they are run

Commit: TypeAlias = int | dict[str, int]  # of the run's own store, or of each shard by its name


class EpisodeBackend(Protocol):
    """What a local run needs to run and store episodes. The calls come in this order, `run_episode` many times."""

    @property
    def step_spec(self) -> StepSpec:
        """The step spec of the world."""
        ...

    @property
    def commit(self) -> Commit:
        """The last commit of the store."""
        ...

    def rollback(self, commit: Commit) -> list[str]:
        """Soft-delete the episodes begun after a commit; returns sentences for the user.

        Only a resumed run calls this, before `start`.
        """
        ...

    def start(self, health: Health) -> None:
        """Get ready to run episodes; progress is reported to `health`."""

    @property
    def experience(self) -> Path | Shards:
        """Where the learner finds the recorded episodes."""
        ...

    def run_episode(self, policy: ActorPolicy | None, number: int) -> EpisodeResult:
        """Run episode `number`; when this returns, it is durable and readable.

        Raises Stopped if the run was asked to stop and the episode did not end in time; it is then run again.
        """
        ...

    @property
    def in_progress(self) -> tuple[int, int]:
        """How many steps the episode in progress, or the one that was given up, has, and how many a human chose."""
        ...

    def evaluate(self, policy: ActorPolicy, config: EvaluationConfig, videos: Path) -> EvaluationResult:
        """Run held-out episodes; see Evaluator."""
        ...

    def close(self) -> None: ...


class LocalEpisodeBackend:
    """A world and a store in this process."""

    def __init__(self, run: Run, config: RLPDConfig, stop: StopRequest | None = None):
        self._config = config
        self._stop = stop or StopRequest()
        self._path = run.store
        self._actor: Actor | None = None
        self._evaluator: Evaluator | None = None
        self._undo = ExitStack()
        try:
            self._world: World = self._undo.enter_context(config.open_world())
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

    def rollback(self, commit: Commit) -> list[str]:
        if isinstance(commit, dict):
            raise RunError(
                f"{self._path.parent}: its episodes are on {', '.join(commit)}; resume it with "
                f"`understudy resume {self._path.parent} --cluster local`"
            )
        return rollback(self._store, self._path, commit, NAME)

    def start(self, health: Health) -> None:
        writer = self._store.writer(NAME, self.step_spec)
        takeover = make_takeover(self._config, self._world)
        self._actor = Actor(
            self._config,
            self._world,
            writer,
            name=NAME,
            takeover=takeover,
            health=health,
            stop=self._stop,
            keep_unfinished=not self._world.simulated,  # a simulated one comes to the same steps again
        )

        def progress(doing: str) -> None:
            health.progress(doing)
            self._stop.check()  # the resumed run evaluates again

        self._evaluator = evaluator_for(self._world, progress)

    def run_episode(self, policy: ActorPolicy | None, number: int) -> EpisodeResult:
        assert self._actor is not None, "call start first"
        return self._actor.run_episode(policy, number)

    @property
    def in_progress(self) -> tuple[int, int]:
        return (0, 0) if self._actor is None else self._actor.in_progress

    def evaluate(self, policy: ActorPolicy, config: EvaluationConfig, videos: Path) -> EvaluationResult:
        assert self._evaluator is not None, "call start first"
        return self._evaluator(policy, config, videos)

    def close(self) -> None:
        self._undo.close()
