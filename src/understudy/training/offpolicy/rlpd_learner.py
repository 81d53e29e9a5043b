"""RLPD learner: samples, updates, evaluates and saves. Others run the episodes (actor.py) and store them.

This is the role; learner_process.py is its process. If an evaluator in another process evaluates the policies, a thread
waits for its result.
"""

from __future__ import annotations

import json
import threading
import time
import zlib
from collections.abc import Callable, Mapping
from concurrent.futures import Future, TimeoutError
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from understudy.algorithms import DSRL, SAC
from understudy.core import SequenceBatch, StepSpec, TransitionBatch
from understudy.core import tree as trees
from understudy.core.closeable import Closeable
from understudy.policies import ActorPolicy
from understudy.processes.stop import Stopped, StopRequest
from understudy.replay import DEMO, ONLINE
from understudy.training.data.run_episode import EpisodeResult
from understudy.training.offpolicy.algorithm import new_sac, restored_sac
from understudy.training.offpolicy.demo_online_mixture import Shards
from understudy.training.offpolicy.replay_metrics import ReplayMetrics
from understudy.training.offpolicy.rlpd import RLPDConfig
from understudy.training.runs.checkpoint import Checkpoint, newest_checkpoint, read_checkpoint, write_checkpoint
from understudy.training.runs.device import choose_device
from understudy.training.runs.evaluate import EvaluationResult, Evaluator
from understudy.training.runs.fingerprint import fingerprint
from understudy.training.runs.health import Health
from understudy.training.runs.metrics import MetricLog, open_sink, rewind
from understudy.training.runs.run import Run, RunError

POLL_S = 5.0  # between two reports of progress while an evaluation is waited for


@dataclass(frozen=True, kw_only=True)
class RLPDProgress:
    """How far an RLPD run is, for its watcher."""

    step: int
    steps: int  # of the whole run
    update: int
    seconds: float  # since this process began
    episode: EpisodeResult | None = None
    evaluation: EvaluationResult | None = None
    metrics: Mapping[str, float] | None = None


class RLPDLearner(Closeable):
    """The learner of one RLPD run. It holds the run's lock until `close`."""

    def __init__(
        self,
        run: Run,
        config: RLPDConfig,
        spec: StepSpec,
        watch: Callable[[RLPDProgress], None] | None = None,
        health: Health | None = None,
        experience: Path | Shards | None = None,
        stop: StopRequest | None = None,
    ):
        """`experience` is where the online episodes are; by default the run's own store. After a `stop` request,
        `learn`, `evaluate` and `policy` raise Stopped: call `save`, and a resumed run continues there."""
        self.run = run
        self.config = config
        self.spec = spec
        self.health = health or Health(None, role="learner", name=run.path.name)
        self.sac: SAC | DSRL | None = None
        self.version = 0  # of the policy that acts now, as far as the learner knows
        self.restored: list[str] = []  # what a resumed run restored, for the user
        self._watch = watch or (lambda progress: None)
        # How many evaluations and checkpoints were due so far, and the version of the policy evaluated last.
        self._schedule = {"evaluations": 0, "checkpoints": 0, "evaluated_version": -1}
        self._pending: PendingEvaluation | None = None
        self._learning: Learning | None = None  # what `learn` has begun
        self._unused_batches: dict[str, Any] | None = None  # state of the batches before networks that were not made
        self._stop = stop or StopRequest()
        self._saved_at = time.monotonic()
        self._saved_update = 0
        self._began = time.monotonic()
        self._undo = ExitStack()
        try:
            self.device = choose_device(config.device)
            self.config = config = replace(config, device=self.device.name)  # networks are made on this one
            self._undo.enter_context(run)
            self.base_policy_digest = config.base_policy_digest
            self._base = config.load_frozen_policy(spec)
            demos = self._demos_with_base_actions()
            self.mixture = config.open_mixture(experience or run.store, spec, self.health.progress, demos, self._base)
            self._undo.callback(self.mixture.close)
            self._checkpoint = self._restore(spec)
            sinks = tuple(open_sink(name, run.path, run.metadata["config"]) for name in config.sinks)
            self._log = MetricLog(run.metrics, sinks)
            self._undo.callback(self._log.close)
            self.mixture.follow()
        except BaseException:
            self._undo.close()
            raise

    def close(self) -> None:
        self._undo.close()

    def _demos_with_base_actions(self) -> Path | None:
        """The run's own copy of the demonstrations, with the actions of the base policy; None if none are changed."""
        config = self.config
        if config.base_policy is None or config.is_steering:
            return None
        # Named after all that decides on its content: an earlier start may have left one of another policy.
        decides = json.dumps([self.base_policy_digest, config.demos, config.seed])
        path = self.run.base_demos / f"{zlib.crc32(decides.encode()):08x}"
        if not path.exists():
            from understudy.training.offpolicy.base_policy import add_base_actions, without_base_action

            assert config.demos is not None  # the config asks for them
            inner = without_base_action(self.spec)
            policy = config.load_base_policy(inner)

            def progress(number: int) -> None:
                self._stop.check()
                self.health.progress(f"adding base actions, episode {number}")

            path.parent.mkdir(exist_ok=True)
            add_base_actions(Path(config.demos), path, policy, inner, seed=config.seed, progress=progress)
        return path

    # ---- progress

    @property
    def step(self) -> int:
        """Environment steps of online experience so far."""
        online = self.mixture.samplers[ONLINE.name]
        return len(online) + online.num_lost

    @property
    def num_updates(self) -> int:
        return 0 if self.sac is None else self.sac.num_updates

    def ready(self) -> bool:
        """Whether there is data to learn from; creates the networks as soon as there is."""
        if self.sac is None:
            num_steps = self.mixture.follow()
            if num_steps and self.mixture.num_steps[ONLINE.name] >= self.config.start_steps:
                self.health.progress("creating the networks")
                before = self.mixture.state()
                try:
                    self.sac = new_sac(self.config, self.spec, self.mixture, self._stop, self._base)
                except Stopped:
                    self._unused_batches = before
                    raise
        return self.sac is not None

    def policy(self) -> ActorPolicy | None:
        """The present policy; None until there is data to learn from."""
        return self.sac.policy(version=self.num_updates) if self.ready() and self.sac is not None else None

    # ---- learning and evaluating

    @property
    def unfinished_updates(self) -> int:
        """How many updates the call of `learn` had in which the run was stopped; 0 if it was not stopped there."""
        return 0 if self._learning is None else self._learning.num_updates

    def learn(self, num_updates: int) -> dict[str, float]:
        """Do a number of updates; returns the metrics of the last one.

        A resumed run that was stopped in here calls it with `unfinished_updates`: the batches are drawn once more, and
        those that were learned from before are only counted.
        """
        assert self.sac is not None
        began = time.monotonic()
        metrics, content = {}, 0
        learning = self._learning or Learning(
            num_updates=num_updates, version=self.version, batches=self.mixture.state()
        )
        self._learning, num_before = learning, learning.num_done
        replay_metrics = ReplayMetrics(self.mixture, learning.version)
        for number, batch in enumerate(self.mixture.sample_many(num_updates), 1):
            last = number == num_updates
            if number > num_before:
                metrics = self.sac.update(batch, report=last)
                learning.num_done = number
            content = digest(batch) if last else 0
            replay_metrics.add(batch)
            self.health.progress(self._doing(), update=self.sac.num_updates)
            if not last:
                self._stop.check()
        self._learning = None
        self.log(
            "train",
            **metrics,
            **replay_metrics.values(),
            batch_digest=content,
            demo_steps=self.mixture.num_steps[DEMO.name],
            online_steps=self.mixture.num_steps[ONLINE.name],
            updates_per_s=(num_updates - num_before) / max(time.monotonic() - began, 1e-9),
        )
        return metrics

    def evaluate(self, evaluator: Evaluator, *, wait: bool = True) -> None:
        """Evaluate the present policy on held-out starts, once for each version.

        Without `wait` this returns at once, and `poll_evaluation` logs the result later.
        """
        policy = self.policy()
        assert policy is not None
        self.poll_evaluation(wait=True)  # one at a time
        if self._schedule["evaluated_version"] == policy.version:
            return
        self._schedule["evaluated_version"] = policy.version
        videos = self.run.videos / f"step-{self.step:09d}"
        result: Future[EvaluationResult] = Future()
        self._pending = PendingEvaluation(policy=policy, step=self.step, update=self.num_updates, result=result)
        work = partial(_fulfil, result, partial(evaluator, policy, self.config.evaluation, videos))
        if wait:
            work()
        else:
            threading.Thread(target=work, name="evaluation", daemon=True).start()
        self.poll_evaluation(wait=wait)

    def poll_evaluation(self, *, wait: bool = False) -> None:
        """Log the result of the pending evaluation if it is finished; with `wait`, wait for it."""
        pending = self._pending
        if pending is None or not (wait or pending.result.done()):
            return
        result = pending.wait(lambda: self.health.progress("evaluating"))
        self._pending = None
        made_of = fingerprint(
            config=self.run.metadata["config"],
            parameters=pending.policy.parameters(),
            env=self.config.env,
            versions=result.versions,
        )
        self.log(
            "evaluation",
            step=pending.step,
            update=pending.update,
            **result.to_json(),
            fingerprint=made_of.to_json(),
        )
        self.notify(evaluation=result)

    def _doing(self) -> str:
        missing = self.mixture.unreachable
        return f"learning, without {', '.join(missing)}" if missing else "learning"

    def log(self, kind: str, **values: Any) -> None:
        self._log.write(kind, **{"step": self.step, "update": self.num_updates, **values})

    def notify(self, **news: Any) -> None:
        """Call the watcher with the progress so far and what is new."""
        seconds = time.monotonic() - self._began
        self._watch(
            RLPDProgress(step=self.step, steps=self.config.steps, update=self.num_updates, seconds=seconds, **news)
        )

    def due(self, what: str, every: int) -> bool:
        """Whether `every` further steps have passed since this last returned True for `what`."""
        number = self.step // every
        if number <= self._schedule[what]:
            return False
        self._schedule[what] = number
        return True

    def checkpoint_due(self) -> bool:
        """Whether enough steps or enough seconds have passed since the last checkpoint."""
        by_steps = self.due("checkpoints", self.config.checkpoint_every)
        return by_steps or time.monotonic() - self._saved_at >= self.config.checkpoint_every_s

    # ---- saving and resuming

    @property
    def num_unsaved_updates(self) -> int:
        """Updates since the last checkpoint."""
        return self.num_updates - self._saved_update

    def save(self, number: int, facts: Mapping[str, Any]) -> None:
        """Write a checkpoint, and the policy as a file of its own."""
        self.health.progress("saving a checkpoint", step=self.step)
        schedule = dict(self._schedule)
        if self._pending is not None:  # a run resumed from this checkpoint evaluates again
            schedule |= {"evaluations": schedule["evaluations"] - 1, "evaluated_version": -1}
        learning = self._learning
        batches = self._unused_batches or (self.mixture.state() if learning is None else learning.batches)
        all_facts = {
            "batches": batches,
            "metrics": self._log.position,
            "base_policy": self.base_policy_digest,
            "schedule": schedule,
            "learning": None if learning is None else learning.to_json(),
            **facts,
        }
        state = {} if self.sac is None else self.sac.state()
        write_checkpoint(self.run.checkpoints, number, state, all_facts, keep=self.config.keep_checkpoints)
        if self.sac is not None:
            self.sac.policy(version=self.num_updates).save(self.run.policy)
        self._saved_at, self._saved_update = time.monotonic(), self.num_updates

    @property
    def facts(self) -> dict[str, Any] | None:
        """The facts of the checkpoint that the run was resumed from; None for a new run."""
        return None if self._checkpoint is None else self._checkpoint.facts

    def _restore(self, spec: StepSpec) -> Checkpoint | None:
        newest = newest_checkpoint(self.run.checkpoints)
        if newest is None:
            return None
        checkpoint = read_checkpoint(newest)
        if checkpoint.facts.get("base_policy") != self.base_policy_digest:
            raise RunError(
                f"base_policy: {self.config.base_policy} is not the policy any more that this run started from; "
                f"restore it, or start a new run"
            )
        self.mixture.restore(checkpoint.facts["batches"])
        self._schedule = dict(checkpoint.facts["schedule"])
        if checkpoint.state:
            self.sac = restored_sac(self.config, spec, checkpoint.state, self._base)
        if (learning := checkpoint.facts.get("learning")) is not None:
            self._learning = Learning(**learning, batches=checkpoint.facts["batches"])
            self.version = self._learning.version
        self._saved_update = self.num_updates
        num_lines = rewind(self.run.metrics, int(checkpoint.facts["metrics"]))
        learned = "networks, targets, optimizers, temperature and random numbers" if self.sac else "nothing learned yet"
        self.restored = [
            f"restored checkpoint {newest.name}: {learned}, after {self.num_updates} updates",
            f"restored samplers: batch {self.mixture.num_batches}, as of {self.mixture.samplers[ONLINE.name].as_of}",
            f"restored counters: {self.step} steps, {self._schedule['evaluations']} evaluations",
            *([f"removed {num_lines} lines of metrics after the checkpoint"] if num_lines else []),
        ]
        return checkpoint


@dataclass(kw_only=True)
class Learning:
    """A call of `learn`: enough to continue it in another process."""

    num_updates: int
    version: int  # of the policy that acted
    batches: dict[str, Any]  # their state before the first one
    num_done: int = 0

    def to_json(self) -> dict[str, int]:
        """Without the state of the batches, which every checkpoint has."""
        return {"num_updates": self.num_updates, "version": self.version, "num_done": self.num_done}


@dataclass(frozen=True, kw_only=True)
class PendingEvaluation:
    """An evaluation that is running, and the step and update at which it began."""

    policy: ActorPolicy
    step: int
    update: int
    result: Future[EvaluationResult]

    def wait(self, waiting: Callable[[], None]) -> EvaluationResult:
        """The result; `waiting` is called every POLL_S until it is there."""
        while True:
            try:
                return self.result.result(POLL_S)
            except TimeoutError:
                if self.result.done():
                    raise
                waiting()


def _fulfil(result: Future[EvaluationResult], evaluate: Callable[[], EvaluationResult]) -> None:
    try:
        result.set_result(evaluate())
    except BaseException as error:  # noqa: BLE001 (raised again by `wait`)
        result.set_exception(error)


def digest(batch: TransitionBatch | SequenceBatch) -> int:
    """A checksum of the contents of a batch, so that two runs can be compared."""
    number = 0
    for _, leaf in trees.leaves({"action": batch.action, "reward": batch.reward, "terminated": batch.terminated}):
        number = zlib.crc32(np.ascontiguousarray(leaf).tobytes(), number)
    return number
