"""Worker: one world in a process that is restarted after it crashes or hangs; every command has one outcome, in time.

| loop | takes from | blocks on | woken by |
|---|---|---|---|
| `call`, in the caller | the channel | the answer, or its deadline | the worker; every TICK_S, to check it |
| the worker's own process (child_main.py) | the channel | the next request; the world | `begin` |

`call` is for one worker. For many (vector.py), call `begin`, then `poll` whenever the channel is readable and every
TICK_S; neither blocks. Only one thread at a time may use a worker.
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
from understudy.envs.workers.protocol import WorkerProtocol, checked_reset
from understudy.envs.world import WorldError
from understudy.envs.world_factory import WorldFactory
from understudy.processes.child import StartError

logger = logging.getLogger(__name__)

TICK_S = 0.05  # how often a worker is checked
RENEW_SHARE = 0.8  # of max_rss_bytes: above this a worker is replaced at the next reset, where no episode is lost
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 10.0  # before a start after several failures in a row
_SEND_S = 5.0

State: TypeAlias = Literal["down", "starting", "idle", "busy", "hung", "closed"]


@dataclass(frozen=True, kw_only=True)
class Limits:
    """How long each call may take, in seconds, and how much memory a worker may use."""

    start_s: float = 120.0  # importing and building the world
    reset_s: float = 60.0
    step_s: float = 20.0  # for each action of a block, observation included
    close_s: float = 2.0  # after that the process is killed
    stack_s: float = 0.5  # for a hung worker to write its stack
    max_rss_bytes: int | None = None  # Linux only
    block_steps: int = 64  # the most actions in one round trip
    log_bytes: int = 2**20  # of the end of its output that are kept

    def __post_init__(self) -> None:
        for name in ("start_s", "reset_s", "step_s", "close_s", "stack_s", "block_steps", "log_bytes"):
            if not getattr(self, name) > 0:
                raise WorldError(f"limits/{name}: expected more than 0, got {getattr(self, name)}; raise it")
        if self.max_rss_bytes is not None and not self.max_rss_bytes > 0:
            raise WorldError(f"limits/max_rss_bytes: expected more than 0 or None, got {self.max_rss_bytes}")


class Worker(Closeable):
    """Runs one world in a process. `step_spec` and `suite` are known after the first start."""

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
        self.num_renewals = 0  # replacements between two episodes because of memory
        self.launch_at = 0.0  # earliest time of the next start, on the monotonic clock
        self._protocol: WorkerProtocol | None = None
        self._watch = watch  # called for each channel with its descriptor and whether it opens (or closes)
        self._child: WorldChild | None = None
        self._command: Command | None = None
        self._unreported: WorkerFailure | None = None  # a failure that is not the outcome of a command yet
        self._episode: Literal["none", "running", "ended"] = "none"
        self._failures_in_a_row = 0
        self._request = 0
        self._deadline = self._limit_s = self._close_sent_at = 0.0
        self._next_check_at = 0.0
        self._stack_offset = 0
        self._stack = ""

    @property
    def step_spec(self) -> StepSpec:
        return self._started_protocol.step_spec

    @property
    def suite(self) -> Suite:
        return self._started_protocol.suite

    @property
    def has_expert(self) -> bool:
        return self._started_protocol.has_expert

    @property
    def deterministic(self) -> bool:
        return self._started_protocol.deterministic

    @property
    def simulated(self) -> bool:
        return self._started_protocol.simulated

    @property
    def hz(self) -> float | None:
        return self._started_protocol.hz

    @property
    def versions(self) -> dict[str, str]:
        return dict(self._started_protocol.versions)

    @property
    def _started_protocol(self) -> WorkerProtocol:
        if self._protocol is None:
            raise WorldError(f"{self.name}: its spec is known only after the first start; call start or reset first")
        return self._protocol

    @property
    def pid(self) -> int | None:
        return self._child.pid if self._child else None

    @property
    def in_episode(self) -> bool:
        """Whether an episode is running."""
        return self._episode == "running"

    @property
    def pending(self) -> bool:
        """Whether a command has no outcome yet."""
        return self._command is not None

    @property
    def failure(self) -> WorkerFailure | None:
        """The last failure that is not the outcome of a command yet."""
        return self._unreported

    # --- one worker, blocking ---

    def start(self) -> None:
        """Start the process if it is down, and wait until its world is built; raises the failure if that fails."""
        if self.state == "down":
            self._unreported = None
            self.launch()
        while self.state == "starting" or self.state == "hung":
            self._sleep()
            self.poll()
        if self.state == "down" and self._unreported:
            raise self._unreported

    def restart(self) -> None:
        """Replace the process now, which ends the episode."""
        self._end_process()
        self.start()

    def call(self, command: Command) -> Answer:
        """Execute a command and return its answer, or raise its failure. A Reset starts the process if it is down."""
        self.begin(command)
        try:
            if self.state == "busy":
                self._sleep()  # before `poll`, which would find nothing yet
            while (outcome := self.poll()) is None:
                if self.state == "down" and time.monotonic() >= self.launch_at:
                    self.launch()
                self._sleep()
        except BaseException:  # an interrupt: nobody will read this answer
            self._command = None
            self._end_process()
            raise
        if isinstance(outcome, WorkerFailure):
            raise outcome
        return outcome

    def _sleep(self) -> None:
        if self._child is None:
            time.sleep(max(0.0, min(TICK_S, self.launch_at - time.monotonic())))
        else:
            self._child.channel.wait(TICK_S)

    # --- many workers, without blocking ---

    def launch(self) -> None:
        """Start a process that builds the world; returns at once."""
        if self.state != "down":
            raise WorldError(f"{self.name}: expected no process, got one that is {self.state}; call restart")
        self.num_starts += 1
        try:
            self._child = WorldChild(self.source, block_steps=self.limits.block_steps)
        except StartError as error:
            self._fail(WorkerRaised(name=self.name, doing="start", error=str(error), traceback=""), unreported=True)
            return
        self._enter_state("starting", self.limits.start_s)
        if self._watch:
            self._watch(self._child.channel.fileno(), True)

    def begin(self, command: Command) -> None:
        """Send a command, or keep it until the process has started; `poll` returns its outcome."""
        if self.state == "closed":
            raise WorldError(f"{self.name}: it is closed; make a new one")
        if self._command is not None:
            raise WorldError(f"{self.name}: a command is pending; poll its outcome before the next")
        if self._child is not None and self.state == "idle":
            self._check_process(self._child, time.monotonic())
        if isinstance(command, Reset):
            command = checked_reset(command, self._protocol.suite if self._protocol else None)
            self._unreported = None
            self._replace_if_needed()
        elif self._unreported is None and (
            self._episode == "none" or (self._episode == "ended" and _verb(command) == "step")
        ):
            raise WorldError(f"{self.name}: there is no episode, or it has ended; reset before {_verb(command)}")
        if isinstance(command, Steps):
            command = self._started_protocol.checked(command)
        if isinstance(command, AskExpert) and not self._started_protocol.has_expert:
            raise WorldError(f"{self.name}: it has no scripted expert; act with a device or a policy")
        self._command = command
        # After an unreported failure, that is the command's outcome, and the new process must not get the command.
        if self.state == "idle" and self._unreported is None:
            self._send_command()

    def poll(self) -> Outcome | None:
        """The outcome of the command, or None if there is none yet. Also checks the process. Never blocks for long."""
        if self._unreported is not None and self._command is not None:  # it failed between two commands
            self._command, failure, self._unreported = None, self._unreported, None
            return failure
        child = self._child
        if child is None:
            return None
        if self.state == "hung":
            return self._fail_hung(child)
        try:
            message = child.channel.take()
            if message is not None:
                return self._handle_message(message)
        except ChannelClosed:
            return self._fail(self._died_failure())
        except ChannelGarbage as error:
            return self._fail(self._garbage_failure(f"expected a message, got {error}"))
        return self._check_process(child, time.monotonic())

    def _check_process(self, child: WorldChild, now: float) -> Outcome | None:
        """Every TICK_S: notice that the process has ended, is over its deadline, or uses too much memory."""
        if now < self._next_check_at:
            return None
        self._next_check_at = now + TICK_S
        if child.exited():
            return self._fail(self._died_failure())
        child.trim_log(self.limits.log_bytes)
        if self.state in ("starting", "busy") and now >= self._deadline:
            self._stack_offset = child.request_stack()
            self.state, self._deadline = "hung", now + self.limits.stack_s
        elif self.state == "idle" and self._episode != "running":
            pass  # if it is too large, the next reset will replace it
        elif (size := self._too_large_failure()) is not None:
            return self._fail(size)
        return None

    def _fail_hung(self, child: WorldChild) -> Outcome | None:
        """Fail a hung process once its stack is complete or `stack_s` has passed; late answers are ignored."""
        try:
            child.channel.take()
            ended = child.exited()
        except (ChannelClosed, ChannelGarbage):
            ended = True
        stack = child.stack(self._stack_offset)
        whole = stack and stack == self._stack  # it is written line by line, so wait until it stops growing
        self._stack = stack
        if not whole and not ended and time.monotonic() < self._deadline:
            return None
        stack = stack or child.log_tail()
        return self._fail(WorkerHung(name=self.name, doing=self._doing, limit_s=self._limit_s, stack=stack))

    def close(self, *, wait: bool = True) -> None:
        """Close the world, then end the process; kills it if that takes longer than `close_s`.

        With `wait=False` it only sends the request; call again to end the process.
        """
        child = self._child
        if child is not None and self.state in ("idle", "closed"):
            try:
                if self.state == "idle":
                    child.channel.send({"id": self._request + 1, "do": "close", "observe": False}, timeout_s=0.1)
                    self._close_sent_at = time.monotonic()
                self.state = "closed"
                if not wait:
                    return
                child.wait_exited(max(0.0, self._close_sent_at + self.limits.close_s - time.monotonic()))
            except (ChannelClosed, ChannelStuck):
                pass
        self._end_process()
        self._command = None
        self.state = "closed"

    # --- requests and answers ---

    def _send_command(self) -> None:
        """Send the command to an idle process; if that fails, `poll` finds out why."""
        assert self._child is not None
        assert self._command is not None
        command = self._command
        self._request += 1
        if isinstance(command, Reset):
            limit_s = self.limits.reset_s
        else:
            num_steps = len(command.actions) if isinstance(command, Steps) else 1
            limit_s = self.limits.step_s * num_steps
        self._enter_state("busy", limit_s)
        try:
            message = self._started_protocol.request(self._request, command, self._child.arrays)
            self._child.channel.send(message, timeout_s=_SEND_S)
        except ChannelClosed:
            pass
        except ChannelStuck:
            self._deadline = 0.0

    def _handle_message(self, message: dict[str, Any]) -> Outcome | None:
        try:
            if message["id"] != (0 if self.state == "starting" else self._request) or self.state == "idle":
                raise ValueError(f"an answer to request {message['id']}, which was not sent")
            if "raised" in message:
                return self._fail(
                    WorkerRaised(
                        name=self.name, doing=self._doing, error=message["raised"], traceback=message["traceback"]
                    )
                )
            if "invalid" in message:
                raise ValueError(message["invalid"])
            if self.state == "starting":
                self._handle_hello(message["hello"])
                return None
            assert self._child is not None
            assert self._command is not None
            outcome = self._started_protocol.answer(self._request, self._command, message, self._child.arrays)
        except (KeyError, TypeError, ValueError, AttributeError, WorldError) as error:  # SpecError is a ValueError
            problem = str(error) if isinstance(error, ValueError | WorldError) else f"{type(error).__name__}: {error}"
            return self._fail(self._garbage_failure(problem))
        if isinstance(outcome, Stepped):
            self._episode = "ended" if outcome.last else "running"
        elif isinstance(self._command, Reset):
            self._episode = "running"
        self.state = "idle"
        self._command = None
        self._failures_in_a_row = 0
        return outcome

    def _handle_hello(self, hello: dict[str, Any]) -> None:
        assert self._child is not None
        protocol = WorkerProtocol.of(hello, self.limits.block_steps)
        if self._protocol is not None and protocol.step_spec != self._protocol.step_spec:
            raise SpecError("step_spec: expected the same spec at each start, got another; see its factory")
        self._protocol = protocol
        try:
            self._child.open_shared_memory(protocol.step_spec, self.limits.block_steps)
        except (ChannelClosed, ChannelStuck):
            return  # `poll` finds out why
        self.state = "idle"
        if isinstance(self._command, Reset):
            self._command = checked_reset(self._command, protocol.suite)
            self._send_command()

    # --- failures ---

    @property
    def _doing(self) -> str:
        if self._child is not None and not self._child.has_started:
            return "start"
        return "nothing" if self._command is None else _verb(self._command)

    def _died_failure(self) -> WorkerFailure:
        assert self._child is not None
        exit_code = self._child.reap()
        if exit_code is None:
            return self._garbage_failure("it closed its channel and is still running")
        return WorkerDied(name=self.name, doing=self._doing, exit_code=exit_code, log=self._child.log_tail())

    def _garbage_failure(self, problem: str) -> WorkerGarbage:
        assert self._child is not None
        return WorkerGarbage(name=self.name, doing=self._doing, problem=problem, log=self._child.log_tail())

    def _too_large_failure(self) -> WorkerTooLarge | None:
        limit = self.limits.max_rss_bytes
        if limit is None or self._child is None:
            return None
        size = self._child.rss_bytes()
        if size <= limit:
            return None
        return WorkerTooLarge(name=self.name, doing=self._doing, rss_bytes=size, limit_bytes=limit)

    def _replace_if_needed(self) -> None:
        """Before a reset, replace a process that has ended or is near its memory limit; no episode is lost."""
        child, limit = self._child, self.limits.max_rss_bytes
        if child is None or self.state != "idle":
            return
        if child.exited():
            self._fail(self._died_failure(), unreported=True)
            self._unreported = None
        elif limit is not None and child.rss_bytes() > RENEW_SHARE * limit:
            self.num_renewals += 1
            self._end_process()

    def _fail(self, failure: WorkerFailure, *, unreported: bool = False) -> WorkerFailure | None:
        """End the process. The failure becomes the outcome of the pending command, or of the next one."""
        self.num_failures += 1
        self._failures_in_a_row += 1
        self._end_process()
        self.launch_at = time.monotonic() + _pause_s(self._failures_in_a_row)
        if self._command is None or unreported:
            logger.warning("%s", failure)
            self._unreported = failure
            return None
        self._command = None
        return failure

    def _end_process(self) -> None:
        if self._child is not None:
            if self._watch:
                self._watch(self._child.channel.fileno(), False)
            self._child.close()
        self._child = None
        self._episode = "none"
        if self.state != "closed":
            self.state = "down"

    def _enter_state(self, state: State, limit_s: float) -> None:
        self.state, self._limit_s, self._deadline = state, limit_s, time.monotonic() + limit_s


def _pause_s(failures_in_a_row: int) -> float:
    """Seconds to wait before a restart: none after the first failure, then longer each time."""
    if failures_in_a_row <= 1:
        return 0.0
    return float(min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2 ** min(failures_in_a_row - 2, 20)))


def _verb(command: Command) -> str:
    return {Reset: "reset", Steps: "step", Observe: "observe", AskExpert: "expert_action"}[type(command)]
