"""Takeover: a person's hands on the controls, and who chose each action.

When the device is active, its action is executed and the step is the person's; what the policy would have done is kept
beside it. When it is not, the policy acts.

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
    """What a device says now. An action means that its holder is in control."""

    action: Tree | None = None
    reason: str = ""  # why the holder took over, if that is known
    since_s: float | None = None  # when this action was made, on the monotonic clock; None: just now
    verdict: bool | None = None  # the holder ends the episode: it succeeded, or it did not


class Device(Protocol):
    """Something that a person holds, or a script in a person's place."""

    @property
    def source(self) -> Source:
        """Who its actions are by."""
        ...

    def begin(self) -> None:
        """An episode begins."""

    def read(self) -> Reading:
        """What it says now; never waits."""
        ...

    def close(self) -> None: ...


@dataclass(frozen=True, kw_only=True)
class Choice:
    """The action to execute, and how it came about."""

    action: Tree
    source: Source
    proposal: Tree | None  # what the policy would have done
    began: bool = False  # this is the first step of a takeover
    verdict: bool | None = None  # this is the last step: the person says that it succeeded, or did not


@dataclass(frozen=True, kw_only=True)
class Summary:
    """The takeovers of one episode. `latency_s` is the longest from a person's act to its execution."""

    count: int = 0
    num_steps: int = 0
    reasons: tuple[str, ...] = ()
    latency_s: float = 0.0

    def labels(self) -> dict[str, str]:
        """As labels of an episode, if there was a takeover."""
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
    """Chooses between a policy and a device, step by step, and counts. Not for several threads at once."""

    def __init__(self, device: Device, *, operator: str | None = None):
        self.device = device
        self.operator = operator
        self._active = False
        self._first: Reading | None = None  # was read before the first step
        self._summary = Summary()

    @property
    def summary(self) -> Summary:
        """The takeovers since `begin`."""
        return self._summary

    def begin(self) -> None:
        """An episode begins; a takeover that went on until now is a new one if it goes on."""
        self._active = False
        self._first = None
        self._summary = Summary()
        self.device.begin()

    def wait(self, meanwhile: Callable[[], None]) -> None:
        """Wait until the device is active, for an episode that begins with a person's first act."""
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
            action=reading.action, source=self.device.source, proposal=proposal, began=began, verdict=reading.verdict
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
    """A world in which `step` executes what the device says, for those who know HIL-SERL's intervention wrapper.

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
        choice = self.takeover.choose(action)
        observation, reward, terminated, truncated, info = self.world.step(choice.action)
        info = {**info, "source": choice.source, "proposal": choice.proposal}
        if choice.source != Source.POLICY:
            info["intervene_action"] = choice.action
        if terminated or truncated:
            summary = self.takeover.summary
            info |= {"intervention_count": summary.count, "intervention_steps": summary.num_steps}
        return observation, reward, terminated, truncated, info

    def close(self) -> None:
        self.takeover.device.close()
        self.world.close()


# ---- devices that are scripts


class AlwaysScript:
    """A script that drives from the first step to the last: an expert who demonstrates."""

    source = Source.SCRIPT

    def __init__(self, act: Callable[[], Tree]):
        self._act = act

    def begin(self) -> None:
        """Nothing to remember."""

    def read(self) -> Reading:
        return Reading(action=self._act())

    def close(self) -> None:
        """Nothing to let go of."""


class ScriptedHuman:
    """Stands in for a person: takes over when progress stalls, and lets go after some steps, or never.

    `progress` gives a number that rises as the task comes along. When its best has not risen by `margin` for
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
        self.begin()

    def begin(self) -> None:
        self._best = float("-inf")
        self._stalled = 0  # steps since the best was reached
        self._left: int | None = 0  # steps of the burst; None: all

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
                self._stalled = 0  # the policy gets its chance before the next takeover
        return Reading(action=self._act(), reason=f"no progress for {self._patience_steps} steps")

    def close(self) -> None:
        """Nothing to let go of."""
