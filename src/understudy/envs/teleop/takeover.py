"""Takeover: an operator's action replaces the policy's while the device is active.

The step is then marked as human, and the policy's action is kept as its proposal. While the device is not active, the
policy's action is executed.

    takeover = Takeover(device, operator="ada")
    takeover.begin()                                  # with each episode
    choice = takeover.choose(policy_action)
    observation, reward, terminated, truncated, info = world.step(choice.action)
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from understudy.core import Source, Tree, UnderstudyError
from understudy.envs.world import World


class TakeoverError(UnderstudyError):
    """Nobody chose an action: the device is not active, and there is no policy."""


@dataclass(frozen=True, kw_only=True)
class Reading:
    """The current input of a device. An action means that the operator is in control."""

    action: Tree | None = None
    reason: str = ""  # why the operator took over, if known
    since_s: float | None = None  # when the operator made this input, on the monotonic clock; None: just now
    verdict: bool | None = None  # the operator ends the episode as a success or a failure
    discard: bool = False  # the operator ends the episode and wants to record it again


class Device(Protocol):
    """An input device of an operator, or a script that replaces one."""

    @property
    def source(self) -> Source:
        """The source that its steps are marked with."""
        ...

    def begin(self) -> None:
        """An episode begins."""

    def read(self) -> Reading:
        """The current input; never blocks."""
        ...

    def close(self) -> None: ...


@dataclass(frozen=True, kw_only=True)
class Choice:
    """The action to execute, and who chose it."""

    action: Tree
    source: Source
    proposal: Tree | None  # the policy's action, whether it is executed or not
    began: bool = False  # whether this is the first step of a takeover
    verdict: bool | None = None  # the operator ends the episode with this step, as a success or a failure
    discard: bool = False  # the operator ends the episode before this step and wants to record it again


@dataclass(frozen=True, kw_only=True)
class Summary:
    """The takeovers of one episode. `latency_s` is the longest time from an operator's input to its execution."""

    count: int = 0
    num_steps: int = 0
    reasons: tuple[str, ...] = ()
    latency_s: float = 0.0

    def labels(self) -> dict[str, str]:
        """Labels for the episode; none if there was no takeover."""
        if not self.count:
            return {}
        found = {
            "intervention_count": str(self.count),
            "intervention_steps": str(self.num_steps),
            "takeover_latency_ms": f"{self.latency_s * 1e3:.1f}",
        }
        if self.reasons:
            found["takeover_reasons"] = "; ".join(dict.fromkeys(self.reasons))
        return found


class Takeover:
    """Chooses between policy and device at each step, and counts takeovers. Not thread-safe."""

    def __init__(self, device: Device, *, operator: str | None = None):
        self.device = device
        self.operator = operator
        self._active = False
        self._first: Reading | None = None  # read by `wait`, before the first step
        self._summary = Summary()

    @property
    def summary(self) -> Summary:
        """The takeovers since `begin`."""
        return self._summary

    def begin(self) -> None:
        """An episode begins; a takeover that lasts from the previous one counts as a new one."""
        self._active = False
        self._first = None
        self._summary = Summary()
        self.device.begin()

    def wait(self, meanwhile: Callable[[], None]) -> None:
        """Wait until the device is active, for an episode that begins with the operator's first input."""
        while self._first is None:
            reading = self.device.read()
            if reading.action is not None:
                self._first = reading
            else:
                meanwhile()

    def choose(self, proposal: Tree | None) -> Choice:
        """The action to execute; `proposal` is the policy's, None if there is no policy."""
        reading, self._first = self._first or self.device.read(), None
        if reading.action is None:
            self._active = False
            if proposal is not None:
                return Choice(action=proposal, source=Source.POLICY, proposal=proposal, verdict=reading.verdict)
            raise TakeoverError(
                "action: expected one from the device or from a policy, got none; use a device that acts to the end"
            )
        began, self._active = not self._active, True
        self._count(reading, began)
        return Choice(
            action=reading.action,
            source=self.device.source,
            proposal=proposal,
            began=began,
            verdict=reading.verdict,
            discard=reading.discard,
        )

    def _count(self, reading: Reading, began: bool) -> None:
        before = self._summary
        latency_s = 0.0 if reading.since_s is None else max(time.monotonic() - reading.since_s, 0.0)
        self._summary = Summary(
            count=before.count + began,
            num_steps=before.num_steps + 1,
            reasons=(*before.reasons, reading.reason) if began and reading.reason else before.reasons,
            latency_s=max(before.latency_s, latency_s),
        )


class TakeoverWorld:
    """A world whose `step` executes the device's action during a takeover, like HIL-SERL's intervention wrapper.

    `info` has `intervene_action` when the device acted, and always `source` and `proposal`; at the end of an episode
    also `intervention_count` and `intervention_steps`.
    """

    def __init__(self, world: World, takeover: Takeover):
        self.world = world
        self.takeover = takeover
        self.step_spec = world.step_spec
        self.suite = world.suite

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Tree, dict[str, Any]]:
        self.takeover.begin()
        return self.world.reset(seed=seed, options=options)

    def step(self, action: Tree) -> tuple[Tree, float, bool, bool, dict[str, Any]]:
        return step_with_takeover(self.world.step, self.takeover, action)

    def close(self) -> None:
        self.takeover.device.close()
        self.world.close()


def step_with_takeover(step: Callable[[Tree], tuple[Any, ...]], takeover: Takeover, action: Tree) -> tuple[Any, ...]:
    """Execute the device's action during a takeover, else the given one; the info says which, as TakeoverWorld does."""
    choice = takeover.choose(action)
    observation, reward, terminated, truncated, info = step(choice.action)
    info = {**info, "source": choice.source, "proposal": choice.proposal}
    if choice.source != Source.POLICY:
        info["intervene_action"] = choice.action
    if terminated or truncated:
        summary = takeover.summary
        info |= {"intervention_count": summary.count, "intervention_steps": summary.num_steps}
    return observation, reward, terminated, truncated, info


# ---- scripted devices


class AlwaysScript:
    """A script that drives every step: a scripted expert that records demonstrations."""

    source = Source.SCRIPT

    def __init__(self, act: Callable[[], Tree]):
        self._act = act

    def begin(self) -> None:
        """Nothing to remember."""

    def read(self) -> Reading:
        return Reading(action=self._act())

    def close(self) -> None:
        """Nothing to release."""


class ScriptedHuman:
    """A scripted operator: takes over when progress stalls, and releases after some steps.

    `progress` returns a number that rises during the task. When its maximum has not risen by `margin` for
    `patience_steps`, the script drives for `burst_steps` (None: to the end of the episode).
    """

    source = Source.HUMAN

    def __init__(
        self,
        act: Callable[[], Tree],
        progress: Callable[[], float],
        *,
        patience_steps: int = 20,
        burst_steps: int | None = 10,
        margin: float = 1e-3,
    ):
        if patience_steps < 1 or (burst_steps is not None and burst_steps < 1):
            raise TakeoverError(
                f"scripted human: expected patience_steps and burst_steps from 1, got {patience_steps}, {burst_steps}"
            )
        self._act = act
        self._progress = progress
        self._patience_steps = patience_steps
        self._burst_steps = burst_steps
        self._margin = margin
        self._best = float("-inf")
        self._stalled = 0  # steps since the best was reached
        self._left: int | None = 0  # remaining steps of the takeover; None: all

    def begin(self) -> None:
        self._best = float("-inf")
        self._stalled = 0
        self._left = 0

    def read(self) -> Reading:
        progress = self._progress()
        if progress > self._best + self._margin:
            self._best, self._stalled = progress, 0
        else:
            self._stalled += 1
        if self._left == 0 and self._stalled >= self._patience_steps:
            self._left = self._burst_steps
        if self._left == 0:
            return Reading()
        if self._left is not None:
            self._left -= 1
            if self._left == 0:
                self._stalled = 0  # the policy acts for `patience_steps` before the next takeover
        return Reading(action=self._act(), reason=f"no progress for {self._patience_steps} steps")

    def close(self) -> None:
        """Nothing to release."""
