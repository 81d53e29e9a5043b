"""Learner process: the RLPD learner beside servers and actors that come and go.

| loop | takes from | blocks on | woken by |
|---|---|---|---|
| main | files of the store, or shards | too few new steps (rate limiter); unreachable shards | every IDLE_S |
| evaluation (rlpd_learner.py) | a policy | the evaluator | the evaluator |
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from understudy.core import UnavailableError
from understudy.processes.stop import Stopped, StopRequest
from understudy.replay.format.paths import CATALOG_FILE
from understudy.replay.sample.rate_limiter import RateLimiter
from understudy.training.offpolicy.demo_online_mixture import Shards
from understudy.training.offpolicy.rlpd import RLPDConfig, evaluator_for
from understudy.training.offpolicy.rlpd_learner import RLPDLearner, RLPDProgress
from understudy.training.runs.evaluate import Evaluator
from understudy.training.runs.health import HEALTH, Health
from understudy.training.runs.run import Run

if TYPE_CHECKING:
    from understudy.service.client.remote import Remote

logger = logging.getLogger(__name__)

IDLE_S = 0.02
WAIT_S = 0.5  # before a server that does not answer is tried again
PUBLISH_TIMEOUT_S = 60.0


def run_learner(
    run: Run,
    server: str | Remote,
    *,
    here: Mapping[str, Path] | None = None,
    lost: Collection[str] = (),
    evaluator: Evaluator | None = None,
    token_file: Path | None = None,
    tls_cert: Path | None = None,
    watch: Callable[[RLPDProgress], None] | None = None,
    on_restored: Callable[[list[str]], None] | None = None,
    health: Health | None = None,
    stop: StopRequest | None = None,
) -> None:
    """Learn from the episodes that servers store, and publish policies to them, until the steps are finished.

    A single server writes the run's store, on this machine. Of several shards, those in `here` are read from their
    directories and the others over the network; those in `lost` are gone for good. A caller who passes a Remote may
    change the addresses of its shards meanwhile. An `evaluator` evaluates while learning continues; without one, this
    process evaluates. `on_restored` gets sentences for the user: the threads and the device of torch, and what a
    resumed run restored. After a `stop` request it saves and raises Stopped.
    """
    from understudy.service import connect  # only now: it needs gRPC

    config = run.config(RLPDConfig)
    health = health or Health(run.path / HEALTH, role="learner", name=run.kind)
    stop = stop or StopRequest()

    def progress(doing: str) -> None:
        health.progress(doing)
        stop.check()

    with ExitStack() as undo:
        world = undo.enter_context(config.open_world())
        threads = config.use_threads(world.step_spec)
        remote = server
        if isinstance(remote, str):
            remote = undo.enter_context(connect(remote, token_file=token_file, tls_cert=tls_cert))
        if remote is server:
            remote.wait_until_reachable(progress)
        remote.status()  # raises now for a wrong address or token, and not at the first publish
        experience = run.store if here is None and len(remote.names) == 1 else _shards(run, remote, here or {}, lost)
        learner = undo.enter_context(RLPDLearner(run, config, world.step_spec, watch, health, experience, stop))
        undo.enter_context(health)  # only now: the learner holds the run's lock
        health.add(lambda: {"away": learner.mixture.unreachable})
        if on_restored is not None:
            on_restored([str(threads), str(learner.device), *learner.restored])
        own = evaluator_for(world, progress)
        process = _Process(learner, remote, evaluator or own, stop, concurrent_evaluation=evaluator is not None)
        stop.describe_unsaved = process.describe_unsaved
        try:
            process.run()
        except Stopped as stopped:
            process.save()
            stopped.sentence = (
                f"stopped and saved at step {learner.step:,} and update {learner.num_updates:,}: no step and no update "
                f"is lost; start it again to continue"
            )
            raise


def _shards(run: Run, remote: Remote, here: Mapping[str, Path], lost: Collection[str]) -> Shards:
    own = run.store if (run.store / CATALOG_FILE).exists() and run.store not in here.values() else None
    return Shards(remote=remote, local=here, own=own, lost=frozenset(lost))


class _Process:
    """The loop of a learner's process."""

    def __init__(
        self,
        learner: RLPDLearner,
        remote: Remote,
        evaluator: Evaluator,
        stop: StopRequest,
        *,
        concurrent_evaluation: bool,
    ):
        self._stop = stop
        self._learner = learner
        self._config = learner.config
        self._remote = remote
        self._evaluator = evaluator
        self._concurrent_evaluation = concurrent_evaluation  # in another process, so the learner need not wait
        self._limiter = _limiter(learner.config, learner)
        self._published: tuple[int, bool] | None = None  # at which update, and whether as the last policy

    def run(self) -> None:
        learner, config = self._learner, self._config
        self._learn_and_evaluate(learner.unfinished_updates)  # what a stopped learner has left
        while True:
            self._stop.check()
            learner.mixture.follow()
            self._limiter = self._limiter.inserted(max(learner.step - self._limiter.num_inserted, 0))
            learner.poll_evaluation()
            if not learner.ready():
                self._idle("waiting for the first steps")
                continue
            finished = learner.step >= config.steps
            if self._is_due(finished=finished) and not self._publish(finished=finished):
                continue
            number = min(_num_due(self._limiter), config.publish_every, config.num_updates - learner.num_updates)
            if number < 1:
                if finished:
                    break
                self._idle("waiting for steps")
                continue
            self._learn_and_evaluate(number)
            if learner.checkpoint_due():
                self.save()
        learner.evaluate(self._evaluator)
        self.save()
        self._publish_to_late_shards()

    def _learn_and_evaluate(self, num_updates: int) -> None:
        learner = self._learner
        if num_updates:
            metrics = learner.learn(num_updates)
            self._limiter = self._limiter.sampled(num_updates)
            learner.notify(metrics=metrics)
        if learner.sac is not None and learner.due("evaluations", self._config.eval_every):
            learner.evaluate(self._evaluator, wait=not self._concurrent_evaluation)

    def _is_due(self, *, finished: bool) -> bool:
        published = self._published
        every = self._config.publish_every
        return published is None or self._learner.num_updates >= published[0] + every or finished > published[1]

    def _publish(self, *, finished: bool) -> bool:
        """Publish the present policy to the actors; False if no server could be reached."""
        learner = self._learner
        policy = learner.policy()
        assert policy is not None
        metadata = {
            "policy": json.dumps(policy.description()),
            "pending_updates": str(_num_due(self._limiter)),
            "finished": str(int(finished)),
            "steps": str(learner.step),
            "base_policy": learner.base_policy_digest or "",
        }
        learner.health.progress("publishing")
        try:
            learner.version = self._remote.publish(policy.parameters(), metadata=metadata, timeout_s=PUBLISH_TIMEOUT_S)
        except UnavailableError as error:  # the server was killed and will come back
            logger.warning("not published: %s", error)
            time.sleep(WAIT_S)
            return False
        learner.health.progress("publishing", learner.step, learner.num_updates, learner.version)
        self._published = (learner.num_updates, finished)
        return True

    def _publish_to_late_shards(self) -> None:
        """Tell actors that listen to a shard which was unreachable that the run is finished."""
        deadline = time.monotonic() + PUBLISH_TIMEOUT_S
        while self._remote.unpublished and time.monotonic() < deadline and not self._stop.requested:
            self._publish(finished=True)
            time.sleep(WAIT_S)

    def _idle(self, doing: str) -> None:
        self._learner.health.progress(doing, step=self._learner.step)
        time.sleep(IDLE_S)

    def save(self) -> None:
        self._learner.save(self._learner.num_updates, {"limiter": self._limiter.to_json()})

    def describe_unsaved(self) -> str:
        """What a learner that quits at once will do again, in words."""
        return (
            f"no step is lost, and {self._learner.num_unsaved_updates} updates since the last checkpoint will be done "
            f"again; start it again to continue"
        )


def _limiter(config: RLPDConfig, learner: RLPDLearner) -> RateLimiter:
    """A rate limiter with updates per step as samples per insert; a resumed run keeps its counts."""
    if learner.facts is not None and "limiter" in learner.facts:
        return RateLimiter.from_json(learner.facts["limiter"])
    least = max(config.start_steps, 1)
    window = max(least * config.updates_per_step, (1 + config.updates_per_step) / 2)
    new = RateLimiter(samples_per_insert=config.updates_per_step, min_size=least, error_window=window)
    return new.sampled(learner.num_updates)  # not 0 if the run was started in one process


def _num_due(limiter: RateLimiter) -> int:
    """How many updates are pending."""
    return int(limiter.diff) if limiter.size >= limiter.min_size else 0
