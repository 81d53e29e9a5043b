"""Learning: the learner as a process, beside servers and actors that come and go.

| loop | takes from | blocks on | woken by |
|---|---|---|---|
| main | files of the store, or shards | too few new steps (limiter); shards away | each IDLE_S, to look again |
| evaluation (learner.py) | a policy | whoever judges it | that one |
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
from understudy.envs.registry import open_world
from understudy.replay.format.catalog import CATALOG_FILE
from understudy.replay.sample.rate_limiter import Limiter
from understudy.training.offpolicy.demo_online_mixture import Shards
from understudy.training.offpolicy.learner import Learner, Moment
from understudy.training.offpolicy.rlpd import RLPDConfig, judge_in
from understudy.training.runs.evaluate import Judge
from understudy.training.runs.health import HEALTH, Health
from understudy.training.runs.run import Run

if TYPE_CHECKING:
    from understudy.service.client.remote import Remote

logger = logging.getLogger(__name__)

IDLE_S = 0.02
WAIT_S = 0.5  # for a server that does not answer
PUBLISH_TIMEOUT_S = 60.0


def run_learner(
    run: Run,
    server: str | Remote,
    *,
    here: Mapping[str, Path] | None = None,
    lost: Collection[str] = (),
    judge: Judge | None = None,
    token_file: Path | None = None,
    tls_cert: Path | None = None,
    watch: Callable[[Moment], None] | None = None,
    told: Callable[[list[str]], None] | None = None,
    health: Health | None = None,
) -> None:
    """Learn from what servers write, and publish to them, until the steps are done.

    One server writes the run's store, on this machine. Of several shards, those `here` are read in their directories,
    the others over the network, and those that are `lost` are not counted on any more. Whoever passes a Remote may tell
    it meanwhile where shards are. A `judge` evaluates while learning goes on; without one, this process does.
    """
    from understudy.service import connect  # only now: it needs gRPC

    config = run.config(RLPDConfig)
    health = health or Health(run.path / HEALTH, role="learner", name=run.kind)
    with ExitStack() as undo:
        world = undo.enter_context(open_world(config.env))
        remote = server
        if isinstance(remote, str):
            remote = undo.enter_context(connect(remote, token_file=token_file, tls_cert=tls_cert))
        if remote is server:
            remote.wait_for_all(health.progress)
        remote.status()  # a wrong address or token is said now, and not when there is something to publish
        experience = run.store if here is None and len(remote.names) == 1 else _shards(run, remote, here or {}, lost)
        learner = undo.enter_context(Learner(run, config, world.step_spec, watch, health, experience))
        undo.enter_context(health)  # only now: the run is ours
        health.add(lambda: {"away": learner.mixture.away})
        if told is not None:
            told(learner.restored)
        _Process(learner, remote, judge or judge_in(world, health.progress), aside=judge is not None).run()


def _shards(run: Run, remote: Remote, here: Mapping[str, Path], lost: Collection[str]) -> Shards:
    own = run.store if (run.store / CATALOG_FILE).exists() and run.store not in here.values() else None
    return Shards(remote=remote, local=here, own=own, lost=frozenset(lost))


class _Process:
    """The loop of a learner's process."""

    def __init__(self, learner: Learner, remote: Remote, judge: Judge, *, aside: bool):
        self._learner = learner
        self._config = learner.config
        self._remote = remote
        self._judge = judge
        self._aside = aside  # it evaluates elsewhere, so there is no need to wait
        self._limiter = _limiter(learner.config, learner)
        self._published: tuple[int, bool] | None = None  # after which update, and whether actors were told to stop

    def run(self) -> None:
        learner, config = self._learner, self._config
        while True:
            learner.mixture.follow()
            self._limiter = self._limiter.inserted(max(learner.step - self._limiter.num_inserted, 0))
            learner.hear()
            if not learner.ready():
                self._idle("waiting for the first steps")
                continue
            enough = learner.step >= config.steps
            if self._is_due(enough) and not self._publish(enough):
                continue
            number = min(_due(self._limiter), config.publish_every, config.num_updates - learner.num_updates)
            if number < 1:
                if enough:
                    break
                self._idle("waiting for steps")
                continue
            metrics = learner.learn(number)
            self._limiter = self._limiter.sampled(number)
            learner.tell(metrics=metrics)
            if learner.due("evaluations", config.eval_every):
                learner.evaluate(self._judge, wait=not self._aside)
            if learner.due("checkpoints", config.checkpoint_every):
                self._save()
        learner.evaluate(self._judge)
        self._save()
        self._part()

    def _is_due(self, enough: bool) -> bool:
        published = self._published
        every = self._config.publish_every
        return published is None or self._learner.num_updates >= published[0] + every or enough > published[1]

    def _publish(self, enough: bool) -> bool:
        """The policy as it is now to the actors; False if no server takes it."""
        learner = self._learner
        policy = learner.policy()
        assert policy is not None
        metadata = {
            "policy": json.dumps(policy.description()),
            "behind": str(_due(self._limiter)),
            "done": str(int(enough)),
        }
        learner.health.progress("publishing")
        try:
            learner.version = self._remote.publish(policy.parameters(), metadata=metadata, timeout_s=PUBLISH_TIMEOUT_S)
        except UnavailableError as error:  # it was killed, perhaps while it listened; it comes back
            logger.warning("not published: %s", error)
            time.sleep(WAIT_S)
            return False
        learner.health.progress("publishing", learner.step, learner.num_updates, learner.version)
        self._published = (learner.num_updates, enough)
        return True

    def _part(self) -> None:
        """Actors that hear a shard which was away are told, too, that it is enough."""
        deadline = time.monotonic() + PUBLISH_TIMEOUT_S
        while self._remote.unpublished and time.monotonic() < deadline:
            self._publish(True)
            time.sleep(WAIT_S)

    def _idle(self, doing: str) -> None:
        self._learner.health.progress(doing, step=self._learner.step)
        time.sleep(IDLE_S)

    def _save(self) -> None:
        self._learner.save(self._learner.num_updates, {"limiter": self._limiter.to_json()})


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
