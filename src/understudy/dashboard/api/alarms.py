"""Vitals: who is at work on a run, how they are, and what somebody should look at."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, TypeAlias

from understudy.dashboard.api.cluster import troubles
from understudy.dashboard.api.targets import Place
from understudy.durable.files import lock_is_held
from understudy.replay.write.store import LOCK_FILE
from understudy.training.runs.health import look

Level: TypeAlias = Literal["bad", "warn"]

QUIET_S = 300.0  # a store that is being written, and to which nothing is committed
LITTLE_SHARE, LITTLE_BYTES = 0.05, 10 * 10**9  # of a disk: less than both is an alarm
OFF_SHARE = 0.05  # between the wanted share of demonstrations and the one that was drawn
LAGGING_VERSIONS = 10  # an actor may be behind the newest policy
MAX_BYTES = 2**20


def roles(place: Place) -> list[dict[str, Any]]:
    """Every process that has a health file, the ones in trouble first."""
    order = ("failed", "gone", "stuck", "silent", "running", "ended")
    seen = [one for directory in place.health for one in look(directory)]
    found = [
        {"state": one.state, "silent_s": one.silent_s, "idle_s": one.idle_s, **_plain(one.said, one.state)}
        for one in seen
    ]
    return sorted(found, key=lambda one: (order.index(one["state"]), str(one.get("role")), str(one.get("name"))))


def _plain(said: Any, state: str) -> dict[str, Any]:
    return {**{str(name): value for name, value in said.items()}, "state": state}


def owner(place: Place) -> dict[str, Any] | None:
    """Who holds the store's lock."""
    path = place.store / LOCK_FILE
    if not lock_is_held(path):
        return None
    try:
        with path.open("rb") as file:
            said = json.loads(file.read(MAX_BYTES))
        return said if isinstance(said, dict) else {}
    except (OSError, ValueError):
        return {}


def disk(path: Path) -> dict[str, int]:
    """Free space where a path is, or will be."""
    while not path.exists() and path != path.parent:
        path = path.parent
    found = os.statvfs(path)
    return {"free": found.f_bavail * found.f_frsize, "size": found.f_blocks * found.f_frsize}


def alarms(place: Place, *, last_train: dict[str, Any] | None, last_commit_s: float | None) -> list[dict[str, Any]]:
    """What is wrong, the worst first; each says what and where to look."""
    found: list[dict[str, Any]] = troubles(place)

    def alarm(level: Level, what: str, detail: str, view: str = "health") -> None:
        found.append({"level": level, "what": what, "detail": detail, "view": view})

    there = roles(place)
    newest = max((_number(role.get("policy_version")) or 0.0 for role in there), default=0.0)
    for role in there:
        name = f"{role.get('role')} {role.get('name')}"
        if role["state"] == "failed":
            alarm("bad", f"{name} failed", str(role.get("error") or ""))
        elif role["state"] == "gone":
            alarm("bad", f"{name} is gone", "its process was killed; `understudy resume` goes on with the run")
        elif role["state"] == "stuck":
            alarm("bad", f"{name} is stuck", f"{_ago(role['idle_s'])} without progress, {role.get('doing')}")
        elif role["state"] == "silent":
            alarm("bad", f"{name} is silent", f"no heartbeat for {_ago(role['silent_s'])}")
        if role["state"] in ("running", "stuck"):
            _judge_delivery(name, role.get("delivery"), alarm)
            lag = newest - (_number(role.get("policy_version")) or newest)
            if role.get("role") == "actor" and lag > LAGGING_VERSIONS:
                alarm("warn", f"{name} lags", f"it acts with a policy that is {lag:.0f} versions old")
    space = disk(place.path)
    if space["free"] < min(LITTLE_SHARE * space["size"], LITTLE_BYTES):
        left = f"{space['free'] / 1e9:.1f} GB of {space['size'] / 1e9:.0f} GB are free"
        alarm("bad", "the disk is nearly full", f"{left}; `understudy compact` gives back what was deleted", "replay")
    if last_train is not None:
        _judge_learning(last_train, alarm)
    if last_commit_s is not None and time.time() - last_commit_s > QUIET_S and owner(place) is not None:
        alarm("warn", "nothing is written", f"the last commit was {_ago(time.time() - last_commit_s)} ago", "replay")
    return sorted(found, key=lambda one: one["level"] != "bad")


Alarm: TypeAlias = Callable[..., None]


def _judge_delivery(name: str, delivery: Any, alarm: Alarm) -> None:
    if not isinstance(delivery, Mapping):
        return
    if dropped := _number(delivery.get("dropped")):
        alarm("warn", f"{name} dropped {dropped:,.0f} steps", "its queue was full: the server or the spool is too slow")
    if delivery.get("connected") is False:
        alarm("warn", f"{name} cannot reach the server", f"{delivery.get('problem')}; its steps wait in the spool")


def _judge_learning(said: Mapping[str, Any], alarm: Alarm) -> None:
    wanted, actual = _number(said.get("demo_share_wanted")), _number(said.get("demo_share"))
    if wanted is not None and actual is not None and abs(wanted - actual) > OFF_SHARE:
        why = "one of the two has no steps yet" if actual in (0.0, 1.0) else "look at what is in the store"
        alarm("warn", "the mixture is off", f"{actual:.0%} demonstrations, wanted {wanted:.0%}; {why}", "replay")


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) else None


def _ago(seconds: float) -> str:
    for limit, unit, name in ((120, 1, "s"), (7200, 60, "min"), (float("inf"), 3600, "h")):
        if seconds < limit:
            return f"{seconds / unit:.0f} {name}"
    raise AssertionError("unreachable")
