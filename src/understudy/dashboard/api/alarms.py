"""Alarms: the processes of a run, their state, and everything that a person should look at."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, TypeAlias

from understudy.dashboard.api.cluster import cluster_alarms
from understudy.dashboard.api.targets import Target
from understudy.durable.lock import lock_is_held
from understudy.replay.format.paths import LOCK_FILE
from understudy.training.runs.health import read_health

Level: TypeAlias = Literal["bad", "warn"]
AddAlarm: TypeAlias = Callable[..., None]

QUIET_S = 300.0  # without a commit, while a process holds the store's lock
LOW_DISK_SHARE, LOW_DISK_BYTES = 0.05, 10 * 10**9  # an alarm if less than both is free
MIXTURE_TOLERANCE = 0.05  # between the wanted share of demonstrations in a batch and the sampled one
MAX_LAG_VERSIONS = 10  # by which an actor may be behind the newest policy
MAX_LOCK_BYTES = 2**20
STATE_ORDER = ("failed", "gone", "stuck", "silent", "running", "ended")


def processes(target: Target) -> list[dict[str, Any]]:
    """Every process that has a health file, unhealthy ones first."""
    seen = [one for directory in target.health for one in read_health(directory)]
    found = [
        {"silent_s": one.silent_s, "idle_s": one.idle_s, **_named(one.content), "state": one.state} for one in seen
    ]
    return sorted(found, key=lambda one: (STATE_ORDER.index(one["state"]), str(one.get("role")), str(one.get("name"))))


def _named(status: Mapping[Any, Any]) -> dict[str, Any]:
    return {str(name): value for name, value in status.items()}


def lock_owner(target: Target) -> dict[str, Any] | None:
    """The process that holds the store's lock; None if nobody does."""
    path = target.store / LOCK_FILE
    if not lock_is_held(path):
        return None
    try:
        with path.open("rb") as file:
            content = json.loads(file.read(MAX_LOCK_BYTES))
        return content if isinstance(content, dict) else {}
    except (OSError, ValueError):
        return {}


def disk_space(path: Path) -> dict[str, int]:
    """Free and total bytes of the disk that holds a path, or will hold it."""
    while not path.exists() and path != path.parent:
        path = path.parent
    found = os.statvfs(path)
    return {"free": found.f_bavail * found.f_frsize, "size": found.f_blocks * found.f_frsize}


def find_alarms(
    target: Target, *, last_train: Mapping[str, Any] | None, last_commit_s: float | None
) -> list[dict[str, Any]]:
    """What is wrong, the worst first; each alarm says what happened and which view shows more."""
    found: list[dict[str, Any]] = cluster_alarms(target)

    def add(level: Level, what: str, detail: str, view: str = "health") -> None:
        found.append({"level": level, "what": what, "detail": detail, "view": view})

    all_processes = processes(target)
    newest = max((_number(process.get("policy_version")) or 0.0 for process in all_processes), default=0.0)
    for process in all_processes:
        _check_process(process, newest, add)
    space = disk_space(target.path)
    if space["free"] < min(LOW_DISK_SHARE * space["size"], LOW_DISK_BYTES):
        left = f"{space['free'] / 1e9:.1f} GB of {space['size'] / 1e9:.0f} GB are free"
        add("bad", "the disk is nearly full", f"{left}; `understudy compact` frees deleted episodes", "replay")
    if last_train is not None:
        _check_mixture(last_train, add)
    if last_commit_s is not None and time.time() - last_commit_s > QUIET_S and lock_owner(target) is not None:
        add("warn", "no new data", f"the last commit was {_duration(time.time() - last_commit_s)} ago", "replay")
    return sorted(found, key=lambda one: one["level"] != "bad")


def _check_process(process: Mapping[str, Any], newest_version: float, add: AddAlarm) -> None:
    name, state = f"{process.get('role')} {process.get('name')}", process["state"]
    if state == "failed":
        add("bad", f"{name} failed", str(process.get("error") or ""))
    elif state == "gone":
        add("bad", f"{name} is gone", "its process was killed; `understudy resume` continues the run")
    elif state == "stuck":
        add("bad", f"{name} is stuck", f"{_duration(process['idle_s'])} without progress, {process.get('doing')}")
    elif state == "silent":
        add("bad", f"{name} is silent", f"no heartbeat for {_duration(process['silent_s'])}")
    if state in ("running", "stuck"):
        _check_delivery(name, process.get("delivery"), add)
        lag = newest_version - (_number(process.get("policy_version")) or newest_version)
        if process.get("role") == "actor" and lag > MAX_LAG_VERSIONS:
            add("warn", f"{name} lags", f"it acts with a policy that is {lag:.0f} versions old")


def _check_delivery(name: str, delivery: Any, add: AddAlarm) -> None:
    if not isinstance(delivery, Mapping):
        return
    if dropped := _number(delivery.get("dropped")):
        add("warn", f"{name} dropped {dropped:,.0f} steps", "its queue was full: the server or the spool is too slow")
    if damaged := _number(delivery.get("damaged_chunks")):
        add("bad", f"{name}: the disk damaged {damaged:,.0f} chunks", "they are kept in `damaged-*` of its spool")
    if delivery.get("connected") is False:
        add("warn", f"{name} cannot reach the server", f"{delivery.get('problem')}; its steps wait in the spool")


def _check_mixture(train: Mapping[str, Any], add: AddAlarm) -> None:
    wanted, actual = _number(train.get("demo_share_wanted")), _number(train.get("demo_share"))
    if wanted is not None and actual is not None and abs(wanted - actual) > MIXTURE_TOLERANCE:
        why = "one of the two has no steps yet" if actual in (0.0, 1.0) else "look at what is in the store"
        detail = f"{actual:.0%} demonstrations, wanted {wanted:.0%}; {why}"
        add("warn", "batches have the wrong share of demonstrations", detail, "replay")


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) else None


def _duration(seconds: float) -> str:
    for limit, unit, name in ((120, 1, "s"), (7200, 60, "min"), (float("inf"), 3600, "h")):
        if seconds < limit:
            return f"{seconds / unit:.0f} {name}"
    raise AssertionError("unreachable")
