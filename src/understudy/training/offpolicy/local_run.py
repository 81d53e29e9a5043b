"""Local run: actor and learner in one thread, the reference for all other ways to run RLPD.

It runs an episode, then its updates, then the next episode. All randomness depends on the run's seed and the number of
the episode or batch, and checkpoints are taken between episodes, so a run that was killed and resumed ends with the
same bits as one that was not. Episodes recorded after the checkpoint are rolled back (soft-deleted: `Store.restore`
brings them back) and run again. A run that is asked to stop saves after its episode, or in the middle of its updates,
so that nothing is run again. An EpisodeBackend runs and stores the episodes: in this process, unless another is given.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from types import TracebackType

from understudy.processes.stop import Stopped, StopRequest
from understudy.training.data.run_episode import EpisodeResult
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
        stop: StopRequest | None = None,
    ):
        """After a `stop` request, `run` saves and raises Stopped; a `backend` that is given gets the same request."""
        self.config = run.config(RLPDConfig)
        self.restored: list[str] = []  # what a resumed run restored, for the user
        self._undo = ExitStack()
        self._num_episodes = 0
        self._unsaved_steps = self._unsaved_human = 0  # of the episodes since the last checkpoint
        self._path = run.path
        self._stop = stop or StopRequest()
        try:
            self._backend = backend or LocalEpisodeBackend(run, self.config, self._stop)
            self._undo.callback(self._backend.close)
            rolled_back = self._rollback(run)
            health = health or Health(run.path / HEALTH, role=NAME, name=run.kind)
            self._backend.start(health)
            self.threads = self.config.use_threads(self._backend.step_spec)
            self._learner = self._undo.enter_context(
                RLPDLearner(
                    run, self.config, self._backend.step_spec, watch, health, self._backend.experience, self._stop
                )
            )
            self.device = self._learner.device
            self._undo.enter_context(health)  # only now: the learner holds the run's lock
            self._commit = self._backend.commit  # after the last complete episode
            if self._learner.facts is None:
                self._save()
            else:
                self._num_episodes = int(self._learner.facts["episodes"])
            self.restored = self._learner.restored + rolled_back
            if self._learner.step >= self.config.steps:
                self.restored.append(
                    f"the run is finished: {self._learner.step:,} steps, asked for {self.config.steps:,}; "
                    f"`understudy resume {run.path} --steps N` trains it for longer"
                )
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
        self._stop.describe_unsaved = self._describe_unsaved
        try:
            self._learn_and_evaluate(None, learner.unfinished_updates)  # what a stopped run has left
            while learner.step < config.steps:
                self._stop.check()
                episode = self._run_episode()
                num_updates = episode.num_steps * config.updates_per_step if learner.sac is not None else 0
                self._learn_and_evaluate(episode, num_updates)
                if learner.checkpoint_due():
                    self._save()
            if learner.policy() is None:
                raise ConfigError(f"steps: all {config.steps} are start_steps, so nothing was learned; raise steps")
            learner.evaluate(self._backend.evaluate)
        except Stopped as stopped:
            stopped.sentence = self._save_and_describe()
            raise
        self._save()

    def _run_episode(self) -> EpisodeResult:
        learner = self._learner
        policy = learner.policy()
        learner.version = policy.version if policy is not None else 0
        episode = self._backend.run_episode(policy, self._num_episodes)
        self._commit = self._backend.commit
        self._num_episodes += 1
        self._unsaved_steps += episode.num_steps
        self._unsaved_human += episode.num_human
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
        return episode

    def _learn_and_evaluate(self, episode: EpisodeResult | None, num_updates: int) -> None:
        learner = self._learner
        metrics = learner.learn(num_updates) if num_updates else None
        if episode is not None or metrics is not None:
            learner.notify(episode=episode, metrics=metrics)
        if learner.sac is not None and learner.due("evaluations", self.config.eval_every):
            learner.evaluate(self._backend.evaluate)

    def _save(self) -> None:
        self._learner.save(self._num_episodes, {"episodes": self._num_episodes, "commit": self._commit})
        self._unsaved_steps = self._unsaved_human = 0

    def _save_and_describe(self) -> str:
        """Save where the run was stopped; returns a sentence for the user."""
        self._save()
        learner = self._learner
        num_unfinished, _ = self._backend.in_progress
        again = f"the {num_unfinished} steps of an unfinished episode" if num_unfinished else "no step"
        return (
            f"stopped and saved at step {learner.step:,} and update {learner.num_updates:,}: {again} will be run "
            f"again; `understudy resume {self._path}` continues"
        )

    def _describe_unsaved(self) -> str:
        """What a run that quits at once will run again, in words."""
        steps, human = self._backend.in_progress
        steps, human = steps + self._unsaved_steps, human + self._unsaved_human
        return (
            f"{steps} steps ({human} by a human) and {self._learner.num_unsaved_updates} updates since the last "
            f"checkpoint will be run again; `understudy resume {self._path}` continues"
        )

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
