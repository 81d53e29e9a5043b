"""Learner: samples, updates, evaluates and saves. Others live the steps and keep them (actor.py, `understudy serve`).

It is the role; learning.py is its process. If somebody else judges its policies, a thread waits for what comes of it.
"""

from __future__ import annotations

import threading
import time
import zlib
from collections.abc import Callable, Mapping
from concurrent.futures import Future, TimeoutError
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from understudy.algorithms import SAC
from understudy.core import StepSpec, TransitionBatch
from understudy.core import tree as trees
from understudy.core.closing import Closes
from understudy.policies import ActorPolicy
from understudy.replay import DEMO, ONLINE
from understudy.training.data.run_episode import Rolled
from understudy.training.offpolicy.demo_online_mixture import Shards
from understudy.training.offpolicy.replay_metrics import ReplayMetrics
from understudy.training.offpolicy.rlpd import RLPDConfig, check_device, new_sac, restored_sac
from understudy.training.runs.checkpoint import Checkpoint, newest_checkpoint, read_checkpoint, write_checkpoint
from understudy.training.runs.evaluate import Evaluation, Judge, Judged
from understudy.training.runs.health import Health
from understudy.training.runs.metrics import MetricLog, open_sink, rewind
from understudy.training.runs.run import Run
from understudy.training.runs.score import fingerprint

LOOK_S = 5.0  # at an evaluation that is waited for


@dataclass(frozen=True, kw_only=True)
class Moment:
    """How far a run is, for whoever watches."""

    step: int
    steps: int  # in all
    update: int
    seconds: float  # since this process began
    rolled: Rolled | None = None
    evaluation: Evaluation | None = None
    metrics: Mapping[str, float] | None = None


class Learner(Closes):
    """One run's learning. It holds the run's lock; `close` lets go of everything."""

    def __init__(
        self,
        run: Run,
        config: RLPDConfig,
        spec: StepSpec,
        watch: Callable[[Moment], None] | None = None,
        health: Health | None = None,
        experience: Path | Shards | None = None,
    ):
        """Experience is in the run's own store, unless it is said to be elsewhere."""
        self.run = run
        self.config = config
        self.spec = spec
        self.health = health or Health(None, role="learner", name=run.path.name)
        self.sac: SAC | None = None
        self.version = 0  # of the policy that acts now, as far as is known here
        self.restored: list[str] = []  # what a resumed run goes on with, for people
        self._watch = watch or (lambda moment: None)
        # How many were due by now, and the version of the policy that was evaluated last.
        self._done = {"evaluations": 0, "checkpoints": 0, "evaluated": -1}
        self._judging: Judging | None = None  # an evaluation that is not over
        self._began = time.monotonic()
        self._undo = ExitStack()
        try:
            check_device(config.device)
            self._undo.enter_context(run)
            self.mixture = config.open_mixture(experience or run.store, spec, self.health.progress)
            self._undo.callback(self.mixture.close)
            self._checkpoint = self._restore(spec)
            sinks = tuple(open_sink(name, run.path, run.said["config"]) for name in config.sinks)
            self._log = MetricLog(run.metrics, sinks)
            self._undo.callback(self._log.close)
            self.mixture.follow()
        except BaseException:
            self._undo.close()
            raise

    def close(self) -> None:
        self._undo.close()

    # ---- how far it is

    @property
    def step(self) -> int:
        """Environment steps of practice that were lived."""
        online = self.mixture.samplers[ONLINE.name]
        return len(online) + online.num_lost

    @property
    def num_updates(self) -> int:
        return 0 if self.sac is None else self.sac.num_updates

    def ready(self) -> bool:
        """Whether there is something to learn from; the algorithm is made as soon as there is."""
        if self.sac is None:
            num_steps = self.mixture.follow()
            if num_steps and self.mixture.num_steps[ONLINE.name] >= self.config.start_steps:
                self.health.progress("making the networks")
                self.sac = new_sac(self.config, self.spec, self.mixture)
        return self.sac is not None

    def policy(self) -> ActorPolicy | None:
        """The policy as it is now; None until there is something to learn from."""
        return self.sac.policy(version=self.num_updates) if self.ready() and self.sac is not None else None

    # ---- what it does

    def learn(self, num_updates: int) -> dict[str, float]:
        """So many updates, on what there is; the last one's metrics."""
        assert self.sac is not None
        began = time.monotonic()
        metrics, content = {}, 0
        replay_metrics = ReplayMetrics(self.mixture, self.version)
        for left, batch in zip(range(num_updates - 1, -1, -1), self.mixture.sample_many(num_updates), strict=True):
            metrics = self.sac.update(batch, report=not left)
            content = 0 if left else digest(batch)
            replay_metrics.add(batch)
            self.health.progress(self._doing(), update=self.sac.num_updates)
        self.log(
            "train",
            **metrics,
            **replay_metrics.values(),
            batch=content,
            demo_steps=self.mixture.num_steps[DEMO.name],
            online_steps=self.mixture.num_steps[ONLINE.name],
            updates_per_s=num_updates / max(time.monotonic() - began, 1e-9),
        )
        return metrics

    def evaluate(self, judge: Judge, *, wait: bool = True) -> None:
        """The policy alone, as it is now, on held-out starts; once for each policy.

        Without `wait` this returns at once, and `hear` says later what came of it.
        """
        policy = self.policy()
        assert policy is not None
        self.hear(wait=True)  # one at a time
        if self._done["evaluated"] == policy.version:
            return
        self._done["evaluated"] = policy.version
        films = self.run.videos / f"step-{self.step:09d}"
        found: Future[Judged] = Future()
        self._judging = Judging(policy=policy, step=self.step, update=self.num_updates, found=found)
        play = partial(_settle, found, partial(judge, policy, self.config.evaluation, films))
        if wait:
            play()
        else:
            threading.Thread(target=play, name="evaluation", daemon=True).start()
        self.hear(wait=wait)

    def hear(self, *, wait: bool = False) -> None:
        """Log what came of an evaluation, if it is over, or once it is."""
        judging = self._judging
        if judging is None or not (wait or judging.found.done()):
            return
        judged = judging.result(lambda: self.health.progress("evaluating"))
        self._judging = None
        made_of = fingerprint(
            config=self.run.said["config"],
            parameters=judging.policy.parameters(),
            env=self.config.env,
            versions=judged.versions,
        )
        self.log(
            "evaluation",
            step=judging.step,
            update=judging.update,
            **judged.evaluation.to_json(),
            fingerprint=made_of.to_json(),
        )
        self.tell(evaluation=judged.evaluation)

    def _doing(self) -> str:
        away = self.mixture.away
        return f"learning, without {', '.join(away)}" if away else "learning"

    def log(self, kind: str, **values: Any) -> None:
        self._log.write(kind, **{"step": self.step, "update": self.num_updates, **values})

    def tell(self, **news: Any) -> None:
        seconds = time.monotonic() - self._began
        self._watch(Moment(step=self.step, steps=self.config.steps, update=self.num_updates, seconds=seconds, **news))

    def due(self, what: str, every: int) -> bool:
        """Whether another `every` steps are over since the last time this was true."""
        number = self.step // every
        if number <= self._done[what]:
            return False
        self._done[what] = number
        return True

    # ---- going on later

    def save(self, number: int, facts: Mapping[str, Any]) -> None:
        """A checkpoint, and the policy as a file of its own."""
        self.health.progress("saving a checkpoint", step=self.step)
        done = dict(self._done)
        if self._judging is not None:  # what comes of it may never be heard: whoever goes on from here begins it again
            done |= {"evaluations": done["evaluations"] - 1, "evaluated": -1}
        said = {"batches": self.mixture.state(), "metrics": self._log.position, "done": done, **facts}
        state = {} if self.sac is None else self.sac.state()
        write_checkpoint(self.run.checkpoints, number, state, said, keep=self.config.keep_checkpoints)
        policy = self.policy()
        if policy is not None:
            policy.save(self.run.policy)

    @property
    def facts(self) -> dict[str, Any] | None:
        """What whoever saved said, if this is a run that goes on."""
        return None if self._checkpoint is None else self._checkpoint.facts

    def _restore(self, spec: StepSpec) -> Checkpoint | None:
        newest = newest_checkpoint(self.run.checkpoints)
        if newest is None:
            return None
        checkpoint = read_checkpoint(newest)
        self.mixture.restore(checkpoint.facts["batches"])
        self._done = dict(checkpoint.facts["done"])
        if checkpoint.state:
            self.sac = restored_sac(self.config, spec, checkpoint.state)
        num_lines = rewind(self.run.metrics, int(checkpoint.facts["metrics"]))
        learned = "networks, targets, optimizers, temperature and random numbers" if self.sac else "nothing learned yet"
        self.restored = [
            f"restored checkpoint {newest.name}: {learned}, after {self.num_updates} updates",
            f"restored samplers: batch {self.mixture.num_batches}, as of {self.mixture.samplers[ONLINE.name].as_of}",
            f"restored counters: {self.step} steps, {self._done['evaluations']} evaluations",
            f"took back {num_lines} lines of metrics behind the checkpoint",
        ]
        return checkpoint


@dataclass(frozen=True, kw_only=True)
class Judging:
    """An evaluation under way, and when it began."""

    policy: ActorPolicy
    step: int
    update: int
    found: Future[Judged]

    def result(self, waiting: Callable[[], None]) -> Judged:
        while True:
            try:
                return self.found.result(LOOK_S)
            except TimeoutError:
                if self.found.done():
                    raise
                waiting()


def _settle(found: Future[Judged], play: Callable[[], Judged]) -> None:
    try:
        found.set_result(play())
    except BaseException as error:  # noqa: BLE001 (raised again by whoever hears)
        found.set_exception(error)


def digest(batch: TransitionBatch) -> int:
    """A number for the contents of a batch, so that two runs can be compared."""
    number = 0
    for _, leaf in trees.leaves({"action": batch.action, "reward": batch.reward, "terminated": batch.terminated}):
        number = zlib.crc32(np.ascontiguousarray(leaf).tobytes(), number)
    return number
