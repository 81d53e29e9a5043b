"""Rollout worker: simulators and a copy of the policy, in a Ray actor. Tickets in, rollouts out, over a long poll.

| thread | takes from | blocks on | woken by |
|---|---|---|---|
| `rollout` | the present stream | its simulators, the policy; tickets | `exchange` |
| Ray's, in `exchange` | finished rollouts | the next one, up to `wait_s` | the rollout thread |
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

from understudy.cluster.roles.inference_worker import PublishedPolicy, RemotePolicy
from understudy.cluster.roles.process import location
from understudy.core import StepSpec, UnderstudyError
from understudy.envs.suite import Suite, Task
from understudy.policies import Sampling
from understudy.training.collection.collector import Collector
from understudy.training.collection.rollout import Rollout
from understudy.training.collection.serialization import serialize_rollouts
from understudy.training.collection.task_start_plan import Ticket
from understudy.training.onpolicy.config import OnPolicyConfig
from understudy.training.runs.stack_dump import dump_stacks

Array = np.ndarray[Any, Any]


@dataclass(frozen=True, kw_only=True)
class RolloutJob:
    """What a rollout worker is made of."""

    config: OnPolicyConfig
    policy: Path  # the one that the run began with
    envs: int
    device: str
    threads: int  # of torch: the same as the learner's, so that both compute the same bits
    remote_policy: bool  # inference workers run the policy, and this worker has no copy of it


@dataclass(frozen=True, kw_only=True)
class WorldInfo:
    """The world of a rollout worker, for those who do not have it."""

    step_spec: StepSpec
    suite: Suite
    tasks: tuple[Task, ...]
    versions: dict[str, str]


@dataclass(frozen=True, kw_only=True)
class StreamRequest:
    """More tickets of a stream; a new number begins a new stream, and the worker drops what is left of the old one."""

    number: int
    version: int  # of the policy
    weights: tuple[Any, ...]  # the reference to that version's weights; inside a tuple, so that Ray does not fetch it
    sampling: Sampling
    tickets: tuple[Ticket, ...]
    inference: tuple[Any, ...]  # handles of inference workers


@dataclass(frozen=True, kw_only=True)
class StreamReply:
    """What a worker has finished. `rollouts` are serialized."""

    rollouts: tuple[Mapping[str, Any], Mapping[str, Array]]
    doing: str
    idle_s: float  # since the last progress
    stack: str | None  # if that is longer than it may be
    error: str | None  # that ended the stream; another worker may succeed
    refusal: UnderstudyError | None  # that ended the stream, and would on any other worker


@dataclass(eq=False)
class _Stream:
    """Tickets that are run with one version of the policy."""

    request: StreamRequest  # the first
    tickets: deque[Ticket] = field(default_factory=deque)
    finished: deque[Rollout] = field(default_factory=deque)


class RolloutWorker:
    """One Ray actor."""

    def __init__(self, job: RolloutJob):
        self._job = job
        self._streams: queue.SimpleQueue[_Stream] = queue.SimpleQueue()
        self._policy: PublishedPolicy | RemotePolicy | None = None
        self._changed = threading.Condition()  # guards all below
        self._stream: _Stream | None = None
        self._world: WorldInfo | None = None
        self._doing, self._progress_at = "starting", time.monotonic()
        self._error: str | None = None
        self._refusal: UnderstudyError | None = None
        self._thread = threading.Thread(target=self._run, name="rollout", daemon=True)

    # ---- called by the learner

    def location(self) -> tuple[str, int]:
        return location()

    def open(self) -> WorldInfo:
        """Start the simulators, and load the policy."""
        self._thread.start()
        with self._changed:
            self._changed.wait_for(lambda: self._world or self._refusal or self._error)
            if self._world is None:
                raise self._refusal or RuntimeError(self._error)
            return self._world

    def exchange(self, request: StreamRequest, *, wait_s: float, progress_timeout_s: float) -> StreamReply:
        """Take more tickets of a stream, and return what has finished; waits until there is something to return."""
        with self._changed:
            stream = self._stream
            if stream is None or stream.request.number != request.number:
                stream = self._stream = _Stream(request)
                self._error, self._refusal = None, None
                self._streams.put(stream)
            stream.tickets += request.tickets
            self._changed.notify_all()
            self._changed.wait_for(lambda: stream.finished or self._error or self._refusal, wait_s)
            finished = list(stream.finished)
            stream.finished.clear()
            idle_s = time.monotonic() - self._progress_at
            return StreamReply(
                rollouts=serialize_rollouts(finished),
                doing=self._doing,
                idle_s=idle_s,
                stack=dump_stacks() if idle_s > progress_timeout_s else None,
                error=self._error,
                refusal=self._refusal,
            )

    # ---- the rollout thread

    def _run(self) -> None:
        try:
            self._progress("starting the simulators")
            with self._open_collector() as collector:
                if not self._job.remote_policy:
                    self._progress("loading the policy")
                    job = self._job
                    self._policy = PublishedPolicy(job.config, job.policy, collector.step_spec, device=job.device)
                with self._changed:
                    self._world = WorldInfo(
                        step_spec=collector.step_spec,
                        suite=collector.suite,
                        tasks=collector.tasks,
                        versions=collector.versions,
                    )
                    self._changed.notify_all()
                while True:
                    self._progress("waiting for tickets")
                    self._run_stream(collector, self._streams.get())
        except UnderstudyError as error:
            self._fail(refusal=error)
        except Exception as error:  # noqa: BLE001  # a thread has no caller; `open` or `exchange` passes it on
            self._fail(error=f"{type(error).__name__}: {error}")

    def _run_stream(self, collector: Collector, stream: _Stream) -> None:
        if stream is not self._stream:
            return
        if self._policy is None:
            self._policy = RemotePolicy(stream.request.inference)
        self._policy.load(stream.request.version, stream.request.weights[0])

        def more(idle: bool) -> Sequence[Ticket] | None:
            with self._changed:
                if idle:
                    self._doing = "waiting for tickets"
                    self._changed.wait_for(lambda: stream.tickets or stream is not self._stream)
                    self._doing, self._progress_at = "running episodes", time.monotonic()
                if stream is not self._stream:
                    return None
                given = list(stream.tickets)
                stream.tickets.clear()
                return given

        for rollout in collector.stream([], self._policy, stream.request.sampling, more=more):
            with self._changed:
                if stream is not self._stream:
                    return
                stream.finished.append(rollout)
                self._doing, self._progress_at = "running episodes", time.monotonic()
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
            # An inference worker waits for the observations of all rollout workers itself.
            batch_wait_s=0.0 if self._job.remote_policy else config.workers.batch_wait_ms / 1e3,
            clip_actions=config.clip_actions,
        )

    def _progress(self, doing: str) -> None:
        with self._changed:
            self._doing, self._progress_at = doing, time.monotonic()

    def _fail(self, *, error: str | None = None, refusal: UnderstudyError | None = None) -> None:
        with self._changed:
            self._error, self._refusal = error, refusal
            self._changed.notify_all()
