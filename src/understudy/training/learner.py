"""Learner: samples, updates, evaluates and saves. Others live the steps and keep them (actor.py, `understudy serve`).

`Learner` is the role; `run_learner` is its process:

| loop | takes from | blocks on | woken by |
|---|---|---|---|
| main | the store's files, on this machine | the limiter: too few new steps | each IDLE_S, to look for new commits |
"""

from __future__ import annotations

import json
import logging
import time
import zlib
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from understudy.algorithms import SAC
from understudy.core import StepSpec, TransitionBatch, Tree, UnavailableError
from understudy.core import tree as trees
from understudy.envs.known import open_world
from understudy.envs.world import World
from understudy.policies import ActorPolicy
from understudy.replay.limiter import Limiter
from understudy.training.checkpoint import Checkpoint, newest_checkpoint, read_checkpoint, write_checkpoint
from understudy.training.evaluate import Evaluation, evaluate
from understudy.training.health import HEALTH, Health
from understudy.training.metrics import MetricLog, open_sink, rewind
from understudy.training.replayed import Replayed
from understudy.training.rlpd import RLPDConfig, check_device, new_sac, policy_act, restored_sac
from understudy.training.rollout import Rolled
from understudy.training.run import Run
from understudy.training.score import fingerprint

logger = logging.getLogger(__name__)

IDLE_S = 0.02
PUBLISH_TIMEOUT_S = 60.0


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


class Learner:
    """One run's learning. It holds the run's lock; `close` lets go of everything."""

    def __init__(
        self, run: Run, config: RLPDConfig, spec: StepSpec, watch: Callable[[Moment], None] | None = None,
        health: Health | None = None,
    ):  # fmt: skip
        self.run = run
        self.config = config
        self.health = health or Health(None, role="learner", name=run.path.name)
        self.sac: SAC | None = None
        self.version = 0  # of the policy that acts now, as far as is known here
        self.restored: list[str] = []  # what a resumed run goes on with, for people
        self._watch = watch or (lambda moment: None)
        # How many were due by now, and the version of the policy that was evaluated last.
        self._done = {"evaluations": 0, "checkpoints": 0, "evaluated": -1}
        self._began = time.monotonic()
        self._undo = ExitStack()
        try:
            check_device(config.device)
            self._undo.enter_context(run)
            self.batches = config.open_batches(run.store, spec)
            self._undo.callback(self.batches.close)
            self._checkpoint = self._restore(spec)
            sinks = tuple(open_sink(name, run.path, run.said["config"]) for name in config.sinks)
            self._log = MetricLog(run.metrics, sinks)
            self._undo.callback(self._log.close)
            self.batches.follow()
        except BaseException:
            self._undo.close()
            raise

    def close(self) -> None:
        self._undo.close()

    def __enter__(self) -> Learner:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---- how far it is

    @property
    def step(self) -> int:
        """Environment steps of practice there are."""
        return len(self.batches.online)

    @property
    def num_updates(self) -> int:
        return 0 if self.sac is None else self.sac.num_updates

    def ready(self) -> bool:
        """Whether there is something to learn from; the algorithm is made as soon as there is."""
        if self.sac is None:
            demo, online = self.batches.follow()
            if online >= self.config.start_steps and demo + online:
                self.health.progress("making the networks")
                self.sac = new_sac(self.config, self.batches)
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
        replayed = Replayed(self.batches, self.version)
        for left, batch in zip(range(num_updates - 1, -1, -1), self.batches.draw(num_updates), strict=True):
            metrics = self.sac.update(batch, report=not left)
            content = 0 if left else digest(batch)
            replayed.add(batch)
            self.health.progress("learning", update=self.sac.num_updates)
        self.log(
            "train", **metrics, **replayed.numbers(), batch=content, demo_steps=len(self.batches.demo),
            online_steps=self.step, updates_per_s=num_updates / max(time.monotonic() - began, 1e-9),
        )  # fmt: skip
        return metrics

    def evaluate(self, world: World) -> None:
        """The policy alone, as it is now, on held-out starts; once for each policy."""
        policy = self.policy()
        assert policy is not None
        if self._done["evaluated"] == policy.version:
            return
        best = policy_act(policy, np.random.default_rng(0), deterministic=True)

        def act(observation: Tree) -> tuple[Tree, int]:
            self.health.progress("evaluating")
            return best(observation)

        found = evaluate(
            world, act, self.config.evaluation, seed=0,
            films=self.run.videos / f"step-{self.step:09d}",
        )  # fmt: skip
        made_of = fingerprint(
            config=self.run.said["config"], parameters=policy.parameters(), env=self.config.env,
            versions=world.versions(),
        )  # fmt: skip
        self.log("evaluation", **found.to_json(), fingerprint=made_of.to_json())
        self.tell(evaluation=found)
        self._done["evaluated"] = policy.version

    def log(self, kind: str, **values: Any) -> None:
        self._log.write(kind, step=self.step, update=self.num_updates, **values)

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
        said = {"batches": self.batches.state(), "metrics": self._log.position, "done": self._done, **facts}
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
        self.batches.restore(checkpoint.facts["batches"])
        self._done = dict(checkpoint.facts["done"])
        if checkpoint.state:
            self.sac = restored_sac(self.config, spec, checkpoint.state)
        num_lines = rewind(self.run.metrics, int(checkpoint.facts["metrics"]))
        learned = "networks, targets, optimizers, temperature and random numbers" if self.sac else "nothing learned yet"
        self.restored = [
            f"restored checkpoint {newest.name}: {learned}, after {self.num_updates} updates",
            f"restored samplers: batch {self.batches.num_batches}, as of commit {self.batches.online.commit}",
            f"restored counters: {self.step} steps, {self._done['evaluations']} evaluations",
            f"took back {num_lines} lines of metrics behind the checkpoint",
        ]
        return checkpoint


def digest(batch: TransitionBatch) -> int:
    """A number for the contents of a batch, so that two runs can be compared."""
    number = 0
    for _, leaf in trees.leaves({"action": batch.action, "reward": batch.reward, "terminated": batch.terminated}):
        number = zlib.crc32(np.ascontiguousarray(leaf).tobytes(), number)
    return number


# ---- as a process


def run_learner(
    run: Run, address: str, *, token_file: Path | None = None, tls_cert: Path | None = None,
    watch: Callable[[Moment], None] | None = None, told: Callable[[list[str]], None] | None = None,
) -> None:  # fmt: skip
    """Learn from the run's store, which a server at `address` writes, and publish there, until the steps are done."""
    from understudy.service import connect  # only now: it needs gRPC

    config = run.config(RLPDConfig)
    health = Health(run.path / HEALTH, role="learner", name=run.kind)
    with (
        open_world(config.env) as world,
        Learner(run, config, world.step_spec, watch, health) as learner,
        health,  # only now: the run is ours
        connect(address, token_file=token_file, tls_cert=tls_cert) as remote,
    ):
        remote.status()  # a wrong address or token is said now, and not when there is something to publish
        if told is not None:
            told(learner.restored)
        limiter = _limiter(config, learner)
        published: tuple[int, bool] | None = None  # after which update, and whether the actors were told to stop
        while True:
            learner.batches.follow()
            limiter = limiter.inserted(max(learner.step - limiter.num_inserted, 0))
            if not learner.ready():
                health.progress("waiting for the first steps", step=learner.step)
                time.sleep(IDLE_S)
                continue
            enough = learner.step >= config.steps
            if published is None or learner.num_updates >= published[0] + config.publish_every or enough > published[1]:
                policy = learner.policy()
                assert policy is not None
                metadata = {
                    "policy": json.dumps(policy.description()), "behind": str(_due(limiter)), "done": str(int(enough))
                }  # fmt: skip
                health.progress("publishing")
                try:
                    weights = policy.parameters()
                    learner.version = remote.publish(weights, metadata=metadata, timeout_s=PUBLISH_TIMEOUT_S)
                except UnavailableError as error:  # it was killed, perhaps while it listened; it comes back
                    logger.warning("not published: %s", error)
                    time.sleep(IDLE_S)
                    continue
                health.progress("publishing", learner.step, learner.num_updates, learner.version)
                published = (learner.num_updates, enough)
            number = min(_due(limiter), config.publish_every, config.num_updates - learner.num_updates)
            if number < 1:
                if enough:
                    break
                health.progress("waiting for steps", step=learner.step)
                time.sleep(IDLE_S)
                continue
            metrics = learner.learn(number)
            limiter = limiter.sampled(number)
            learner.tell(metrics=metrics)
            if learner.due("evaluations", config.eval_every):
                learner.evaluate(world)
            if learner.due("checkpoints", config.checkpoint_every):
                learner.save(learner.num_updates, {"limiter": limiter.to_json()})
        learner.evaluate(world)
        learner.save(learner.num_updates, {"limiter": limiter.to_json()})


def _limiter(config: RLPDConfig, learner: Learner) -> Limiter:
    """Updates per step, as samples per insert; a run that goes on has its counts."""
    if learner.facts is not None and "limiter" in learner.facts:
        return Limiter.from_json(learner.facts["limiter"])
    least = max(config.start_steps, 1)
    window = max(least * config.updates_per_step, (1 + config.updates_per_step) / 2)
    new = Limiter(samples_per_insert=config.updates_per_step, min_size=least, error_window=window)
    return new.sampled(learner.num_updates)  # some, if it was begun in one process


def _due(limiter: Limiter) -> int:
    """How many updates are due."""
    return int(limiter.diff) if limiter.size >= limiter.min_size else 0
