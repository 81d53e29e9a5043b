"""On-policy run: iterations of collecting, learning, evaluating and saving, in one process or as one of many ranks.

All randomness depends on the run's seed and on the numbers of tickets and iterations, and checkpoints are taken between
iterations, so a run that was killed and resumed ends with the same bits as one that was not. Episodes recorded after
the checkpoint are rolled back and run again. A run that is asked to stop saves in the middle of an iteration: its
finished episodes and mini batches are in the checkpoint. Checkpoints are written while the run goes on
(`checkpoint_writer.py`). A RolloutBackend runs and stores the episodes.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

from understudy.core import UnderstudyError
from understudy.processes.stop import Stopped, StopRequest
from understudy.training.collection.groups import Group, group_rollouts
from understudy.training.collection.iteration import CollectedIteration, IterationReport, collect_iteration, first_wave
from understudy.training.collection.rollout import Rollout
from understudy.training.collection.serialization import restore_collection, save_collection
from understudy.training.collection.shared_tickets import Sharing, share
from understudy.training.collection.task_start_plan import Ticket
from understudy.training.distributed.ranks import Ranks, single_rank
from understudy.training.onpolicy.checkpoint_writer import (
    SHARDS,
    CheckpointSnapshot,
    CheckpointWriter,
    PolicySnapshot,
)
from understudy.training.onpolicy.config import OnPolicyConfig
from understudy.training.onpolicy.multi_task_evaluation import TaskEvaluation, TaskEvaluationResult
from understudy.training.onpolicy.policy_files import is_one_file
from understudy.training.onpolicy.policy_gradient_learner import Learning
from understudy.training.onpolicy.rollout_backend import LocalRolloutBackend, RolloutBackendFactory
from understudy.training.onpolicy.rollout_exchange import RolloutExchange
from understudy.training.onpolicy.run_builder import build_parts
from understudy.training.onpolicy.trainable_policy import TrainablePolicy
from understudy.training.runs.checkpoint import Checkpoint, newest_checkpoint, read_checkpoint
from understudy.training.runs.config import ConfigError
from understudy.training.runs.device import Device, choose_device
from understudy.training.runs.fingerprint import fingerprint
from understudy.training.runs.metrics import MetricLog, open_sink, rewind
from understudy.training.runs.run import Run, RunError
from understudy.training.runs.threads import use_threads

LEARNING = "learning/log_prob"  # in a checkpoint: the log-probs that the ratios of an unfinished batch begin from
EVALUATION_SEED = 0  # every evaluation runs the same episodes


@dataclass(frozen=True, kw_only=True)
class OnPolicyProgress:
    """How far an on-policy run is, for its watcher."""

    iteration: int
    iterations: int  # of the whole run
    seconds: float  # since this process began
    episodes: int = 0  # of this iteration, so far
    report: IterationReport | None = None  # of the iteration that has just finished
    metrics: Mapping[str, float] | None = None
    evaluation: TaskEvaluationResult | None = None


@dataclass(frozen=True, kw_only=True, eq=False)
class IterationStart:
    """What an iteration begins from: a run that is stopped in its middle begins it again with what was collected."""

    plan: Mapping[str, Any]  # the state of the plan
    carried: tuple[Group, ...]
    num_steps: int
    algorithm: Mapping[str, Any]


class OnPolicyRun:
    """A run that is open for training. `run` returns when its iterations are finished. Every rank makes one."""

    def __init__(
        self,
        run: Run,
        watch: Callable[[OnPolicyProgress], None] | None = None,
        ranks: Ranks | None = None,
        backend_factory: RolloutBackendFactory | None = None,
        stop: StopRequest | None = None,
    ):
        """After a `stop` request to any rank, `run` saves and raises Stopped on all of them."""
        self.directory = run
        self.config = run.config(OnPolicyConfig)
        self.ranks = ranks or single_rank(self.config.device)
        self.device = _same_device(self.config.device, self.ranks)
        self.threads = use_threads(self.config.threads, large=True)
        self.iteration = 0
        self.num_steps = 0
        self.restored: list[str] = []  # what a resumed run restored, for the user
        self._watch = watch or (lambda progress: None)
        self._began = time.monotonic()
        self._stop = stop or StopRequest()
        self._carried: tuple[Group, ...] = ()
        self._start: IterationStart | None = None  # of the iteration in progress
        self._collected: dict[int, Rollout] = {}  # finished in the iteration in progress, by the number of their ticket
        self._prefetching: tuple[Ticket, ...] = ()  # of the next iteration; all ranks run their shares
        self._collecting_since: tuple[float, float] | None = None  # if tickets were prefetched: time, and `busy_s` then
        self._save_s = self._save_wait_s = 0.0  # for saves since the last metrics: stood still; waited for a write
        self._writer = CheckpointWriter(run, self.ranks, keep=self.config.keep_checkpoints)
        self._evaluated_version = -1  # of the policy that was evaluated last
        self._num_empty = 0  # iterations in a row without a group to learn from
        self._log: MetricLog | None = None  # rank 0 has one
        self._undo = ExitStack()
        try:
            make_backend = backend_factory or partial(LocalRolloutBackend, stop=self._stop)
            parts = build_parts(run, self.config, self.ranks, make_backend, self._undo)
            self.health = parts.health
            self.backend = parts.backend
            self._plan = parts.plan
            self._exchange = parts.exchange
            self._learner = parts.learner
            self._start_digest = parts.start_digest
            checkpoint = self._restore()
            self.ranks.barrier("restored")
            if self.ranks.first:
                sinks = tuple(open_sink(name, run.path, run.metadata["config"]) for name in self.config.sinks)
                self._log = MetricLog(run.metrics, sinks)
                self._undo.callback(self._log.close)
            self._undo.enter_context(self.health)
            self._undo.push(self._writer.end)  # before all others end
            if checkpoint is None:
                self._save()
        except BaseException:
            self._undo.close()
            raise

    def close(self) -> None:
        self._undo.close()

    def __enter__(self) -> OnPolicyRun:
        return self

    def __exit__(self, *error: Any) -> None:
        self._undo.__exit__(*error)

    @property
    def policy(self) -> TrainablePolicy:
        return self._learner.policy

    # ---- collecting and learning

    def run(self) -> None:
        """Run all iterations, each of which makes a version of the policy, and evaluate first, last and in between."""
        config = self.config
        self._stop.describe_unsaved = self._describe_unsaved
        try:
            self._evaluate_if_due()
            while self.iteration < config.iterations:
                self._check_stop()
                self._writer.check()
                self.iterate()
                self._evaluate_if_due()
                keep = config.save_policy_every is not None and self.iteration % config.save_policy_every == 0
                checkpoint = self.iteration == config.iterations or self.iteration % config.checkpoint_every == 0
                if keep or checkpoint:
                    self._save(checkpoint=checkpoint, keep_policy=keep)
            self._wait_saved()
        except Stopped as stopped:
            stopped.sentence = self._save_and_describe()
            raise

    def _evaluate_if_due(self) -> None:
        if self.iteration == self.config.iterations or self.iteration % self.config.eval_every == 0:
            self.evaluate()

    def _check_stop(self) -> None:
        """Raise Stopped on all ranks if one of them was asked to stop. All ranks call this."""
        if any(self.ranks.gather_json(self._stop.requested, name="stop")):
            self._stop.request()
            raise self._stop.stopped()

    def iterate(self) -> dict[str, float]:
        """Run one iteration: collect, learn, log; returns the metrics of its updates."""
        began, cpu = time.monotonic(), time.process_time()
        self._start = IterationStart(
            plan=self._plan.state(),
            carried=self._carried,
            num_steps=self.num_steps,
            algorithm=self._learner.algorithm.state(),
        )
        since_s, busy_s = self._collecting_since or (began, self.backend.runner.busy_s)
        self._collecting_since = None
        with self._acting():
            collected = collect_iteration(self._plan, self._collect, self.config.filters, self._carried)
        collected_s = time.monotonic() - began
        whole_s = time.monotonic() - since_s
        busy = (self.backend.runner.busy_s - busy_s) / (whole_s * self.backend.runner.num_envs)
        least_busy = min(self.ranks.gather_json(busy, name="busy"))
        self._carried = collected.carried
        self.num_steps += sum(rollout.num_steps for rollout in collected.all_rollouts)
        if not collected.groups:
            return self._skip_learning(collected)
        self._num_empty = 0
        if self.backend.prefetches and self.iteration + 1 < self.config.iterations:
            self._prefetching = first_wave(self._plan, self.config.filters, self._carried)
            self._collecting_since = time.monotonic(), self.backend.runner.busy_s
            self.backend.prefetch(self._mine(self._prefetching), self.config.sampling)
        lag = self.policy.version - min((one.version for one in collected.rollouts if not one.failed), default=0)
        # What is prefetched acts with the policy before these updates, so all of them are finished.
        stops = self.backend.uses_local_policy and not self.backend.prefetches
        check = self._check_stop if stops else lambda: None
        metrics = {**self._learner.learn(collected.rollouts, self.iteration, check), "lag": float(lag)}
        self._end_iteration()
        self._report(
            collected,
            metrics,
            collect_s=collected_s,
            learn_s=time.monotonic() - began - collected_s,
            cpu_s=time.process_time() - cpu,
            busy=least_busy,
            steps_per_s=sum(one.num_steps for one in collected.all_rollouts) / max(whole_s, 1e-9),
        )
        return metrics

    def _skip_learning(self, collected: CollectedIteration) -> dict[str, float]:
        """Leave the policy as it is, since all groups were rejected. Too often in a row, and the run ends."""
        self._num_empty += 1
        self._end_iteration()
        self._report(collected, {})
        if self._num_empty >= self.config.max_empty:
            raise UnderstudyError(
                f"{collected.report}. {self._num_empty} iterations in a row had no group to learn from: with success "
                f"near 0 give the policy more supervision (`understudy sft`) or easier starts; near 1 it has learned "
                f"the task; or widen filters.accuracy-lower-bound and -upper-bound, or raise plan.max-waves"
            )
        return {}

    def _end_iteration(self) -> None:
        self._exchange.keep_only([rollout for group in self._carried for rollout in group.rollouts])
        self._start, self._collected = None, {}
        self.iteration += 1

    def _acting(self) -> AbstractContextManager[None]:
        """Within, episodes are run with the present policy."""
        engine = self._learner.engine
        weights = partial(engine.parameters, trainable_only=True, everywhere=False)
        self.backend.publish(self.policy.version, weights)
        return engine.unsharded() if self.backend.uses_local_policy else nullcontext()

    def _mine(self, tickets: Sequence[Ticket]) -> list[Ticket]:
        return share(tickets, self.ranks.rank, self.ranks.size)

    def _sharing(self, tickets: Sequence[Ticket]) -> Sharing | None:
        """How the ranks run these tickets together; None if each has perhaps begun its share already."""
        if self.backend.prefetches:
            return None
        return Sharing.of(tickets, self.ranks.rank, self.ranks.size, self.ranks.claims())

    def _collect(self, tickets: Sequence[Ticket]) -> list[Rollout]:
        """Run the tickets that a stopped run has not finished; of all ranks, in their order."""
        self._prefetching = ()
        self._run_tickets([ticket for ticket in tickets if ticket.number not in self._collected])
        self._check_stop()
        return [self._collected[ticket.number] for ticket in tickets]

    def _run_tickets(self, tickets: Sequence[Ticket]) -> None:
        """Run tickets on all ranks and add those to `_collected` that are finished before a stop request."""
        finished: dict[int, Rollout] = {}
        try:
            for rollout in self.backend.runner.stream(
                self._mine(tickets), self.policy, self.config.sampling, sharing=self._sharing(tickets)
            ):
                finished[rollout.ticket.number] = rollout
                engine = self._learner.engine
                self.health.progress("collecting", self.num_steps, engine.num_updates, self.policy.version)
                self.ranks.progress("collecting")
                self._notify(episodes=len(finished))
        except Stopped:  # `_collect` tells the other ranks
            pass
        rollouts = [finished[ticket.number] for ticket in tickets if ticket.number in finished]
        self.backend.store(rollouts)
        self._collected |= self._exchange.add(rollouts)

    def evaluate(self) -> None:
        """Evaluate the present policy on held-out starts of every task, once for each version, on all ranks."""
        if self._evaluated_version == self.policy.version:
            return
        all_weights = is_one_file(self.policy)  # for its digest; an OpenVLA's is that of what is trained
        weights = self._learner.engine.parameters(trainable_only=not all_weights, everywhere=False)
        runner = self.backend.runner

        def progress(_: object = None) -> None:
            self.health.progress("evaluating")
            self.ranks.progress("evaluating")
            self._stop.check()  # the resumed run evaluates again

        videos = self.directory.videos / f"iteration-{self.iteration:06d}"
        evaluation = TaskEvaluation(runner, self.config.evaluation, seed=EVALUATION_SEED, videos=videos)
        tickets = evaluation.tickets
        with self._acting():
            sharing = Sharing.of(tickets, self.ranks.rank, self.ranks.size, self.ranks.claims())
            try:
                progress()
                evaluation.run(self.policy, self._mine(tickets), progress, sharing)
            except Stopped:  # the other ranks are told below
                pass
            self._check_stop()
        result = evaluation.result(self.ranks)
        self._evaluated_version = self.policy.version
        if self.ranks.first:
            measured_on = fingerprint(
                config=self.directory.metadata["config"],
                parameters=self.policy.parameters(weights),
                env=self.config.env,
                versions=runner.versions,
            )
            values = {**result.to_json(), "fingerprint": measured_on.to_json()}
            self._write("evaluation", iteration=self.iteration, **values)
            self._notify(evaluation=result)

    # ---- reporting

    def _report(
        self,
        collected: CollectedIteration,
        metrics: Mapping[str, float],
        *,
        collect_s: float = 0.0,
        learn_s: float = 0.0,
        cpu_s: float = 0.0,
        busy: float = 0.0,
        steps_per_s: float = 0.0,
    ) -> None:
        for rollout in collected.all_rollouts:
            self._write(
                "episode",
                episode=rollout.ticket.number,
                task=rollout.ticket.task,
                start=rollout.ticket.start,
                success=rollout.success,
                length=rollout.num_steps,
                reward=rollout.total_reward,
                group=rollout.ticket.group,
                intervention_steps=0,
                takeovers=0,
            )
        self._write("collection", **collected.report.to_json())
        if not metrics:
            self._notify(report=collected.report)
            return
        self._write(
            "train",
            iteration=self.iteration,
            **metrics,
            episodes=len(collected.rollouts),
            rollouts=len(collected.all_rollouts),
            groups=len(collected.groups),
            carried=len(collected.carried),
            waves=collected.report.num_waves,
            collect_s=collect_s,
            busy=busy,
            learn_s=learn_s,
            cpu_s=cpu_s,
            steps_per_s=steps_per_s,
            save_s=self._save_s,
            save_wait_s=self._save_wait_s,
            bytes_moved=self._exchange.num_bytes_moved,
        )
        self._save_s = self._save_wait_s = 0.0
        self._notify(report=collected.report, metrics=metrics)

    def _write(self, kind: str, **values: Any) -> None:
        if self._log is not None:
            self._log.write(kind, step=self.num_steps, update=self._learner.engine.num_updates, **values)

    def _notify(self, **news: Any) -> None:
        seconds = time.monotonic() - self._began
        self._watch(
            OnPolicyProgress(iteration=self.iteration, iterations=self.config.iterations, seconds=seconds, **news)
        )

    # ---- saving and resuming

    def _save(self, *, checkpoint: bool = True, keep_policy: bool = False) -> None:
        """Take a snapshot, which is written while the run goes on: a checkpoint that any number of ranks can resume
        from, with the newest policy; or the policy of this iteration, to be kept for good; or both."""
        if checkpoint and self._prefetching:
            self._run_tickets(self._prefetching)
            self._prefetching = ()
        began, waited_s = time.monotonic(), self._writer.waited_s
        self.health.progress("saving a checkpoint", self.num_steps)
        self._writer.wait()  # so that there is one snapshot in memory
        policy = self._policy_snapshot(keep=keep_policy)
        self._writer.start(self._checkpoint_snapshot() if checkpoint else None, policy)
        self._save_s += time.monotonic() - began
        self._save_wait_s += self._writer.waited_s - waited_s

    def _policy_snapshot(self, *, keep: bool) -> PolicySnapshot | None:
        """What will be written of the policy, on rank 0. All ranks call this."""
        last = self.iteration == self.config.iterations
        adapted = bool(self.config.lora.rank)
        all_weights = keep or last or is_one_file(self.policy)
        weights: Mapping[str, Any] = {}
        if all_weights or adapted:  # of billions of frozen weights, nothing is gathered to write an adapter
            weights = self._learner.engine.parameters(trainable_only=not all_weights, everywhere=False)
        if not self.ranks.first:
            return None
        return PolicySnapshot(
            policy=copy.copy(self.policy),
            weights=weights,
            adapted=adapted,
            iteration=self.iteration,
            last=last,
            keep=keep,
        )

    def _checkpoint_snapshot(self) -> CheckpointSnapshot:
        """All that the run is resumed from. All ranks call this."""
        engine, learning = self._learner.engine, self._learner.learning
        start = self._start or IterationStart(
            plan=self._plan.state(),
            carried=self._carried,
            num_steps=self.num_steps,
            algorithm=self._learner.algorithm.state(),
        )
        carried = self._exchange.with_observations([rollout for group in start.carried for rollout in group.rollouts])
        collected = self._exchange.with_observations([self._collected[number] for number in sorted(self._collected)])
        totals = self.ranks.gather_json(learning.totals, name="totals")
        each = self.ranks.gather_json(self.backend.commits(), name="commits")
        commits = {name: commit for one in each for name, commit in one.items()}
        collection, arrays = save_collection(start.plan, group_rollouts(carried, self.config.plan.n_samples), collected)
        facts = {
            "start": self._start_digest,
            "iteration": self.iteration,
            "steps": start.num_steps,
            "version": self.policy.version,
            "evaluated_version": self._evaluated_version,
            "empty": self._num_empty,
            "collection": collection,
            "commits": commits,
            "algorithm": start.algorithm,
            "learning": {"norms": learning.norms, "totals": totals},
            "metrics": 0 if self._log is None else self._log.position,
        }
        if learning.log_prob is not None:
            arrays[LEARNING] = learning.log_prob
        return CheckpointSnapshot(
            number=self.iteration,
            num_steps=self.num_steps,
            shards=engine.stage(self._writer.begin(self.iteration)),
            arrays=arrays,
            facts=copy.deepcopy(facts),
        )

    def _wait_saved(self) -> None:
        """Wait until what was saved is on the disk, of all ranks."""
        self.health.progress("saving a checkpoint", self.num_steps)
        self._writer.wait()
        self.ranks.barrier("saved")

    def _restore(self) -> Checkpoint | None:
        newest = newest_checkpoint(self.directory.checkpoints)
        if newest is None:
            return None
        checkpoint = read_checkpoint(newest)
        facts = checkpoint.facts
        if facts["start"] != self._start_digest:
            raise RunError(
                f"policy: {self.config.policy} is not the policy any more that this run started from; "
                f"restore it, or start a new run"
            )
        self._learner.engine.load(newest / SHARDS)
        self._learner.algorithm.restore(facts["algorithm"])
        carried, collected = restore_collection(self._plan, facts["collection"], checkpoint.state)
        self._carried = tuple(Group(rollouts=self._without_observations(group.rollouts)) for group in carried)
        self._collected = {rollout.ticket.number: rollout for rollout in self._without_observations(collected)}
        self._learner.learning = self._my_part(facts.get("learning", {"norms": [], "totals": []}))
        self._learner.learning.log_prob = checkpoint.state.get(LEARNING)
        self.iteration, self.num_steps = int(facts["iteration"]), int(facts["steps"])
        self._writer.saved_steps = self.num_steps + sum(rollout.num_steps for rollout in collected)
        self.policy.version, self._evaluated_version = int(facts["version"]), int(facts["evaluated_version"])
        self._num_empty = int(facts["empty"])
        rolled_back = self.backend.rollback(facts["commits"])
        lines = rewind(self.directory.metrics, int(facts["metrics"])) if self.ranks.first else 0
        self.restored = [
            f"restored checkpoint {newest.name}: policy version {self.policy.version} and its optimizer, after "
            f"{self._learner.engine.num_updates} updates",
            f"restored collection: iteration {self.iteration}, the next tasks and starts, {len(self._carried)} groups "
            f"carried over, {len(self._collected)} episodes of this iteration",
            *([f"removed {lines} lines of metrics after the checkpoint"] if lines else []),
            *rolled_back,
        ]
        if self.iteration >= self.config.iterations:
            self.restored.append(
                f"the run is finished: {self.iteration:,} iterations, asked for {self.config.iterations:,}; "
                f"`understudy resume {self.directory.path} --iterations N` trains it for longer"
            )
        return checkpoint

    def _without_observations(self, rollouts: Sequence[Rollout]) -> tuple[Rollout, ...]:
        """The rollouts without their observations; rank 0 holds them and hands them out from there."""
        exchange = self._exchange if self.ranks.first else RolloutExchange(self.ranks)
        return tuple(exchange.keep(rollout) for rollout in rollouts)

    def _my_part(self, saved: Mapping[str, Any]) -> Learning:
        """How far learning was, with the totals of this rank; of another number of ranks, the first takes them all."""
        totals = saved["totals"]
        if len(totals) != self.ranks.size:
            names = {name for one in totals for name in one}
            whole = {name: sum(one.get(name, 0.0) for one in totals) for name in sorted(names)}
            totals = [whole, *[{}] * (self.ranks.size - 1)]
        return Learning(norms=list(saved["norms"]), totals=dict(totals[self.ranks.rank]))

    # ---- stopping

    def _save_and_describe(self) -> str:
        """Save where the run was stopped; returns a sentence for the user."""
        self._save()
        self._wait_saved()
        part = f", with {len(self._collected)} episodes of the next one" if self._collected else ""
        return (
            f"stopped and saved at iteration {self.iteration} of {self.config.iterations}{part}: no finished episode "
            f"and no update will be run again; `understudy resume {self.directory.path}` continues"
        )

    def _describe_unsaved(self) -> str:
        """What a run that quits at once will run again, in words."""
        collected = 0 if self._start is None else sum(one.num_steps for one in self._collected.values())
        steps = (
            self.num_steps if self._start is None else self._start.num_steps + collected
        ) - self._writer.saved_steps
        return (
            f"{steps} steps (0 by a human) and the episodes in progress since the last checkpoint will be run again; "
            f"`understudy resume {self.directory.path}` continues"
        )


def _same_device(asked: str, ranks: Ranks) -> Device:
    """The device that the config asks for, which must be the one that the ranks have joined with."""
    chosen = choose_device(asked, num_ranks=ranks.size)
    if chosen.torch != ranks.device:
        raise ConfigError(
            f"device: the run is to use {chosen.name}, its ranks have {ranks.device}; join(device={asked!r})"
        )
    return chosen
