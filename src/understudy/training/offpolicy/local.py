"""Local: actor and learner in one thread, the reference for all other ways of running.

An episode, then its updates, then the next. All chance comes from the run's seed and the number of the episode or
batch, and checkpoints are taken between episodes, so that a run that was killed comes to the same bits as one that was
not. Episodes that were lived after the checkpoint are set aside (deleted softly: `Store.restore` brings them back) and
lived again. Who lives and keeps them is a Stage (stage.py): in this process, unless another is given.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from types import TracebackType

from understudy.training.offpolicy.episode_backend import NAME, LocalStage, Stage
from understudy.training.offpolicy.learner import Learner, Moment
from understudy.training.offpolicy.rlpd import RLPDConfig
from understudy.training.runs.checkpoint import newest_checkpoint, read_checkpoint
from understudy.training.runs.config import ConfigError
from understudy.training.runs.health import HEALTH, Health
from understudy.training.runs.run import Run, RunError


class LocalRun:
    """A run at work. `go` returns when its steps are done."""

    def __init__(
        self,
        run: Run,
        watch: Callable[[Moment], None] | None = None,
        stage: Stage | None = None,
        health: Health | None = None,
    ):
        self.config = run.config(RLPDConfig)
        self._undo = ExitStack()
        self._num_episodes = 0
        try:
            self._stage = stage or LocalStage(run, self.config)
            self._undo.callback(self._stage.close)
            aside = self._set_aside(run)
            health = health or Health(run.path / HEALTH, role=NAME, name=run.kind)
            self._stage.begin(health)
            self._learner = self._undo.enter_context(
                Learner(run, self.config, self._stage.step_spec, watch, health, self._stage.experience)
            )
            self._undo.enter_context(health)  # only now: the run is ours
            if self._learner.facts is None:
                self._save()
            else:
                self._num_episodes = int(self._learner.facts["episodes"])
            self.restored = self._learner.restored + aside
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

    def go(self) -> None:
        """Live and learn until the steps are done, and evaluate what came of it."""
        learner, config = self._learner, self.config
        while learner.step < config.steps:
            policy = learner.policy()
            learner.version = policy.version if policy is not None else 0
            rolled = self._stage.live(policy, self._num_episodes)
            self._num_episodes += 1
            learner.mixture.follow()
            learner.health.progress("learning", learner.step, policy_version=learner.version)
            learner.log(
                "episode",
                episode=self._num_episodes,
                success=rolled.success,
                length=rolled.num_steps,
                reward=rolled.total_reward,
                human_steps=rolled.num_human,
                takeovers=rolled.num_takeovers,
                start=rolled.info.init_state,
            )
            metrics = learner.learn(rolled.num_steps * config.updates_per_step) if learner.sac is not None else None
            learner.tell(rolled=rolled, metrics=metrics)
            if learner.sac is not None and learner.due("evaluations", config.eval_every):
                learner.evaluate(self._stage.judge)
            if learner.due("checkpoints", config.checkpoint_every):
                self._save()
        if learner.policy() is None:
            raise ConfigError(f"steps: all {config.steps} are start_steps, so nothing was learned; give it more")
        learner.evaluate(self._stage.judge)
        self._save()

    def _save(self) -> None:
        self._learner.save(self._num_episodes, {"episodes": self._num_episodes, "commit": self._stage.commit})

    def _set_aside(self, run: Run) -> list[str]:
        """Delete, softly, what this run lived after its checkpoint; says so."""
        newest = newest_checkpoint(run.checkpoints)
        if newest is None:
            return []
        facts = read_checkpoint(newest).facts
        if "commit" not in facts:
            raise RunError(
                f"{run.path}: has a learner of its own; go on with `understudy serve {run.store}` and "
                f"`understudy learner {run.path} SERVER`"
            )
        return self._stage.set_aside(facts["commit"])
