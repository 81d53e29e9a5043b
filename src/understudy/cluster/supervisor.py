"""Minded: a Ray actor that its owner asks and waits for; whatever becomes of it, it is made again.

The owner blocks in `ask`, and looks at it meanwhile: `look(told)`, answered by another of its threads, tells it what it
is to know, and says what its Health says. One that died, does not answer, or gets nothing done is killed and replaced;
what it was asked for is then asked again.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from typing import Any, Literal

import ray
from ray.exceptions import RayError, RayTaskError

from understudy.cluster.config import ClusterConfig
from understudy.cluster.ray_session import ClusterError, room
from understudy.cluster.status import Event, RoleNow, RoleState
from understudy.training.runs.health import PROGRESS_TIMEOUT_S

logger = logging.getLogger(__name__)

TICK_S = 0.25
LOOK_S = 1.0
PAUSE_S = 1.0  # before it is made again
MAX_STACK = 20_000  # characters of it that go into an event


class Lost(Exception):
    """It is gone, or has to go; `stack` says where it hung."""

    def __init__(self, why: str, stack: str | None = None):
        super().__init__(why)
        self.stack = stack


def idle_s(health: Mapping[str, Any]) -> float:
    """Without progress, by its own clock."""
    return float(health["beat_s"]) - float(health["progress_s"])


def stack_after_s(place: ClusterConfig) -> float:
    """After how long without progress a role shows its stack: no later than it is replaced for that."""
    return min(PROGRESS_TIMEOUT_S, place.stuck_s)


def last_line(error: BaseException) -> str:
    """An error of Ray's is long; its last line says what it was."""
    return (str(error).strip().splitlines() or [type(error).__name__])[-1][:500]


class Minded:
    """One actor that stands or is made again. One thread asks; any may look."""

    def __init__(
        self,
        role: Literal["actor", "evaluator"],
        name: str,
        make: Callable[[], Any],
        place: ClusterConfig,
        *,
        told: Callable[[], Any],
        progress: Callable[[str], None],
    ):
        """`told` is what its `look` is given; `progress` hears what it does while it is waited for."""
        self.events: list[Event] = []
        self.restarts = 0
        self._role, self._name, self._make, self._place = role, name, make, place
        self._told, self._progress = told, progress
        self._handle: Any = None
        self._state: RoleState = "starting"
        self._node: str | None = None
        self._pid: int | None = None
        self._since_s = time.time()
        self._seen: Mapping[str, Any] = {}
        self._error: str | None = None
        self._in_a_row = 0

    def role(self) -> RoleNow:
        seen = self._seen
        state: RoleState = "stuck" if self._state == "up" and seen.get("stack") else self._state
        return RoleNow(
            role=self._role,
            name=self._name,
            state=state,
            node=self._node,
            pid=self._pid,
            doing=str(seen.get("doing", "")),
            since_s=self._since_s,
            restarts=self.restarts,
            error=self._error,
            stack=seen.get("stack"),
        )

    def ask(self, method: str, *args: Any, lost: Callable[[], None] | None = None) -> Any:
        """What a method answers. If the actor is lost on the way, `lost` is called, and another one is asked."""
        while True:
            try:
                found = self._watch(getattr(self._ready(), method).remote(*args))
            except RayTaskError as error:  # its own error, which another would have too
                raise (error.cause or error) from None
            except (Lost, RayError) as error:
                self._replace(error)
                if lost is not None:
                    lost()
                continue
            self._in_a_row = 0
            return found

    def close(self) -> None:
        if self._handle is not None:
            ray.kill(self._handle)
            self._handle = None
        self._state = "ended"

    # ---- steps of it

    def _ready(self) -> Any:
        """The actor, once there is room for it."""
        if self._handle is None:
            self._handle, self._state, self._seen = self._make(), "waiting for room", {}
            where = self._handle.where.remote()
            deadline = time.monotonic() + self._place.room_s
            while not ray.wait([where], timeout=TICK_S)[0]:
                self._progress(f"waiting for room for {self._name}")
                if time.monotonic() > deadline:
                    raise ClusterError(
                        f"{self._name}: no node had room for {self._place.rollout.shape()} within "
                        f"{self._place.room_s:g} s ({room()}); lower --place.rollout.cpus or .gpus, or add nodes"
                    )
            self._node, self._pid = ray.get(where)
            self._state, self._since_s = "up", time.time()
        return self._handle

    def _watch(self, call: Any) -> Any:
        look, looked, heard = None, 0.0, time.monotonic()
        while not ray.wait([call], timeout=TICK_S)[0]:
            now = time.monotonic()
            if look is None and now - looked > LOOK_S:
                look, looked = self._handle.look.remote(self._told()), now
            if look is not None and ray.wait([look], timeout=0)[0]:
                seen, look, heard = ray.get(look), None, now
                self._seen = seen
                self._progress(f"{self._name}: {seen['doing']}")
                if idle_s(seen) > self._place.stuck_s:
                    raise Lost(f"got nothing done for {idle_s(seen):.0f} s, {seen['doing']}", seen["stack"])
            if now - heard > self._place.silent_s:
                raise Lost(f"did not answer for {self._place.silent_s:g} s")
        return ray.get(call)

    def _replace(self, error: Exception) -> None:
        why = last_line(error)
        stack = error.stack if isinstance(error, Lost) else None
        logger.warning("%s %s; another takes its place", self._name, why)
        text = f"{self._name} is replaced: {why}"
        what: Literal["stuck", "worker lost"] = "stuck" if stack else "worker lost"
        self.events.append(Event(what=what, name=self._name, text=text, stack=stack and stack[:MAX_STACK]))
        self.close()
        self._state, self._error = "gone", why
        self.restarts += 1
        self._in_a_row += 1
        if self._in_a_row > self._place.max_restarts:
            raise ClusterError(
                f"{self._name}: was lost {self._in_a_row} times in a row, the last time: {why}; mend that, then "
                f"`understudy resume`"
            ) from None
        time.sleep(PAUSE_S)
