"""Live: tells every open page when something has changed, and what; the page then asks for what it shows.

| loop | takes from | blocks on | woken by |
|---|---|---|---|
| one for each page, in the event loop | the newest look | its clock | each PULSE_S |
| the look, in a thread, shared by all | files' times, the newest commit | the disk | the first page that finds it old |
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
from understudy.dashboard.api.targets import IDLE_S, Place
from understudy.replay.write.edit_requests import INBOX_DIRECTORY
from understudy.training.runs.health import look as look_at_health

PULSE_S = 0.5
KEEP_ALIVE_S = 10.0
MAX_PAGES = 32


class Live:
    """The news of all places."""

    def __init__(self, places: list[Place]):
        self._places = places
        self._lock = asyncio.Lock()
        self._looked_s = float("-inf")
        self._news: list[dict[str, Any]] = []
        self.num_pages = 0
        self.over = False

    async def events(self) -> AsyncIterator[str]:
        """Server-sent events for one page, until it leaves."""
        told, told_s = "", time.monotonic()
        self.num_pages += 1
        try:
            while not self.over:
                news = json.dumps(await self._look())
                if news != told:
                    told, told_s = news, time.monotonic()
                    yield f"data: {news}\n\n"
                elif time.monotonic() - told_s > KEEP_ALIVE_S:
                    told_s = time.monotonic()
                    yield ": still here\n\n"
                await asyncio.sleep(PULSE_S)
        finally:
            self.num_pages -= 1

    async def _look(self) -> list[dict[str, Any]]:
        async with self._lock:
            if time.monotonic() - self._looked_s > PULSE_S / 2:
                self._news = await asyncio.to_thread(lambda: [look(place) for place in self._places])
                self._looked_s = time.monotonic()
        return self._news


def look(place: Place) -> dict[str, Any]:
    """A few numbers that change when something does."""
    found: dict[str, Any] = {
        "metrics": _stamp(place.path / "metrics.jsonl"),
        "inbox": _stamp(place.store / INBOX_DIRECTORY),
        "config": _stamp(place.path / "config.json"),
        "health": " ".join(_states(place.health)),
        "commit": None,
        "newest": 0,
        "cluster": _cluster(place),
    }
    if place.has_store:
        try:
            with place.catalog().reader() as reader:
                found["commit"] = reader.last_commit()
                found["newest"] = reader.catalog.last_episode_id()
        except UnderstudyError as error:
            found["commit"] = f"error: {error}"
    place.pictures().close(idle_s=IDLE_S)
    return found


def _stamp(path: Path) -> str | None:
    try:
        said = path.stat()
    except OSError:
        return None
    return f"{said.st_ino}-{said.st_size}-{said.st_mtime_ns}"


def _cluster(place: Place) -> str | None:
    """The file, and how the driver is: one that was killed changes no file any more."""
    there = place.cluster.read()
    return (
        f"{_stamp(place.path / NOW)} {there.state if there else place.cluster.problem}"
        if place.cluster.exists
        else None
    )


def _states(directories: list[Path]) -> list[str]:
    """How each process is, and its last beat: one that was killed changes no file any more."""
    seen = [one for directory in directories for one in look_at_health(directory)]
    return [f"{one.said.get('role')}-{one.said.get('name')} {one.state} {one.said['beat_s']}" for one in seen]
