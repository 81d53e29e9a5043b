"""Local run: actor and learner in one thread, the reference for all other ways to run RLPD.

It runs an episode, then its updates, then the next episode. All randomness depends on the run's seed and the number of
the episode or batch, and checkpoints are taken between episodes, so a run that was killed and resumed ends with the
same bits as one that was not. Episodes recorded after the checkpoint are rolled back (soft-deleted: `Store.restore`
brings them back) and run again. An EpisodeBackend runs and stores the episodes: in this process, unless another is
given.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from types import TracebackType

from understudy.training.offpolicy.episode_backend import NAME, EpisodeBackend, LocalEpisodeBackend
from understudy.training.offpolicy.rlpd import RLPDConfig
from understudy.training.offpolicy.rlpd_learner import RLPDLearner, RLPDProgress
from understudy.training.runs.checkpoint import newest_checkpoint, read_checkpoint
from understudy.training.runs.config import ConfigError
from understudy.training.runs.health import HEALTH, Health
from understudy.training.runs.run import Run, RunError


class LocalRun:
    """A run that is open for training. `run` returns when its steps are finished."""

    def __init__(
        self,
        run: Run,
        watch: Callable[[RLPDProgress], None] | None = None,
        backend: EpisodeBackend | None = None,
        health: Health | None = None,
    ):
        self.config = run.config(RLPDConfig)
        self.restored: list[str] = []  # what a resumed run restored, for the user
        self._undo = ExitStack()
        self._num_episodes = 0
        try:
            self._backend = backend or LocalEpisodeBackend(run, self.config)
            self._undo.callback(self._backend.close)
            rolled_back = self._rollback(run)
            health = health or Health(run.path / HEALTH, role=NAME, name=run.kind)
            self._backend.start(health)
            self.threads = self.config.use_threads(self._backend.step_spec)
            self._learner = self._undo.enter_context(
                RLPDLearner(run, self.config, self._backend.step_spec, watch, health, self._backend.experience)
            )
            self._undo.enter_context(health)  # only now: the learner holds the run's lock
            if self._learner.facts is None:
                self._save()
            else:
                self._num_episodes = int(self._learner.facts["episodes"])
            self.restored = self._learner.restored + rolled_back
        except BaseException:
            self._undo.close()
            raise

    def close(self) -> None:
        self._undo.close()

    def __enter__(self) -> LocalRun:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._undo.__exit__(kind, error, trace)

    def run(self) -> None:
        """Run episodes and learn until the steps are finished, then evaluate the final policy."""
        learner, config = self._learner, self.config
        while learner.step < config.steps:
            policy = learner.policy()
            learner.version = policy.version if policy is not None else 0
            episode = self._backend.run_episode(policy, self._num_episodes)
            self._num_episodes += 1
            learner.mixture.follow()
            learner.health.progress("learning", learner.step, policy_version=learner.version)
            learner.log(
                "episode",
                episode=self._num_episodes,
                success=episode.success,
                length=episode.num_steps,
                reward=episode.total_reward,
                intervention_steps=episode.num_human,
                takeovers=episode.num_takeovers,
                start=episode.info.init_state,
            )
            metrics = learner.learn(episode.num_steps * config.updates_per_step) if learner.sac is not None else None
            learner.notify(episode=episode, metrics=metrics)
            if learner.sac is not None and learner.due("evaluations", config.eval_every):
                learner.evaluate(self._backend.evaluate)
            if learner.due("checkpoints", config.checkpoint_every):
                self._save()
        if learner.policy() is None:
            raise ConfigError(f"steps: all {config.steps} are start_steps, so nothing was learned; raise steps")
        learner.evaluate(self._backend.evaluate)
        self._save()

    def _save(self) -> None:
        self._learner.save(self._num_episodes, {"episodes": self._num_episodes, "commit": self._backend.commit})

    def _rollback(self, run: Run) -> list[str]:
        """Soft-delete the episodes recorded after the newest checkpoint; returns sentences for the user."""
        newest = newest_checkpoint(run.checkpoints)
        if newest is None:
            return []
        facts = read_checkpoint(newest).facts
        if "commit" not in facts:
            raise RunError(
                f"{run.path}: has a separate learner; resume it with `understudy serve {run.store}` and "
                f"`understudy learner {run.path} SERVER`"
            )
        return self._backend.rollback(facts["commit"])
