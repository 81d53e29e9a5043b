"""Rollout worker: simulators and a copy of the policy, in a Ray actor. Tickets in, rollouts out, over a long poll.

| thread | takes from | blocks on | woken by |
|---|---|---|---|
| living | the stream at hand | its simulators, the policy; tickets | `exchange` |
| Ray's, in `exchange` | rollouts that are over | the next of them, up to `wait_s` | the living thread |
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from understudy.cluster.ray_session import Placed
from understudy.cluster.roles.inference_worker import AskedPolicy, Copy
from understudy.core import StepSpec, UnderstudyError
from understudy.envs.suite import Suite, Task
from understudy.policies import Sampling
from understudy.training.collection import Collector, Rollout, Ticket, serialize_rollouts
from understudy.training.onpolicy.config import OnPolicyConfig
from understudy.training.runs.stack_dump import dump_stacks

Array = np.ndarray[Any, Any]


@dataclass(frozen=True, kw_only=True)
class RolloutJob:
    """All that a worker is made of."""

    config: OnPolicyConfig
    policy: Path  # the one that the run began with
    envs: int
    device: str
    threads: int  # of torch: the same as the learner's, so that both find the same bits
    ask: tuple[Any, ...] = ()  # inference workers; none: it has a copy of its own


@dataclass(frozen=True, kw_only=True)
class WorldFacts:
    """What a world says of itself, to those who do not have it."""

    step_spec: StepSpec
    suite: Suite
    tasks: tuple[Task, ...]
    versions: dict[str, str]


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What came of an exchange. `rollouts` are packed."""

    rollouts: tuple[Mapping[str, Any], Mapping[str, Array]]
    doing: str
    idle_s: float  # since anything was got done
    stack: str | None  # if that is long
    error: str | None  # what ended the stream, if the workers or the world are to blame
    refusal: UnderstudyError | None  # what ended it, and would again on any other machine


@dataclass(eq=False)
class _Stream:
    """Tickets that are lived with one version of the policy."""

    number: int
    weights: Any
    version: int
    sampling: Sampling
    tickets: deque[Ticket] = field(default_factory=deque)
    over: deque[Rollout] = field(default_factory=deque)


class RolloutWorker(Placed):
    """One Ray actor, with two threads of Ray's and one that lives."""

    def __init__(self, job: RolloutJob):
        self._job = job
        self._streams: queue.SimpleQueue[_Stream] = queue.SimpleQueue()
        self._changed = threading.Condition()  # guards all below
        self._stream: _Stream | None = None
        self._facts: WorldFacts | None = None
        self._doing, self._at = "starting", time.monotonic()
        self._error: str | None = None
        self._refusal: UnderstudyError | None = None
        self._thread = threading.Thread(target=self._live, name="living", daemon=True)

    # ---- what the learner calls

    def open(self) -> WorldFacts:
        """Start the simulators."""
        self._thread.start()
        with self._changed:
            self._changed.wait_for(lambda: self._facts or self._refusal or self._error)
            if self._facts is None:
                raise self._refusal or RuntimeError(self._error)
            return self._facts

    def exchange(
        self,
        number: int,
        version: int,
        weights: Sequence[Any],
        sampling: Sampling,
        tickets: Sequence[Ticket],
        *,
        wait_s: float,
        stuck_s: float,
    ) -> Answer:
        """Take more tickets of a stream, and give what is over; waits until there is something to give. With a new
        number a new stream begins, and what is left of the one before is forgotten. `weights` holds their reference."""
        with self._changed:
            stream = self._stream
            if stream is None or stream.number != number:
                stream = _Stream(number=number, weights=weights[0], version=version, sampling=sampling)
                self._stream, self._error, self._refusal = stream, None, None
                self._streams.put(stream)
            stream.tickets += tickets
            self._changed.notify_all()
            self._changed.wait_for(lambda: stream.over or self._error or self._refusal, wait_s)
            found = list(stream.over)
            stream.over.clear()
            idle_s = time.monotonic() - self._at
            return Answer(
                rollouts=serialize_rollouts(found),
                doing=self._doing,
                idle_s=idle_s,
                stack=dump_stacks() if idle_s > stuck_s else None,
                error=self._error,
                refusal=self._refusal,
            )

    # ---- the living thread

    def _live(self) -> None:
        try:
            self._progress("starting the simulators")
            with self._open_collector() as collector:
                self._make_policy(collector.step_spec)
                with self._changed:
                    self._facts = WorldFacts(
                        step_spec=collector.step_spec,
                        suite=collector.suite,
                        tasks=collector.tasks,
                        versions=collector.versions,
                    )
                    self._changed.notify_all()
                while True:
                    self._progress("waiting for tickets")
                    self._live_stream(collector, self._streams.get())
        except UnderstudyError as error:
            self._fail(refusal=error)
        except Exception as error:  # noqa: BLE001  # a thread has nobody above it; the learner hears of it
            self._fail(error=f"{type(error).__name__}: {error}")

    def _live_stream(self, collector: Collector, stream: _Stream) -> None:
        if stream is not self._stream:
            return
        self._policy.take(stream.version, stream.weights)

        def more(idle: bool) -> Sequence[Ticket] | None:
            with self._changed:
                if idle:
                    self._doing = "waiting for tickets"
                    self._changed.wait_for(lambda: stream.tickets or stream is not self._stream)
                    self._doing, self._at = "living", time.monotonic()
                if stream is not self._stream:
                    return None
                given = list(stream.tickets)
                stream.tickets.clear()
                return given

        for rollout in collector.stream([], self._policy, stream.sampling, more=more):
            with self._changed:
                if stream is not self._stream:
                    return
                stream.over.append(rollout)
                self._doing, self._at = "living", time.monotonic()
                self._changed.notify_all()

    def _open_collector(self) -> Collector:
        torch.set_num_threads(self._job.threads)
        config = self._job.config
        return Collector(
            config.env,
            num_parallel_envs=self._job.envs,
            max_attempts=config.workers.max_attempts,
            max_steps=config.max_steps,
            task_affinity=config.workers.task_affinity,
            clip_actions=config.clip_actions,
        )

    def _make_policy(self, spec: StepSpec) -> None:
        job = self._job
        if job.ask:
            self._policy: Copy | AskedPolicy = AskedPolicy(job.ask)
        else:
            self._progress("loading the policy")
            self._policy = Copy(job.config, job.policy, spec, device=job.device)

    def _progress(self, doing: str) -> None:
        with self._changed:
            self._doing, self._at = doing, time.monotonic()

    def _fail(self, *, error: str | None = None, refusal: UnderstudyError | None = None) -> None:
        with self._changed:
            self._error, self._refusal = error, refusal
            self._changed.notify_all()
