"""Places: what is watched. A run has a store, metrics, a config and health; a store is only that."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from understudy.dashboard.api.cluster_file import ClusterFile
from understudy.dashboard.api.curves import MetricsFollower
from understudy.replay import Reader
from understudy.replay.format.catalog import CATALOG_FILE
from understudy.training.runs.health import HEALTH
from understudy.training.runs.run import CONFIG, Run

Found = TypeVar("Found")

IDLE_S = 15.0  # after which a store that nobody looks at is let go
MAX_SEGMENTS = 32  # open at once; compaction gives back the space of a file only when nobody has it open
KEEP_S, KEEP_TIMES = 1.0, 20.0  # an answer is kept for so long, and for so many times what it cost
MAX_CONFIG_BYTES = 2**20


class Place:
    """One run or store. Nothing of it needs to exist yet, and nothing is changed by looking."""

    def __init__(self, path: Path, name: str):
        self.path = path
        self.name = name
        self.cluster = ClusterFile(path)
        self._shelves: dict[str, Shelf] = {}
        self._metrics: MetricsFollower | None = None
        self._lock = threading.Lock()
        self._kept: dict[str, tuple[int, float, Any]] = {}

    @property
    def is_store(self) -> bool:
        return (self.path / CATALOG_FILE).is_file()

    @property
    def is_run(self) -> bool:
        return not self.is_store and any((self.path / part).exists() for part in (CONFIG, "metrics.jsonl", HEALTH))

    @property
    def store(self) -> Path:
        return self.path if self.is_store else Run(self.path).store

    @property
    def has_store(self) -> bool:
        return (self.store / CATALOG_FILE).is_file()

    @property
    def health(self) -> list[Path]:
        """Directories of health files: the run's, and the one of whoever serves its store."""
        return list(dict.fromkeys([self.path / HEALTH, self.store / HEALTH]))

    @property
    def metrics(self) -> MetricsFollower:
        with self._lock:
            if self._metrics is None:
                self._metrics = MetricsFollower(Run(self.path).metrics)
            return self._metrics

    def config(self) -> dict[str, Any] | None:
        """All that the run's config file says; None if there is none, or none that makes sense."""
        try:
            with (self.path / CONFIG).open("rb") as file:
                said = json.loads(file.read(MAX_CONFIG_BYTES))
        except (OSError, ValueError, RecursionError):
            return None
        return said if isinstance(said, dict) and isinstance(said.get("config"), dict) else None

    # ---- its store

    def catalog(self) -> Shelf:
        return self._shelf("catalog")

    def pictures(self) -> Shelf:
        """A reader of its own, so that lists need not wait for pictures."""
        return self._shelf("pictures")

    def _shelf(self, what: str) -> Shelf:
        with self._lock:
            if what not in self._shelves or self._shelves[what].path != self.store:
                old = self._shelves.pop(what, None)
                if old is not None:
                    old.close()
                self._shelves[what] = Shelf(self.store)
            return self._shelves[what]

    def let_go(self, idle_s: float = 0.0) -> None:
        """Close the readers that nobody has used for a while."""
        with self._lock:
            shelves = list(self._shelves.values())
        for shelf in shelves:
            shelf.close(idle_s)

    def close(self) -> None:
        self.let_go()

    # ---- answers

    def kept(self, key: str, make: Callable[[], Found]) -> Found:
        """An answer about the store that costs: made again when the store has changed, but only a share of the time."""
        with self.catalog().reader() as reader:
            commit = reader.last_commit()
        now = time.monotonic()
        with self._lock:
            found = self._kept.get(key)
        if found is not None and (found[0] == commit or now < found[1]):
            return found[2]  # type: ignore[no-any-return]
        made = make()
        cost_s = time.monotonic() - now
        with self._lock:
            self._kept[key] = (commit, now + max(KEEP_S, KEEP_TIMES * cost_s), made)
        return made


class Shelf:
    """A store open for reading while somebody looks at it; one thread at a time."""

    def __init__(self, path: Path):
        self.path = path
        self._lock = threading.Lock()
        self._reader: Reader | None = None
        self._inode = 0
        self._used_s = 0.0

    @contextmanager
    def reader(self) -> Iterator[Reader]:
        """The reader; closed if anything is wrong, so that the next look begins anew."""
        with self._lock:
            try:
                yield self._open()
                self._used_s = time.monotonic()
            except BaseException:
                self._close()
                raise

    def close(self, idle_s: float = 0.0) -> None:
        with self._lock:
            if time.monotonic() - self._used_s >= idle_s:
                self._close()

    def _open(self) -> Reader:
        try:
            inode = (self.path / CATALOG_FILE).stat().st_ino
        except OSError:
            inode = 0
        if self._reader is not None and (inode != self._inode or len(self._reader._segments) > MAX_SEGMENTS):
            self._close()  # repaired or made anew; or too many files
        if self._reader is None:
            self._reader, self._inode = Reader(self.path), inode
        return self._reader

    def _close(self) -> None:
        if self._reader is not None:
            self._reader.close()
            self._reader = None


def make_places(paths: list[Path]) -> list[Place]:
    """A place for each path, with names that differ."""
    paths = list(dict.fromkeys(path.resolve() for path in paths))
    names = [path.parent.name if path.name == "store" else path.name for path in paths]
    return [
        Place(path, name if names.count(name) == 1 else f"{path.parent.name}/{path.name}")
        for path, name in zip(paths, names, strict=True)
    ]
