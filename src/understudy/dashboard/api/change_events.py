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

from understudy.cluster.status import NOW
from understudy.core import UnderstudyError
from understudy.dashboard.api.targets import IDLE_S, Target
from understudy.replay.format.paths import INBOX_DIRECTORY
from understudy.training.runs.health import read_health

POLL_S = 0.5
KEEP_ALIVE_S = 10.0
MAX_PAGES = 32


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
    found: dict[str, Any] = {
        "metrics": _file_stamp(target.path / "metrics.jsonl"),
        "inbox": _file_stamp(target.store / INBOX_DIRECTORY),
        "config": _file_stamp(target.path / "config.json"),
        "health": " ".join(_process_states(target.health)),
        "commit": None,
        "newest": 0,
        "cluster": _cluster_stamp(target),
    }
    if target.has_store:
        try:
            with target.catalog().reader() as reader:
                found["commit"] = reader.last_commit()
                found["newest"] = reader.catalog.last_episode_id()
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
    cluster = target.cluster.read()
    return f"{_file_stamp(target.path / NOW)} {cluster.state if cluster else target.cluster.problem}"


def _process_states(directories: list[Path]) -> list[str]:
    """Each process's state and last heartbeat, because a killed process no longer changes its file."""
    seen = [one for directory in directories for one in read_health(directory)]
    return [f"{one.content.get('role')}-{one.content.get('name')} {one.state} {one.content['beat_s']}" for one in seen]
