"""Worker: one world in a process of its own, replaced when it fails; every command ends in time in one outcome.

| loop | takes from | blocks on | woken by |
|---|---|---|---|
| `call`, in the caller | the channel | the answer, or its deadline | the worker; each TICK_S, to look after it |
| the worker's own process (process.py) | the channel | the next request; the world | `begin` |

`call` is for one worker. Who has many (vector.py) calls `begin`, then `poll` whenever the channel is readable and every
TICK_S; neither blocks. A worker belongs to one thread at a time.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from understudy.core import SpecError, StepSpec
from understudy.core.closeable import Closeable
from understudy.envs.suite import Suite
from understudy.envs.workers.channel import ChannelClosed, ChannelGarbage, ChannelStuck
from understudy.envs.workers.child import WorldChild
from understudy.envs.workers.outcomes import (
    Answer,
    AskExpert,
    Command,
    Observe,
    Outcome,
    Reset,
    Stepped,
    Steps,
    WorkerDied,
    WorkerFailure,
    WorkerGarbage,
    WorkerHung,
    WorkerRaised,
    WorkerTooLarge,
)
from understudy.envs.workers.protocol import WorkerProtocol, check_reset
from understudy.envs.world import WorldError
from understudy.envs.world_factory import WorldFactory
from understudy.processes.child import StartError

logger = logging.getLogger(__name__)

TICK_S = 0.05  # how often a worker is looked after
RENEW_SHARE = 0.8  # of max_rss_bytes: a worker above this is replaced at the next reset, when it costs no episode
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 10.0  # before a start that follows several failures
_SEND_S = 5.0

State: TypeAlias = Literal["down", "starting", "idle", "busy", "hung", "closed"]


@dataclass(frozen=True, kw_only=True)
class Limits:
    """How long each call may take, and how large a worker may become. Times are of the monotonic clock."""

    start_s: float = 120.0  # importing and building the world
    reset_s: float = 60.0
    step_s: float = 20.0  # for each action of a block, and for looking
    close_s: float = 2.0  # then it is killed
    stack_s: float = 0.5  # for a hung worker to say where it is
    max_rss_bytes: int | None = None  # Linux only
    block_steps: int = 64  # the most actions in one round trip
    log_bytes: int = 2**20  # of what it prints, the end is kept

    def __post_init__(self) -> None:
        for name in ("start_s", "reset_s", "step_s", "close_s", "stack_s", "block_steps", "log_bytes"):
            if not getattr(self, name) > 0:
                raise WorldError(f"limits/{name}: expected more than 0, got {getattr(self, name)}; raise it")
        if self.max_rss_bytes is not None and not self.max_rss_bytes > 0:
            raise WorldError(f"limits/max_rss_bytes: expected more than 0 or None, got {self.max_rss_bytes}")


class Worker(Closeable):
    """Keeps a process for one world. `step_spec` and `suite` are known once it has started for the first time."""

    def __init__(
        self,
        source: WorldFactory,
        *,
        limits: Limits | None = None,
        name: str | None = None,
        watch: Callable[[int, bool], None] | None = None,
    ):
        self.source = source
        self.limits = limits or Limits()
        self.name = name or source.label
        self.state: State = "down"
        self.num_starts = 0
        self.num_failures = 0
        self.num_renewals = 0  # because of memory, between two episodes
        self.launch_at = 0.0  # not before this moment
        self._dialogue: WorkerProtocol | None = None
        self._watch = watch  # told of each channel: its descriptor, and whether it opens or closes
        self._child: WorldChild | None = None
        self._command: Command | None = None
        self._lost: WorkerFailure | None = None  # what happened when there was no command to tell of it
        self._episode: Literal["none", "running", "ended"] = "none"
        self._failures_in_a_row = 0
        self._request = 0
        self._deadline = self._limit_s = self._asked_at = 0.0
        self._next_look_at = 0.0
        self._stack_place = 0
        self._stack = ""

    @property
    def step_spec(self) -> StepSpec:
        return self._known.step_spec

    @property
    def suite(self) -> Suite:
        return self._known.suite

    @property
    def has_expert(self) -> bool:
        return self._known.has_expert

    @property
    def versions(self) -> dict[str, str]:
        return dict(self._known.versions)

    @property
    def _known(self) -> WorkerProtocol:
        if self._dialogue is None:
            raise WorldError(f"{self.name}: its spec is not known before it has started; call start or reset first")
        return self._dialogue

    @property
    def pid(self) -> int | None:
        return self._child.pid if self._child else None

    @property
    def pending(self) -> bool:
        """Whether a command has no outcome yet."""
        return self._command is not None

    @property
    def failure(self) -> WorkerFailure | None:
        """The last failure that no command was told of."""
        return self._lost

    # --- one worker, blocking ---

    def start(self) -> None:
        """Start the process if it is down, and wait until its world is built; raises the failure if it is not."""
        if self.state == "down":
            self._lost = None
            self.launch()
        while self.state == "starting" or self.state == "hung":
            self._sleep()
            self.poll()
        if self.state == "down" and self._lost:
            raise self._lost

    def restart(self) -> None:
        """Replace the process now; the episode is over."""
        self._drop()
        self.start()

    def call(self, command: Command) -> Answer:
        """The answer to a command, or the failure, raised. Starts the process if it is down and this is a Reset."""
        self.begin(command)
        try:
            if self.state == "busy":
                self._sleep()  # before `poll`, which would find nothing yet
            while (outcome := self.poll()) is None:
                if self.state == "down" and time.monotonic() >= self.launch_at:
                    self.launch()
                self._sleep()
        except BaseException:  # an interrupt: nobody will take this answer
            self._command = None
            self._drop()
            raise
        if isinstance(outcome, WorkerFailure):
            raise outcome
        return outcome

    def _sleep(self) -> None:
        if self._child is None:
            time.sleep(max(0.0, min(TICK_S, self.launch_at - time.monotonic())))
        else:
            self._child.channel.wait(TICK_S)

    # --- for those that have many ---

    def launch(self) -> None:
        """Start a process that builds the world; returns at once."""
        if self.state != "down":
            raise WorldError(f"{self.name}: expected no process, got one that is {self.state}; call restart")
        self.num_starts += 1
        try:
            self._child = WorldChild(self.source, block_steps=self.limits.block_steps)
        except StartError as error:
            self._fail(WorkerRaised(name=self.name, doing="start", error=str(error), traceback=""), untold=True)
            return
        self._enter("starting", self.limits.start_s)
        if self._watch:
            self._watch(self._child.channel.fileno(), True)

    def begin(self, command: Command) -> None:
        """Send a command, or keep it until the process is up; `poll` gives its outcome."""
        if self.state == "closed":
            raise WorldError(f"{self.name}: it is closed; make a new one")
        if self._command is not None:
            raise WorldError(f"{self.name}: a command is on its way; take its outcome before the next")
        if self._child is not None and self.state == "idle":
            self._look_after(self._child, time.monotonic())
        if isinstance(command, Reset):
            check_reset(command, self._dialogue.suite if self._dialogue else None)
            self._lost = None
            self._renew_if_needed()
        elif self._lost is None and (
            self._episode == "none" or (self._episode == "ended" and _verb(command) == "step")
        ):
            raise WorldError(f"{self.name}: there is no episode, or it has ended; reset before {_verb(command)}")
        if isinstance(command, Steps):
            command = self._known.checked(command)
        if isinstance(command, AskExpert) and not self._known.has_expert:
            raise WorldError(f"{self.name}: it has no scripted expert; act with a device or a policy")
        self._command = command
        if self.state == "idle" and self._lost is None:  # else its outcome is known, and the new process is not to hear
            self._post()

    def poll(self) -> Outcome | None:
        """The outcome of the command if there is one by now; looks after the process. Never blocks for long."""
        if self._lost is not None and self._command is not None:  # it failed between two commands
            self._command, failure, self._lost = None, self._lost, None
            return failure
        child = self._child
        if child is None:
            return None
        if self.state == "hung":
            return self._bury_hung(child)
        try:
            message = child.channel.take()
            if message is not None:
                return self._take(message)
        except ChannelClosed:
            return self._fail(self._death())
        except ChannelGarbage as error:
            return self._fail(self._garbage(f"expected a message, got {error}"))
        return self._look_after(child, time.monotonic())

    def _look_after(self, child: WorldChild, now: float) -> Outcome | None:
        """What a silent process needs, every TICK_S: to be buried, asked for its stack, killed, or left alone."""
        if now < self._next_look_at:
            return None
        self._next_look_at = now + TICK_S
        if child.exited():
            return self._fail(self._death())
        child.trim_log(self.limits.log_bytes)
        if self.state in ("starting", "busy") and now >= self._deadline:
            self._stack_place = child.request_stack()
            self.state, self._deadline = "hung", now + self.limits.stack_s
        elif self.state == "idle" and self._episode != "running":
            pass  # if it is too large, the next reset will replace it
        elif (size := self._oversize()) is not None:
            return self._fail(size)
        return None

    def _bury_hung(self, child: WorldChild) -> Outcome | None:
        """Kill it once it has said where it is, or will not; an answer that comes now is too late."""
        try:
            child.channel.take()
            ended = child.exited()
        except (ChannelClosed, ChannelGarbage):
            ended = True
        stack = child.stack(self._stack_place)
        whole = stack and stack == self._stack  # it is written line by line
        self._stack = stack
        if not whole and not ended and time.monotonic() < self._deadline:
            return None
        stack = stack or child.log_tail()
        return self._fail(WorkerHung(name=self.name, doing=self._doing, limit_s=self._limit_s, stack=stack))

    def close(self, *, wait: bool = True) -> None:
        """Let the world close itself, then end the process; kills it if it takes longer than `close_s`.

        Without `wait` it only asks; call again to end it.
        """
        child = self._child
        if child is not None and self.state in ("idle", "closed"):
            try:
                if self.state == "idle":
                    child.channel.send({"id": self._request + 1, "do": "close", "look": False}, timeout_s=0.1)
                    self._asked_at = time.monotonic()
                self.state = "closed"
                if not wait:
                    return
                child.wait_exited(max(0.0, self._asked_at + self.limits.close_s - time.monotonic()))
            except (ChannelClosed, ChannelStuck):
                pass
        self._drop()
        self._command = None
        self.state = "closed"

    # --- requests and answers ---

    def _post(self) -> None:
        """Send the command to an idle process; should that fail, `poll` will find out why."""
        assert self._child is not None
        assert self._command is not None
        command = self._command
        self._request += 1
        if isinstance(command, Reset):
            limit_s = self.limits.reset_s
        else:
            num_steps = len(command.actions) if isinstance(command, Steps) else 1
            limit_s = self.limits.step_s * num_steps
        self._enter("busy", limit_s)
        try:
            message = self._known.request(self._request, command, self._child.arena)
            self._child.channel.send(message, timeout_s=_SEND_S)
        except ChannelClosed:
            pass
        except ChannelStuck:
            self._deadline = 0.0

    def _take(self, message: dict[str, Any]) -> Outcome | None:
        try:
            if message["id"] != (0 if self.state == "starting" else self._request) or self.state == "idle":
                raise ValueError(f"an answer to request {message['id']}, which nobody sent")
            if "raised" in message:
                return self._fail(
                    WorkerRaised(
                        name=self.name, doing=self._doing, error=message["raised"], traceback=message["traceback"]
                    )
                )
            if "nonsense" in message:
                raise ValueError(message["nonsense"])
            if self.state == "starting":
                self._take_hello(message["hello"])
                return None
            assert self._child is not None
            assert self._command is not None
            outcome = self._known.answer(self._request, self._command, message, self._child.arena)
        except (KeyError, TypeError, ValueError, AttributeError, WorldError) as error:  # SpecError is a ValueError
            problem = str(error) if isinstance(error, ValueError | WorldError) else f"{type(error).__name__}: {error}"
            return self._fail(self._garbage(problem))
        if isinstance(outcome, Stepped):
            self._episode = "ended" if outcome.last else "running"
        elif isinstance(self._command, Reset):
            self._episode = "running"
        self.state = "idle"
        self._command = None
        self._failures_in_a_row = 0
        return outcome

    def _take_hello(self, hello: dict[str, Any]) -> None:
        assert self._child is not None
        dialogue = WorkerProtocol.of(hello, self.limits.block_steps)
        if self._dialogue is not None and dialogue.step_spec != self._dialogue.step_spec:
            raise SpecError("step_spec: expected the same world at each start, got another; build it from its options")
        self._dialogue = dialogue
        try:
            self._child.open_shared_memory(dialogue.step_spec, self.limits.block_steps)
        except (ChannelClosed, ChannelStuck):
            return  # `poll` will find out why
        self.state = "idle"
        if isinstance(self._command, Reset):
            check_reset(self._command, dialogue.suite)
            self._post()

    # --- failures ---

    @property
    def _doing(self) -> str:
        if self._child is not None and not hasattr(self._child, "arena"):
            return "start"
        return "nothing" if self._command is None else _verb(self._command)

    def _death(self) -> WorkerFailure:
        assert self._child is not None
        exit_code = self._child.reap()
        if exit_code is None:
            return self._garbage("it closed its channel and goes on running")
        return WorkerDied(name=self.name, doing=self._doing, exit_code=exit_code, log=self._child.log_tail())

    def _garbage(self, problem: str) -> WorkerGarbage:
        assert self._child is not None
        return WorkerGarbage(name=self.name, doing=self._doing, problem=problem, log=self._child.log_tail())

    def _oversize(self) -> WorkerTooLarge | None:
        limit = self.limits.max_rss_bytes
        if limit is None or self._child is None:
            return None
        size = self._child.rss_bytes()
        if size <= limit:
            return None
        return WorkerTooLarge(name=self.name, doing=self._doing, rss_bytes=size, limit_bytes=limit)

    def _renew_if_needed(self) -> None:
        """Replace a process that is near its limit, or has ended unseen; between two episodes that costs none."""
        child, limit = self._child, self.limits.max_rss_bytes
        if child is None or self.state != "idle":
            return
        if child.exited():
            self._fail(self._death(), untold=True)
            self._lost = None
        elif limit is not None and child.rss_bytes() > RENEW_SHARE * limit:
            self.num_renewals += 1
            self._drop()

    def _fail(self, failure: WorkerFailure, *, untold: bool = False) -> WorkerFailure | None:
        """End this life of the worker; the failure is the outcome of the command, or waits for one to be told of it."""
        self.num_failures += 1
        self._failures_in_a_row += 1
        self._drop()
        self.launch_at = time.monotonic() + _pause_s(self._failures_in_a_row)
        if self._command is None or untold:
            logger.warning("%s", failure)
            self._lost = failure
            return None
        self._command = None
        return failure

    def _drop(self) -> None:
        if self._child is not None:
            if self._watch:
                self._watch(self._child.channel.fileno(), False)
            self._child.close()
        self._child = None
        self._episode = "none"
        if self.state != "closed":
            self.state = "down"

    def _enter(self, state: State, limit_s: float) -> None:
        self.state, self._limit_s, self._deadline = state, limit_s, time.monotonic() + limit_s


def _pause_s(failures_in_a_row: int) -> float:
    """None after the first failure, then longer each time."""
    if failures_in_a_row <= 1:
        return 0.0
    return float(min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2 ** min(failures_in_a_row - 2, 20)))


def _verb(command: Command) -> str:
    return {Reset: "reset", Steps: "step", Observe: "observe", AskExpert: "expert_action"}[type(command)]
