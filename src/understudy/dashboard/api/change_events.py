"""Change events: tells every open page which target changed; the page then asks for the data that it shows.

| loop | takes from | blocks on | woken by |
|---|---|---|---|
| one for each page, in the event loop | the newest stamps | its timer | each POLL_S |
| one poll in a thread, shared by all pages | file times, the newest commit | the disk | the first page that needs it |
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from understudy.cluster.status import STATUS_FILE
from understudy.core import UnderstudyError
from understudy.dashboard.api.targets import IDLE_S, Target
from understudy.durable.lock import lock_is_held
from understudy.replay.format.catalog import Catalog
from understudy.replay.format.paths import INBOX_DIRECTORY, LOCK_FILE
from understudy.training.runs.health import ProcessStatus, read_health

POLL_S = 0.5
KEEP_ALIVE_S = 10.0
MAX_PAGES = 32
FRESH_S = 60.0  # since the last commit: somebody is writing, even if no process reports
AT_WORK = ("running", "stuck", "silent")


class ChangeEvents:
    """Server-sent events about all targets."""

    def __init__(self, targets: list[Target]):
        self._targets = targets
        self._lock = asyncio.Lock()
        self._polled_s = float("-inf")
        self._stamps: list[dict[str, Any]] = []
        self._closed = False
        self.num_pages = 0

    def close(self) -> None:
        """End the events of every page."""
        self._closed = True

    async def events(self) -> AsyncIterator[str]:
        """The events of one page, until it leaves."""
        sent, sent_s = "", time.monotonic()
        self.num_pages += 1
        try:
            while not self._closed:
                stamps = json.dumps(await self._poll())
                if stamps != sent:
                    sent, sent_s = stamps, time.monotonic()
                    yield f"data: {stamps}\n\n"
                elif time.monotonic() - sent_s > KEEP_ALIVE_S:
                    sent_s = time.monotonic()
                    yield ": keep alive\n\n"
                await asyncio.sleep(POLL_S)
        finally:
            self.num_pages -= 1

    async def _poll(self) -> list[dict[str, Any]]:
        async with self._lock:
            if time.monotonic() - self._polled_s > POLL_S / 2:
                self._stamps = await asyncio.to_thread(lambda: [change_stamp(target) for target in self._targets])
                self._polled_s = time.monotonic()
        return self._stamps


def change_stamp(target: Target) -> dict[str, Any]:
    """A few values, at least one of which differs after any change of the target."""
    processes = [one for directory in target.health for one in read_health(directory)]
    found: dict[str, Any] = {
        "metrics": _file_stamp(target.path / "metrics.jsonl"),
        "inbox": _file_stamp(target.store / INBOX_DIRECTORY),
        "config": _file_stamp(target.path / "config.json"),
        "health": " ".join(map(_process_stamp, processes)),
        "commit": None,
        "newest": 0,
        "renewals": target.num_renewals(),
        "being_written": lock_is_held(target.store / LOCK_FILE),
        "cluster": _cluster_stamp(target),
        "at_work": any(one.state in AT_WORK for one in processes) or _driver_state(target) == "running",
    }
    if target.has_store:
        try:
            with target.catalog().reader() as reader:
                found["commit"] = reader.last_commit()
                found["newest"] = reader.catalog.last_episode_id()
                found["at_work"] |= _is_fresh(reader.catalog)
        except UnderstudyError as error:
            found["commit"] = f"error: {error}"
    target.images().close(idle_s=IDLE_S)
    return found


def _file_stamp(path: Path) -> str | None:
    try:
        stat = path.stat()
    except OSError:
        return None
    return f"{stat.st_ino}-{stat.st_size}-{stat.st_mtime_ns}"


def _cluster_stamp(target: Target) -> str | None:
    """The file and the driver's state, because a killed driver no longer changes the file."""
    if not target.cluster.exists:
        return None
    return f"{_file_stamp(target.path / STATUS_FILE)} {_driver_state(target)}"


def _driver_state(target: Target) -> str | None:
    """The state of the cluster's driver, or why it cannot be read."""
    cluster = target.cluster.read()
    return cluster.driver_state if cluster else target.cluster.problem


def _process_stamp(process: ProcessStatus) -> str:
    """The state and the last heartbeat, because a killed process no longer changes its file."""
    content = process.content
    return f"{content.get('role')}-{content.get('name')} {process.state} {content['beat_s']}"


def _is_fresh(catalog: Catalog) -> bool:
    """Whether the last commit is so new that others probably follow."""
    rows = catalog.select("select time from commits order by id desc limit 1")
    return bool(rows) and time.time() - rows[0][0] < FRESH_S
