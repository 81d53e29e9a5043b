"""ClusterCollector: tickets to workers on any machine, and whole episodes back. None is missing, none counts twice.

| loop | takes from | blocks on | woken by |
|---|---|---|---|
| `stream`, in the caller or in the thread of `ahead` | all workers | an answer, up to WAIT_S | a worker |

A worker has one call on its way at any time. When it answers, it is given more tickets; when it dies, is silent for too
long or gets nothing done, it is killed, its tickets go to others, and another is made in its place. Its answer, should
one still come, is an answer to a call that nobody waits for any more: that is the fence. Workers for which there is no
room yet wait with Ray, and join when there is.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import ray
import torch
from ray.exceptions import GetTimeoutError, RayActorError, RayError, RayTaskError

from understudy.cluster.config import ClusterConfig
from understudy.cluster.ray_session import ClusterError, elsewhere, options, room
from understudy.cluster.roles.inference_worker import InferenceWorker
from understudy.cluster.roles.rollout_worker import Answer, RolloutJob, RolloutWorker, WorldFacts
from understudy.cluster.status import Event, RoleNow, RoleState
from understudy.core import StepSpec, UnderstudyError
from understudy.envs.suite import Suite, Task
from understudy.policies import BlockPolicy, Sampling
from understudy.training.collection import Rollout, Ticket, deserialize_rollouts
from understudy.training.collection.collector import check_tickets
from understudy.training.onpolicy.config import OnPolicyConfig

logger = logging.getLogger(__name__)
Array = np.ndarray[Any, Any]

POLL_S = 2.0  # a worker with nothing to tell answers after so long
WAIT_S = 0.5
AHEAD = 2  # tickets that a worker has for each of its simulators
MAX_LIVES = 10  # workers that may die of one ticket
PAUSE_S = 1.0  # before a worker is made again whose start failed


@dataclass(eq=False)
class _Worker:
    """A place for a worker, and the one that has it now."""

    name: str
    handle: Any = None
    state: RoleState = "waiting for room"
    since_s: float = field(default_factory=time.time)
    call: Any = None  # on its way
    called: float = 0.0
    tickets: dict[int, Ticket] = field(default_factory=dict)
    node: str | None = None
    pid: int | None = None
    doing: str = ""
    restarts: int = 0
    error: str | None = None
    stack: str | None = None
    not_before: float = 0.0


class ClusterCollector:
    """The workers of one learner. `publish` comes before the first stream."""

    def __init__(
        self,
        config: OnPolicyConfig,
        place: ClusterConfig,
        policy: Path,
        *,
        rank: int,
        num_ranks: int,
        device: str,
        learner_nodes: Sequence[str] = (),
    ):
        self.num_reissued = self.num_fenced = self.num_restarts = 0
        self._place = place
        self._config = config
        self._events: list[Event] = []
        self._apart = elsewhere(learner_nodes) if place.apart else {}
        num = place.rollout.num // num_ranks + (rank < place.rollout.num % num_ranks)
        self._workers = [_Worker(f"rollout-{rank}-{index}") for index in range(max(num, 1))]
        self._rank = rank
        self._policy = policy
        self._device = device
        self._inference: list[Any] = []
        self._facts: WorldFacts | None = None
        self._version: int | None = None
        self._weights: Any = None
        self._stream = 0
        self._lives: dict[int, int] = {}  # of a ticket: workers that died with it
        self._ahead: _Ahead | None = None
        try:
            self._meet()
        except BaseException:
            self.close()
            raise

    # ---- the face of a Collector

    @property
    def _world(self) -> WorldFacts:
        assert self._facts is not None
        return self._facts

    @property
    def step_spec(self) -> StepSpec:
        return self._world.step_spec

    @property
    def suite(self) -> Suite:
        return self._world.suite

    @property
    def tasks(self) -> tuple[Task, ...]:
        return self._world.tasks

    @property
    def versions(self) -> dict[str, str]:
        return self._world.versions

    def publish(self, version: int, weights: Callable[[], Mapping[str, Array]]) -> None:
        """What streams from now on are lived with."""
        if version != self._version:
            self._weights, self._version = ray.put(dict(weights())), version

    def ahead(self, tickets: Sequence[Ticket], sampling: Sampling) -> None:
        """Begin with tickets that the next stream but evaluations will ask for."""
        self._finish_ahead()
        if tickets:
            self._ahead = _Ahead(tickets, self._run(tickets, sampling))

    def stream(self, tickets: Sequence[Ticket], policy: BlockPolicy, sampling: Sampling) -> Iterator[Rollout]:
        """As those of Collector; the policy that acts is the one that was published."""
        self._finish_ahead()
        if self._ahead is not None and self._ahead.tickets == list(tickets):
            lived, self._ahead = self._ahead, None
            yield from lived.rollouts
            return
        yield from self._run(tickets, sampling)

    def close(self) -> None:
        """End all workers."""
        for worker in self._workers:
            if worker.handle is not None:
                ray.kill(worker.handle)
                worker.handle, worker.call, worker.state = None, None, "ended"
        for handle in self._inference:
            ray.kill(handle)
        self._inference = []

    # ---- for whoever watches

    def take_events(self) -> list[Event]:
        events, self._events = self._events, []
        return events

    def roles(self) -> list[RoleNow]:
        return [
            RoleNow(
                role="rollout",
                name=one.name,
                state=one.state,
                node=one.node,
                pid=one.pid,
                doing=one.doing,
                since_s=one.since_s,
                restarts=one.restarts,
                error=one.error,
                stack=one.stack,
            )
            for one in self._workers
        ] + [
            RoleNow(role="inference", name=f"inference-{self._rank}-{index}", state="up")
            for index in range(len(self._inference))
        ]

    # ---- workers

    def _job(self) -> RolloutJob:
        return RolloutJob(
            config=self._config,
            policy=self._policy,
            envs=self._place.rollout.envs,
            threads=torch.get_num_threads(),
            device=self._device if self._place.rollout.gpus else "cpu",
            ask=tuple(self._inference),
        )

    def _make(self, worker: _Worker) -> None:
        shape = options(self._place.rollout, threads=3, **self._apart)
        worker.handle = ray.remote(RolloutWorker).options(**shape).remote(self._job())
        worker.state, worker.since_s, worker.called = "waiting for room", time.time(), time.monotonic()
        worker.node = worker.pid = worker.stack = None
        worker.call = worker.handle.where.remote()

    def _meet(self) -> None:
        """Wait for the first worker; it says what world this is. The others may come later."""
        if self._place.inference.num:
            self._learn_spec()
        deadline = time.monotonic() + self._place.room_s
        while self._facts is None:
            self._step(deque(), None)
            if all(one.state == "waiting for room" for one in self._workers) and time.monotonic() > deadline:
                raise ClusterError(
                    f"rollout: no node had room for {self._place.rollout.shape()} within {self._place.room_s:g} s "
                    f"({room()}); lower --place.rollout.cpus or .gpus, or add nodes"
                )

    def _learn_spec(self) -> None:
        """Inference workers are made for a world, so one worker is asked about it before there are any."""
        shape = options(self._place.rollout, threads=3, **self._apart)
        first: Any = ray.remote(RolloutWorker).options(**shape).remote(self._job())
        try:
            facts = ray.get(first.open.remote(), timeout=self._place.room_s)
        except GetTimeoutError:
            raise ClusterError(
                f"rollout: the first worker was not ready within {self._place.room_s:g} s ({room()}); raise room_s"
            ) from None
        except RayTaskError as error:
            raise _refusal(error) from None
        finally:
            ray.kill(first)
        place = self._place.inference
        made = ray.remote(InferenceWorker).options(
            **{**options(place, threads=64, **self._apart), "max_restarts": -1, "max_task_retries": -1}
        )
        device = self._device if place.gpus else "cpu"
        self._inference = [
            made.remote(
                self._config,
                self._policy,
                facts.step_spec,
                device=device,
                threads=torch.get_num_threads(),
                max_rows=place.max_rows,
            )
            for _ in range(place.num)
        ]

    def _lost(self, worker: _Worker, why: str, waiting: deque[Ticket], *, stack: str | None = None) -> list[Rollout]:
        """Give up on a worker: nobody hears it any more, and its tickets are for others. Returns those that failed."""
        if worker.call is not None and worker.state == "up":
            self.num_fenced += 1
        if worker.handle is not None:
            ray.kill(worker.handle)
        back, failed = list(worker.tickets.values()), []
        for ticket in reversed(back):
            lives = self._lives[ticket.number] = self._lives.get(ticket.number, 0) + 1
            if lives >= MAX_LIVES:
                text = f"{lives} workers died of it; the last: {why}"
                failed.append(Rollout(ticket=ticket, episode=None, failure=text, attempts=lives))
            else:
                waiting.appendleft(ticket)
        self.num_reissued += len(back) - len(failed)
        self.num_restarts += 1
        said = f"{worker.name} {why}; {len(back)} tickets go to others, and another worker is made"
        logger.warning("%s", said)
        self._events.append(Event(what="stuck" if stack else "worker lost", name=worker.name, text=said, stack=stack))
        if back:
            text = f"{len(back)} of {worker.name}: {', '.join(str(ticket.number) for ticket in back[:20])}"
            self._events.append(Event(what="tickets reissued", name=worker.name, text=text))
        worker.handle = worker.call = None
        worker.state, worker.error, worker.stack = "gone", why, stack
        worker.not_before = time.monotonic() + PAUSE_S
        worker.tickets.clear()
        worker.restarts += 1
        return failed

    # ---- a stream

    def _run(self, tickets: Sequence[Ticket], sampling: Sampling) -> Iterator[Rollout]:
        check_tickets(tickets, self.suite)
        assert self._weights is not None, "publish comes first"
        self._stream += 1
        self._lives = {}
        waiting = deque(tickets)
        for worker in self._workers:
            worker.tickets.clear()
        while waiting or any(worker.tickets for worker in self._workers):
            yield from self._step(waiting, sampling)

    def _step(self, waiting: deque[Ticket], sampling: Sampling | None) -> list[Rollout]:
        """Hear all who have something to say, and give them more to do; returns what is over."""
        found: list[Rollout] = []
        for worker in self._workers:
            if worker.handle is None and time.monotonic() >= worker.not_before:
                self._make(worker)
            if worker.state == "up" and worker.call is None and sampling is not None:
                self._ask(worker, waiting, sampling)
        calls = {worker.call: worker for worker in self._workers if worker.call is not None}
        if not calls:
            time.sleep(WAIT_S / 10)
            return found
        ready, _ = ray.wait(list(calls), num_returns=len(calls), timeout=0)
        if not ready:
            ready, _ = ray.wait(list(calls), num_returns=1, timeout=WAIT_S)
        for call in ready:
            found += self._hear(calls[call], waiting)
        for worker in self._workers:
            late = worker.call is not None and time.monotonic() - worker.called > POLL_S + self._place.silent_s
            if late and worker.state == "up":
                found += self._lost(worker, f"did not answer for {self._place.silent_s:g} s", waiting)
        return found

    def _ask(self, worker: _Worker, waiting: deque[Ticket], sampling: Sampling) -> None:
        given: list[Ticket] = []
        share = -(-len(waiting) // max(sum(one.state == "up" for one in self._workers), 1))  # leave some for others
        while waiting and len(worker.tickets) < AHEAD * self._place.rollout.envs and len(given) < max(share, 1):
            given.append(waiting.popleft())
            worker.tickets[given[-1].number] = given[-1]
        if worker.tickets:
            worker.called = time.monotonic()
            worker.call = worker.handle.exchange.remote(
                self._stream,
                self._version,
                [self._weights],
                sampling,
                given,
                wait_s=POLL_S,
                stuck_s=self._place.stuck_s,
            )

    def _hear(self, worker: _Worker, waiting: deque[Ticket]) -> list[Rollout]:
        call, worker.call = worker.call, None
        try:
            said = ray.get(call)
        except RayTaskError as error:
            if isinstance(error.cause, UnderstudyError):
                raise _refusal(error) from None
            return self._lost(worker, f"failed: {_first_line(error)}", waiting)
        except (RayActorError, RayError) as error:
            return self._lost(worker, f"died ({_first_line(error)})", waiting)
        if isinstance(said, Answer):
            return self._take(worker, said, waiting)
        if isinstance(said, WorldFacts):
            self._facts = self._facts or said
            worker.state, worker.since_s, worker.error = "up", time.time(), None
            if worker.restarts:
                self._events.append(Event(what="worker back", name=worker.name, text=f"{worker.name} is up again"))
        else:
            worker.node, worker.pid = said
            worker.state, worker.since_s = "starting", time.time()
            worker.call, worker.called = worker.handle.open.remote(), time.monotonic()
        return []

    def _take(self, worker: _Worker, said: Answer, waiting: deque[Ticket]) -> list[Rollout]:
        if said.refusal is not None:
            raise said.refusal
        found = [one for one in deserialize_rollouts(*said.rollouts) if worker.tickets.pop(one.ticket.number, None) is not None]
        worker.doing = f"{said.doing}, {len(worker.tickets)} tickets"
        if said.error is not None:
            found += self._lost(worker, f"failed: {said.error}", waiting)
        elif said.stack is not None and worker.tickets:
            text = f"got nothing done for {said.idle_s:.0f} s, {said.doing}"
            found += self._lost(worker, text, waiting, stack=said.stack)
        return found

    def _finish_ahead(self) -> None:
        """There is one stream at a time, so the one ahead comes to its end first."""
        if self._ahead is not None:
            self._ahead.wait()


class _Ahead:
    """Tickets that are lived by a thread while the caller does something else."""

    def __init__(self, tickets: Sequence[Ticket], rollouts: Iterator[Rollout]):
        self.tickets = list(tickets)
        self.rollouts: list[Rollout] = []
        self._error: BaseException | None = None
        self._source = rollouts
        self._thread = threading.Thread(target=self._work, name="ahead", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        self._thread.join()
        if self._error is not None:
            raise self._error

    def _work(self) -> None:
        try:
            self.rollouts.extend(self._source)
        except BaseException as error:  # noqa: BLE001  # whoever waits hears of it
            self._error = error


def _refusal(error: RayTaskError) -> UnderstudyError:
    """What a worker refused, as if it had been said here."""
    return error.cause if isinstance(error.cause, UnderstudyError) else ClusterError(_first_line(error))


def _first_line(error: BaseException) -> str:
    lines = [line for line in str(error).strip().split("\n") if line.strip()]
    return lines[-1 if isinstance(error, RayTaskError) else 0].strip()[:300] if lines else type(error).__name__
