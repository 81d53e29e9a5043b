"""A run: iterations of collecting, learning, evaluating and saving, in one process or as one of many ranks.

All chance comes from the run's seed and from numbers of tickets and iterations, and checkpoints are taken between
iterations, so that a run that was killed comes to the same bits as one that was not. What was lived after the
checkpoint is set aside and lived again. Where episodes are lived and kept is the stage's affair.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from understudy.core import UnderstudyError
from understudy.durable import files
from understudy.training.collection import (
    Collected,
    Group,
    Plan,
    PlannedTask,
    Report,
    Rollout,
    Ticket,
    collect_iteration,
    restore_collection,
    save_collection,
)
from understudy.training.collection.collector import in_order
from understudy.training.collection.groups import group_rollouts
from understudy.training.collection.iteration import first_wave
from understudy.training.distributed.ranks import Ranks, alone
from understudy.training.offpolicy.rlpd import check_device
from understudy.training.onpolicy.config import OnPolicyConfig
from understudy.training.onpolicy.multi_task_evaluation import TaskEvaluationResult, evaluate_tasks
from understudy.training.onpolicy.policy_files import digest_of_policy, keep_policy, load_policy, policy_path
from understudy.training.onpolicy.policy_gradient_learner import Learner, Trainable
from understudy.training.onpolicy.rollout_backend import LocalRolloutBackend, RolloutBackendFactory
from understudy.training.onpolicy.rollout_exchange import Shared
from understudy.training.runs.checkpoint import (
    Checkpoint,
    newest_checkpoint,
    read_checkpoint,
    unfinished,
    write_checkpoint,
)
from understudy.training.runs.health import HEALTH, Health
from understudy.training.runs.metrics import MetricLog, open_sink, rewind
from understudy.training.runs.run import Run, RunError
from understudy.training.runs.fingerprint import fingerprint

REFERENCE = "reference.safetensors"  # the policy that KL is measured from: the one that the run began with
SHARDS = "shards"  # in a checkpoint: what each rank has of weights and optimizer
EVALUATION_SEED = 0  # each evaluation plays the same episodes


@dataclass(frozen=True, kw_only=True)
class Progress:
    """How far a run is, for whoever watches."""

    iteration: int
    iterations: int  # in all
    seconds: float  # since this process began
    episodes: int = 0  # of this iteration, so far
    report: Report | None = None  # of the iteration that is over
    metrics: Mapping[str, float] | None = None
    evaluation: TaskEvaluationResult | None = None


class OnPolicyRun:
    """A run at work. `go` returns when its iterations are done. Every rank makes one, with the same run."""

    def __init__(
        self,
        run: Run,
        watch: Callable[[Progress], None] | None = None,
        ranks: Ranks | None = None,
        staging: RolloutBackendFactory = LocalRolloutBackend,
    ):
        self.run = run
        self.config = config = run.config(OnPolicyConfig)
        self.ranks = ranks or alone()
        self.iteration = 0
        self.num_steps = 0
        self.restored: list[str] = []
        self._watch = watch or (lambda progress: None)
        self._began = time.monotonic()
        self._carried: tuple[Group, ...] = ()
        self._evaluated = -1  # the version of the policy that was evaluated last
        self._num_empty = 0  # iterations in a row that taught nothing
        self._undo = ExitStack()
        try:
            self._open(run, config, staging)
        except BaseException:
            self._undo.close()
            raise

    def _open(self, run: Run, config: OnPolicyConfig, staging: RolloutBackendFactory) -> None:
        check_device(config.device)
        if self.ranks.first:
            self._undo.enter_context(run)
        self.ranks.barrier("the run is ours")
        self.health = Health(
            run.path / HEALTH, role="local" if self.ranks.size == 1 else f"rank-{self.ranks.rank}", name=run.kind
        )
        self.health.progress("starting workers")
        self.stage = staging(run, config, self.ranks)
        self._undo.callback(self.stage.close)
        self._living = self.stage.living
        starts = self._living.suite.starts
        tasks = [PlannedTask(name=task.name, starts=tuple(starts(task, "train"))) for task in self._living.tasks]
        self._plan = Plan(replace(config.plan, seed=config.plan.seed + config.seed), tasks)
        self._shared = Shared(self.ranks)
        self._learner = self._make_learner(run, config)
        self.stage.open(self.policy)
        checkpoint = self._restore()
        self.ranks.barrier("restored")
        if self.ranks.first:
            sinks = tuple(open_sink(name, run.path, run.metadata["config"]) for name in config.sinks)
            self._log: MetricLog | None = MetricLog(run.metrics, sinks)
            self._undo.callback(self._log.close)
        else:
            self._log = None
        self._undo.enter_context(self.health)
        if checkpoint is None:
            self._save()

    def _make_learner(self, run: Run, config: OnPolicyConfig) -> Learner:
        spec = self._living.step_spec
        start = policy_path(config.policy)
        self._start = digest_of_policy(start)
        policy = load_policy(config, start, spec, adapted=True)
        reference = None
        if config.algorithm.kl_in != "none":
            reference = load_policy(config, self._keep_reference(start), spec, adapted=False)
        policy.version = 0
        return Learner(
            policy,
            config.algorithm,
            config.engine,
            self._shared,
            config.sampling,
            seed=config.seed,
            reference=reference,
            progress=self.health.progress,
        )

    def _keep_reference(self, start: Path) -> Path:
        """Where the policy that the run began with is: a small one is copied, a large one stays where it is."""
        if start.is_dir():
            return start
        kept = self.run.path / REFERENCE
        if self.ranks.first and not kept.exists():
            files.write_durably(kept, start.read_bytes())
        self.ranks.barrier("the reference is there")
        return kept

    def close(self) -> None:
        self._undo.close()

    def __enter__(self) -> OnPolicyRun:
        return self

    def __exit__(self, *error: Any) -> None:
        self._undo.__exit__(*error)

    @property
    def policy(self) -> Trainable:
        return self._learner.policy

    # ---- what it does

    def go(self) -> None:
        """All iterations, each a version of the policy, and an evaluation at the beginning and the end."""
        config = self.config
        if self.iteration == 0:
            self.evaluate()
        while self.iteration < config.iterations:
            self.iterate()
            last = self.iteration == config.iterations
            if last or self.iteration % config.eval_every == 0:
                self.evaluate()
            if last or self.iteration % config.checkpoint_every == 0:
                self._save()

    def iterate(self) -> dict[str, float]:
        """Collect, learn, tell."""
        began, cpu = time.monotonic(), time.process_time()
        with self._acting():
            collected = collect_iteration(self._plan, self._collect, self.config.filters, self._carried)
        collected_s = time.monotonic() - began
        self._carried = collected.carried
        self.num_steps += sum(rollout.num_steps for rollout in collected.lived)
        if not collected.groups:
            return self._learn_nothing(collected, collected_s)
        self._num_empty = 0
        if self.iteration + 1 < self.config.iterations:
            self.stage.ahead(
                lambda: self._mine(first_wave(self._plan, self.config.filters, self._carried)), self.config.sampling
            )
        lag = self.policy.version - min((one.version for one in collected.rollouts if not one.failed), default=0)
        metrics = {**self._learner.learn(collected.rollouts, self.iteration), "lag": float(lag)}
        self._shared.only([rollout for group in self._carried for rollout in group.rollouts])
        self.iteration += 1
        self._tell(collected, metrics, collected_s, time.monotonic() - began - collected_s, time.process_time() - cpu)
        return metrics

    def _learn_nothing(self, collected: Collected, collected_s: float) -> dict[str, float]:
        """No group had anything to teach: the policy stays as it is. Too often in a row, and the run ends."""
        self._num_empty += 1
        self._shared.only([])
        self.iteration += 1
        self._tell(collected, {}, collected_s, 0.0, 0.0)
        if self._num_empty >= self.config.max_empty:
            raise UnderstudyError(
                f"{collected.report}. {self._num_empty} iterations in a row had no group that teaches anything: with "
                f"success near 0 give the policy more supervision (`understudy sft`) or easier starts; near 1 it is "
                f"done; or widen filters.accuracy-lower-bound and -upper-bound, or raise plan.max-waves"
            )
        return {}

    def _acting(self) -> AbstractContextManager[None]:
        """Within, episodes are lived with the policy as it is now."""
        engine = self._learner.engine
        self.stage.publish(self.policy.version, lambda: engine.parameters(trainable_only=True))
        return engine.whole() if self.stage.acts_here else nullcontext()

    def _mine(self, tickets: Sequence[Ticket]) -> list[Ticket]:
        return self._plan.share(tickets, self.ranks.rank, self.ranks.size)

    def _collect(self, tickets: Sequence[Ticket]) -> list[Rollout]:
        mine = self._mine(tickets)
        lived = 0

        def over(rollout: Rollout) -> None:
            nonlocal lived
            lived += 1
            self.health.progress("collecting", self.num_steps, self._learner.engine.num_updates, self.policy.version)
            self._say(episodes=lived)

        rollouts = in_order(mine, self._living.stream(mine, self.policy, self.config.sampling), over)
        self.stage.keep(rollouts)
        return self._shared.add(tickets, rollouts)

    def evaluate(self) -> None:
        """The policy alone, as it is now, on held-out starts of every task; once for each version. Rank 0 plays."""
        if self._evaluated == self.policy.version:
            return
        self._evaluated = self.policy.version
        weights = self._learner.engine.parameters(everywhere=False)
        with self._acting():
            if self.ranks.first:
                self.health.progress("evaluating")
                found = evaluate_tasks(
                    self._living,
                    self.policy,
                    self.config.evaluation,
                    seed=EVALUATION_SEED,
                    films=self.run.videos / f"iteration-{self.iteration:06d}",
                    progress=lambda trial: self.health.progress("evaluating"),
                )
                made_of = fingerprint(
                    config=self.run.metadata["config"],
                    parameters=self.policy.parameters(weights),
                    env=self.config.env,
                    versions=self._living.versions,
                )
                self._write("evaluation", iteration=self.iteration, **found.to_json(), fingerprint=made_of.to_json())
                self._say(evaluation=found)
            self.ranks.barrier("evaluated")

    def _tell(
        self, collected: Collected, metrics: Mapping[str, float], collect_s: float, learn_s: float, cpu_s: float
    ) -> None:
        for rollout in collected.lived:
            self._write(
                "episode",
                episode=rollout.ticket.number,
                task=rollout.ticket.task,
                start=rollout.ticket.start,
                success=rollout.success,
                length=rollout.num_steps,
                reward=rollout.total_reward,
                group=rollout.ticket.group,
                human_steps=0,
                takeovers=0,
            )
        steps = sum(rollout.num_steps for rollout in collected.lived)
        self._write("collection", **collected.report.to_json())
        if not metrics:
            self._say(report=collected.report)
            return
        self._write(
            "train",
            iteration=self.iteration,
            **metrics,
            episodes=len(collected.rollouts),
            lived=len(collected.lived),
            groups=len(collected.groups),
            carried=len(collected.carried),
            waves=collected.report.num_waves,
            collect_s=collect_s,
            learn_s=learn_s,
            cpu_s=cpu_s,
            steps_per_s=steps / max(collect_s, 1e-9),
            bytes_moved=self._shared.num_bytes_moved,
        )
        self._say(report=collected.report, metrics=metrics)

    def _write(self, kind: str, **values: Any) -> None:
        if self._log is not None:
            self._log.write(kind, step=self.num_steps, update=self._learner.engine.num_updates, **values)

    def _say(self, **news: Any) -> None:
        seconds = time.monotonic() - self._began
        self._watch(Progress(iteration=self.iteration, iterations=self.config.iterations, seconds=seconds, **news))

    # ---- going on later

    def _save(self) -> None:
        """A checkpoint that any number of ranks can go on from, and the policy as a file of its own."""
        self.health.progress("saving a checkpoint", self.num_steps)
        engine = self._learner.engine
        carried = self._shared.whole([rollout for group in self._carried for rollout in group.rollouts])
        weights = engine.parameters(everywhere=False)
        each = self.ranks.gather_json(self.stage.commits(), name="commits")
        commits = {name: commit for one in each for name, commit in one.items()}
        if not self.ranks.first:
            engine.save(unfinished(self.run.checkpoints, self.iteration) / SHARDS)
            return
        said, arrays = save_collection(self._plan, group_rollouts(carried, self.config.plan.n_samples))
        facts = {
            "start": self._start,
            "iteration": self.iteration,
            "steps": self.num_steps,
            "version": self.policy.version,
            "evaluated": self._evaluated,
            "empty": self._num_empty,
            "collection": said,
            "commits": commits,
            "algorithm": self._learner.algorithm.state(),
            "metrics": 0 if self._log is None else self._log.position,
        }
        write_checkpoint(
            self.run.checkpoints,
            self.iteration,
            arrays,
            facts,
            keep=self.config.keep_checkpoints,
            fill=lambda place: engine.save(place / SHARDS),
        )
        last = self.iteration == self.config.iterations
        keep_policy(self.policy, self.run, weights, adapted=bool(self.config.lora.rank), last=last)

    def _restore(self) -> Checkpoint | None:
        newest = newest_checkpoint(self.run.checkpoints)
        if newest is None:
            return None
        checkpoint = read_checkpoint(newest)
        facts = checkpoint.facts
        if facts["start"] != self._start:
            raise RunError(
                f"policy: {self.config.policy} is not the policy any more that this run began with; "
                f"restore it, or begin a new run"
            )
        self._learner.engine.load(newest / SHARDS)
        self._learner.algorithm.restore(facts["algorithm"])
        carried = restore_collection(self._plan, facts["collection"], checkpoint.state)
        self._carried = tuple(self._kept(group) for group in carried)
        self.iteration, self.num_steps = int(facts["iteration"]), int(facts["steps"])
        self.policy.version, self._evaluated = int(facts["version"]), int(facts["evaluated"])
        self._num_empty = int(facts.get("empty", 0))
        aside = self.stage.rollback(facts["commits"])
        lines = rewind(self.run.metrics, int(facts["metrics"])) if self.ranks.first else 0
        self.restored = [
            f"restored checkpoint {newest.name}: policy version {self.policy.version} and its optimizer, after "
            f"{self._learner.engine.num_updates} updates",
            f"restored collection: iteration {self.iteration}, task and start rings, {len(self._carried)} groups "
            f"carried over",
            f"took back {lines} lines of metrics behind the checkpoint",
            *aside,
        ]
        return checkpoint

    def _kept(self, group: Group) -> Group:
        """Rank 0 keeps the observations of what was carried over, and hands them out from there."""
        if self.ranks.first:
            return Group(rollouts=tuple(self._shared.keep(rollout) for rollout in group.rollouts))
        bare = Shared(self.ranks)
        return Group(rollouts=tuple(bare.keep(rollout) for rollout in group.rollouts))
