"""Collector: runs tickets in simulator workers and returns their episodes; no requested episode is missing.

| loop | takes from | blocks on | woken by |
|---|---|---|---|
| `stream`, in the caller | the tickets; all workers | the policy; a worker's answer, up to READY_S | a worker |
| each worker's process | its channel | the next command; its world | `stream` |

with Collector("toy", num_parallel_envs=4) as collector:
    rollouts = collector.collect(tickets, policy, Sampling())

Workers stay alive and advance independently. A free worker takes a ticket at once; the policy acts for all workers that
wait for it at that moment. The episode of a ticket depends on the ticket, the policy and the sampling alone: not on the
workers, their number, their speed or their failures.
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol, TypeAlias

import numpy as np

from understudy.core import AnyTree, Episode, EpisodeInfo, Step, StepSpec
from understudy.core.closeable import Closeable
from understudy.envs.registry import ResolvedWorld, find_world
from understudy.envs.suite import Suite, Task
from understudy.envs.workers.outcomes import Observed, Outcome, Reset, Stepped, Steps, WorkerFailure
from understudy.envs.workers.restarting_worker import Limits
from understudy.envs.workers.vector import Vector
from understudy.envs.world_factory import WorldFactory
from understudy.policies.protocol import BlockPolicy, Sampling
from understudy.policies.rtc import Continuation, RTCConfig
from understudy.processes.stop import StopRequest
from understudy.training.collection.block_rows import Decision, block_spec, block_step, decisions, stacked
from understudy.training.collection.rollout import CLIPPED, Rollout
from understudy.training.collection.shared_tickets import Sharing
from understudy.training.collection.task_start_plan import Ticket
from understudy.training.runs.config import ConfigError

logger = logging.getLogger(__name__)

READY_S = 1.0
# Further tickets, or None if there will be no more. With True as its argument no episode is running, and it may wait.
MoreTickets: TypeAlias = Callable[[bool], "Sequence[Ticket] | None"]
_SAMPLING_STREAM = 2  # joined to a ticket's seed for the policy's generator; worlds use 0 and 1


@dataclass(kw_only=True, eq=False)
class _Attempt:
    """An attempt at a ticket."""

    ticket: Ticket
    attempt: int
    rng: np.random.Generator
    info: EpisodeInfo = field(default_factory=EpisodeInfo)
    observation: AnyTree = None
    decision: Decision | None = None  # sent to the worker; when acting asynchronously, also continued by the next
    steps: list[Step] = field(default_factory=list)
    num_steps: int = 0  # of the world
    num_clipped: int = 0
    success: bool = False


class _Shared:
    """The tickets of other processes that this one may run."""

    def __init__(self, sharing: Sharing | None):
        self.others = [] if sharing is None else [_first_attempt(ticket) for ticket in sharing.others]
        self.claim: Callable[[Ticket], bool] = (lambda ticket: True) if sharing is None else sharing.claim


class TicketRunner(Protocol):
    """Runs tickets: a Collector, or many of them on other machines."""

    @property
    def step_spec(self) -> StepSpec: ...

    @property
    def suite(self) -> Suite: ...

    @property
    def tasks(self) -> tuple[Task, ...]: ...

    @property
    def versions(self) -> dict[str, str]: ...

    @property
    def num_envs(self) -> int:
        """The number of simulators."""
        ...

    @property
    def busy_s(self) -> float:
        """How long simulators had a ticket so far, summed over them."""
        ...

    def stream(
        self, tickets: Sequence[Ticket], policy: BlockPolicy, sampling: Sampling, *, sharing: Sharing | None = None
    ) -> Iterator[Rollout]: ...


class Collector(Closeable):
    """Owns the workers of one world. `suite`, `step_spec` and `versions` are the world's."""

    def __init__(
        self,
        env: str | WorldFactory,
        *,
        num_parallel_envs: int,
        limits: Limits | None = None,
        max_attempts: int = 3,
        max_steps: int | None = None,
        max_act_rows: int = 64,
        batch_wait_s: float = 0.0,
        task_affinity: int = 10,
        clip_actions: bool = False,
        rtc: RTCConfig | None = None,
        stop: StopRequest | None = None,
    ):
        """`env` is a world's name, or how to build it. A ticket whose worker fails is run again, up to `max_attempts`
        times in all. `max_steps` ends episodes before the task's own limit. The policy acts for at most `max_act_rows`
        workers in one call, and waits up to `batch_wait_s` for more of them. A worker keeps `task_affinity` tasks
        loaded and gets tickets of these first; with 0 it takes tickets in order. `clip_actions` clips actions to their
        bounds instead of raising. With `rtc` the policy acts as if it computed while the block before is executed, with
        a delay of `rtc.inference_delay` steps: for evaluation, since log-probs are of the policy's own blocks and not
        of the executed ones. After a `stop` request no further episode begins, those that are running have their time
        to end, and `stream` raises Stopped.
        """
        for name, value, minimum in (
            ("num_parallel_envs", num_parallel_envs, 1),
            ("max_attempts", max_attempts, 1),
            ("max_steps", max_steps, 1),
            ("max_act_rows", max_act_rows, 1),
            ("batch_wait_s", batch_wait_s, 0),
            ("task_affinity", task_affinity, 0),
        ):
            if value is not None and value < minimum:
                raise ConfigError(f"{name}: expected {minimum} or more, got {value}")
        self.max_attempts, self.max_steps = max_attempts, max_steps
        self.max_act_rows, self.batch_wait_s = max_act_rows, batch_wait_s
        self.task_affinity, self.clip_actions = task_affinity, clip_actions
        if rtc is not None and rtc.inference_delay is None:
            raise ConfigError(
                "rtc/inference_delay: expected a number of steps, got None; simulators wait for the policy, so there "
                "is no delay to measure: set it to the inference time times the control rate"
            )
        self._rtc = rtc
        self._stop = stop or StopRequest()
        self._ending = False  # streams end at once
        self.num_loads = 0  # episodes whose task the worker had to load first
        self.busy_s = 0.0  # how long workers had a ticket, summed over them
        named = find_world(env) if isinstance(env, str) else ResolvedWorld(source=env, task=None, isolated=True)
        self._task = named.task
        self._loaded: list[OrderedDict[str, None]] = [OrderedDict() for _ in range(num_parallel_envs)]
        self._vector = Vector([named.source] * num_parallel_envs, limits=limits or named.limits)
        try:
            self._vector.start()
            hz = self._vector.workers[0].hz
            if rtc is not None and hz is not None:
                raise ConfigError(
                    f"rtc: expected a world that waits for the policy, got one that runs at {hz:g} Hz by itself; use "
                    f"AsyncBlocks, or `understudy evaluate` without an inference delay"
                )
        except BaseException:
            self._vector.close()
            raise

    @property
    def step_spec(self) -> StepSpec:
        return self._vector.workers[0].step_spec

    @property
    def suite(self) -> Suite:
        return self._vector.workers[0].suite

    @property
    def tasks(self) -> tuple[Task, ...]:
        """The task that the world's name selects, or all tasks."""
        return self.suite.tasks if self._task is None else (self.suite.task(self._task),)

    @property
    def versions(self) -> dict[str, str]:
        """The versions of the simulator and its libraries."""
        return self._vector.workers[0].versions

    @property
    def num_failures(self) -> int:
        """Worker failures so far, whether or not a ticket failed for good."""
        return sum(worker.num_failures for worker in self._vector.workers)

    @property
    def num_envs(self) -> int:
        """The number of workers."""
        return len(self._vector)

    @property
    def pids(self) -> list[int]:
        """Process ids of the workers that are running."""
        return [worker.pid for worker in self._vector.workers if worker.pid is not None]

    def collect(
        self,
        tickets: Sequence[Ticket],
        policy: BlockPolicy,
        sampling: Sampling,
        *,
        on_result: Callable[[Rollout], None] | None = None,
    ) -> list[Rollout]:
        """Run all tickets; returns the rollouts in their order. `on_result` gets each as soon as it is finished."""
        return in_order(tickets, self.stream(tickets, policy, sampling), on_result)

    def stream(
        self,
        tickets: Sequence[Ticket],
        policy: BlockPolicy,
        sampling: Sampling,
        *,
        sharing: Sharing | None = None,
        more: MoreTickets | None = None,
    ) -> Iterator[Rollout]:
        """Run all tickets; yields each rollout when it is finished. One stream at a time.

        With `sharing`, those that other processes have claimed are left out, and some of theirs may be added. `more` is
        called for further tickets until it returns None.
        """
        check_tickets(tickets, self.suite)
        self._drain()
        spec = block_spec(self.step_spec, policy)
        waiting = [_first_attempt(ticket) for ticket in tickets]
        shared = _Shared(sharing)
        running: dict[int, _Attempt] = {}
        undecided: list[int] = []  # slots whose observation waits for the policy, oldest first
        oldest_s = 0.0  # since when the oldest of them waits
        truncated: list[_Attempt] = []  # finished, but their last value must be bootstrapped
        num_left = 0  # tickets that were not begun because of a stop request
        noted_s = time.monotonic()
        while waiting or shared.others or running or truncated or more is not None:
            now_s = time.monotonic()
            self.busy_s += len(running) * (now_s - noted_s)
            noted_s = now_s
            if self._ending:
                return
            if self._stop.requested:
                num_left += len(waiting)
                waiting.clear()
                shared.others.clear()
                self._stop.check_overdue()
            if more is not None:
                added = more(not (waiting or shared.others or running or truncated))
                more = None if added is None else more
                waiting += [_first_attempt(ticket) for ticket in added or ()]
                if not (waiting or shared.others or running or truncated):
                    continue
            self._fill(waiting, shared, running)
            if not running and not truncated:
                continue  # others have claimed what was left
            wait_s = 0.0 if truncated else self._wait_s(len(undecided), len(running), oldest_s)
            for slot, outcome in self._vector.ready(wait_s):
                run = running[slot]
                if isinstance(outcome, WorkerFailure):
                    del running[slot]
                    self._loaded[slot].clear()
                    yield from self._failed(run, outcome, waiting)
                elif self._advance(run, outcome):
                    oldest_s = oldest_s if undecided else time.monotonic()
                    undecided.append(slot)
                else:
                    del running[slot]
                    if policy.has_value and run.steps[-1].truncated:
                        truncated.append(run)
                    else:
                        yield _rollout(run, spec)
            if undecided and not self._wait_s(len(undecided), len(running), oldest_s):
                slots, undecided = undecided[: self.max_act_rows], undecided[self.max_act_rows :]
                self._decide({slot: running[slot] for slot in slots}, policy, sampling, spec)
            elif truncated:
                runs, truncated = truncated[: self.max_act_rows], truncated[self.max_act_rows :]
                _bootstrap(runs, policy, sampling, spec)
                yield from [_rollout(run, spec) for run in runs]
        if num_left:
            raise self._stop.stopped()

    def end_streams(self) -> None:
        """Let a stream of another thread end within READY_S, and each later one at once; `close` comes next."""
        self._ending = True

    def close(self) -> None:
        """End all workers."""
        self._vector.close()

    # --- stages of `stream` ---

    def _drain(self) -> None:
        """Wait for the answers that an earlier, abandoned stream did not receive."""
        while self._vector.num_pending:
            self._vector.ready(READY_S)

    def _fill(self, waiting: list[_Attempt], shared: _Shared, running: dict[int, _Attempt]) -> None:
        for slot in range(len(self._vector)):
            if slot in running:
                continue
            run = self._take(slot, waiting, shared)
            if run is None:
                return
            running[slot] = run
            self._note_task(slot, run.ticket.task)
            options = {"task": run.ticket.task, "start": run.ticket.start}
            self._vector.send(slot, Reset(seed=run.ticket.world_seed, options=options))

    def _wait_s(self, num_undecided: int, num_running: int, oldest_s: float) -> float:
        """How long to wait for the next outcome; 0 if the policy is to act now."""
        if not num_undecided:
            return READY_S
        if num_undecided >= min(self.max_act_rows, num_running):
            return 0.0
        return max(0.0, oldest_s + self.batch_wait_s - time.monotonic())

    def _take(self, slot: int, waiting: list[_Attempt], shared: _Shared) -> _Attempt | None:
        """The next ticket for a worker: of this process's own, or else one that another process has not begun."""
        elsewhere = [name for index, tasks in enumerate(self._loaded) if index != slot for name in tasks]
        while queue := waiting or shared.others:
            index = choose([run.ticket.task for run in queue], self._loaded[slot], elsewhere)
            run = queue.pop(index if self.task_affinity else 0)
            if run.attempt > 1 or shared.claim(run.ticket):
                return run
        return None

    def _note_task(self, slot: int, task: str) -> None:
        loaded = self._loaded[slot]
        self.num_loads += task not in loaded
        loaded[task] = None
        loaded.move_to_end(task)
        while len(loaded) > max(self.task_affinity, 1):
            loaded.popitem(last=False)

    def _failed(self, run: _Attempt, failure: WorkerFailure, waiting: list[_Attempt]) -> Iterator[Rollout]:
        """Run a ticket again from its start, or give it up."""
        ticket = run.ticket
        logger.warning("ticket %d, attempt %d of %d: %s", ticket.number, run.attempt, self.max_attempts, failure)
        if run.attempt < self.max_attempts:
            waiting.insert(0, _Attempt(ticket=ticket, attempt=run.attempt + 1, rng=_generator(ticket)))
            return
        reason = str(failure).partition("\n")[0]
        yield Rollout(ticket=ticket, episode=None, failure=reason, attempts=run.attempt)

    def _advance(self, run: _Attempt, outcome: Outcome) -> bool:
        """Apply an outcome of the world; False if the episode is finished."""
        if isinstance(outcome, Observed):
            run.info, run.observation = _info(run.ticket, outcome), outcome.observation
            return True
        assert isinstance(outcome, Stepped)
        assert run.decision is not None
        run.num_steps += len(outcome)
        run.num_clipped += int(run.decision.clipped[: len(outcome)].sum())
        run.success = bool(outcome.success[-1])
        cut = self.max_steps is not None and run.num_steps >= self.max_steps
        run.steps.append(block_step(run.observation, run.decision, outcome, cut=cut))
        run.observation = outcome.observation
        return not run.steps[-1].last

    def _decide(self, runs: Mapping[int, _Attempt], policy: BlockPolicy, sampling: Sampling, spec: StepSpec) -> None:
        rows = list(runs.values())
        observation = stacked([run.observation for run in rows], spec.observation)
        instructions = [run.info.instruction or "" for run in rows]
        rngs, num_steps = [run.rng for run in rows], policy.block_steps
        if self._rtc is None:
            acted = policy.act(observation, instructions, rngs=rngs, sampling=sampling)
        else:
            continuation = Continuation(policy, self._rtc)
            num_steps = continuation.n_action_steps
            acted = continuation.act(
                observation,
                instructions,
                [None if run.decision is None else run.decision.action for run in rows],
                used=num_steps,
                delay=self._rtc.inference_delay or 0,
                rngs=rngs,
                sampling=sampling,
            )
        found = decisions(acted, len(rows), spec, clip=self.clip_actions)
        for (slot, run), decision in zip(runs.items(), found, strict=True):
            run.decision = decision
            left = num_steps if self.max_steps is None else self.max_steps - run.num_steps
            self._vector.send(slot, Steps(actions=decision.first(min(num_steps, left))))


def in_order(
    tickets: Sequence[Ticket], rollouts: Iterable[Rollout], on_result: Callable[[Rollout], None] | None = None
) -> list[Rollout]:
    """The rollouts in the order of their tickets; `on_result` gets each when it arrives."""
    found: dict[int, Rollout] = {}
    for rollout in rollouts:
        found[rollout.ticket.number] = rollout
        if on_result is not None:
            on_result(rollout)
    return [found[ticket.number] for ticket in tickets]


def check_tickets(tickets: Sequence[Ticket], suite: Suite) -> None:
    """Raise now for tickets that a worker would refuse later."""
    if len({ticket.number for ticket in tickets}) < len(tickets):
        raise ConfigError("tickets: expected different numbers; take them from one plan")
    for task, start in {(ticket.task, ticket.start) for ticket in tickets}:
        suite.split_of(task, start)


def choose(tasks: Sequence[str], loaded: Collection[str], others: Sequence[str]) -> int:
    """The index of the waiting task that a worker takes: the first that it has loaded, or else the one that the fewest
    other workers have loaded."""
    for index, task in enumerate(tasks):
        if task in loaded:
            return index
    return min(range(len(tasks)), key=lambda index: (others.count(tasks[index]), index))


def _first_attempt(ticket: Ticket) -> _Attempt:
    return _Attempt(ticket=ticket, attempt=1, rng=_generator(ticket))


def _generator(ticket: Ticket) -> np.random.Generator:
    return np.random.default_rng([ticket.seed, _SAMPLING_STREAM])


def _info(ticket: Ticket, observed: Observed) -> EpisodeInfo:
    return EpisodeInfo(
        task=ticket.task,
        instruction=observed.info["instruction"],
        init_state=ticket.start,
        seed=ticket.world_seed,
        group=str(ticket.group),
        split=observed.info["split"],
        kind="practice",
        labels={"ticket": str(ticket.number), "iteration": str(ticket.iteration), "policy_seed": str(ticket.seed)},
    )


def _bootstrap(runs: Sequence[_Attempt], policy: BlockPolicy, sampling: Sampling, spec: StepSpec) -> None:
    """Store the policy's value of the last observation of each truncated episode. Nothing is sampled."""
    acted = policy.act(
        stacked([run.observation for run in runs], spec.observation),
        [run.info.instruction or "" for run in runs],
        rngs=[run.rng for run in runs],
        sampling=replace(sampling, greedy=True),
    )
    for run, decision in zip(runs, decisions(acted, len(runs), spec, clip=True), strict=True):
        last = run.steps[-1]
        extras: AnyTree = last.extras
        extras = {**extras, "next_value": decision.value}
        run.steps[-1] = replace(last, extras=extras)


def _rollout(run: _Attempt, spec: StepSpec) -> Rollout:
    labels = {**run.info.labels, **({CLIPPED: str(run.num_clipped)} if run.num_clipped else {})}
    info = replace(run.info, success=run.success, labels=labels)
    episode = Episode.from_steps(spec, run.steps, run.observation, info)
    return Rollout(ticket=run.ticket, episode=episode, failure=None, attempts=run.attempt)
