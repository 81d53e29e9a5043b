"""Targets: the runs and stores that are shown. A run has a store, metrics, a config and health files."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from understudy.core.closeable import Closeable
from understudy.dashboard.api.cluster_file import ClusterFile
from understudy.dashboard.api.curves import MetricsFollower
from understudy.replay import Reader
from understudy.replay.format.paths import CATALOG_FILE
from understudy.training.runs.health import HEALTH
from understudy.training.runs.run import CONFIG, Run

Answer = TypeVar("Answer")

IDLE_S = 15.0  # after which an unused reader is closed
MAX_SEGMENTS = 32  # open at once; compaction frees the space of a file only when nobody has it open
CACHE_S, CACHE_COST_FACTOR = 1.0, 20.0  # a cached answer is valid this long, or this many times what it took to make
MAX_CONFIG_BYTES = 2**20


class Target(Closeable):
    """One run or store. It need not exist yet, and reading it changes nothing."""

    def __init__(self, path: Path, name: str):
        self.path = path
        self.name = name
        self.cluster = ClusterFile(path)
        self._readers: dict[str, CachedReader] = {}
        self._metrics: MetricsFollower | None = None
        self._lock = threading.Lock()
        self._cache: dict[str, tuple[int, float, Any]] = {}  # commit, valid until, answer
        self._outdated_until_s: float | None = None  # the first of the outdated answers that were given
        self._num_renewals = 0

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
        """Directories of health files: the run's, and that of the process that serves its store."""
        return list(dict.fromkeys([self.path / HEALTH, self.store / HEALTH]))

    @property
    def metrics(self) -> MetricsFollower:
        with self._lock:
            if self._metrics is None:
                self._metrics = MetricsFollower(Run(self.path).metrics)
            return self._metrics

    def config(self) -> dict[str, Any] | None:
        """The content of the run's config file; None if there is no valid one."""
        try:
            with (self.path / CONFIG).open("rb") as file:
                content = json.loads(file.read(MAX_CONFIG_BYTES))
        except (OSError, ValueError, RecursionError):
            return None
        return content if isinstance(content, dict) and isinstance(content.get("config"), dict) else None

    # ---- readers of its store

    def catalog(self) -> CachedReader:
        """The reader for lists and numbers."""
        return self._cached_reader("catalog")

    def images(self) -> CachedReader:
        """The reader for camera images; a second one, so that lists do not wait for images."""
        return self._cached_reader("images")

    def _cached_reader(self, purpose: str) -> CachedReader:
        with self._lock:
            if purpose not in self._readers or self._readers[purpose].path != self.store:
                old = self._readers.pop(purpose, None)
                if old is not None:
                    old.close()
                self._readers[purpose] = CachedReader(self.store)
            return self._readers[purpose]

    def close_readers(self, idle_s: float = 0.0) -> None:
        """Close the readers that have not been used for `idle_s`."""
        with self._lock:
            readers = list(self._readers.values())
        for reader in readers:
            reader.close(idle_s)

    def close(self) -> None:
        self.close_readers()

    # ---- answers

    def cached(self, key: str, make: Callable[[], Answer]) -> Answer:
        """An expensive answer about the store; made again after a commit, but not more often than its cost allows."""
        with self.catalog().reader() as reader:
            commit = reader.last_commit()
        now = time.monotonic()
        with self._lock:
            entry = self._cache.get(key)
        if entry is not None and (entry[0] == commit or now < entry[1]):
            if entry[0] != commit:
                with self._lock:
                    self._outdated_until_s = min(entry[1], self._outdated_until_s or entry[1])
            return entry[2]  # type: ignore[no-any-return]
        made = make()
        cost_s = time.monotonic() - now
        with self._lock:
            self._cache[key] = (commit, now + max(CACHE_S, CACHE_COST_FACTOR * cost_s), made)
        return made

    def num_renewals(self) -> int:
        """How often an answer that was outdated when it was given could be made again: it is to be asked for again.

        After a last commit nothing else would tell a page that it shows the numbers before it.
        """
        with self._lock:
            if self._outdated_until_s is not None and time.monotonic() >= self._outdated_until_s:
                self._outdated_until_s, self._num_renewals = None, self._num_renewals + 1
            return self._num_renewals


class CachedReader:
    """A store's reader that stays open between requests; one thread uses it at a time."""

    def __init__(self, path: Path):
        self.path = path
        self._lock = threading.Lock()
        self._reader: Reader | None = None
        self._inode = 0
        self._used_s = 0.0

    @contextmanager
    def reader(self) -> Iterator[Reader]:
        """The reader; closed after an error, so that the next request opens a new one."""
        with self._lock:
            try:
                yield self._open()
                self._used_s = time.monotonic()
            except BaseException:
                self._close()
                raise

    def close(self, idle_s: float = 0.0) -> None:
        """Close it if it has not been used for `idle_s`."""
        with self._lock:
            if time.monotonic() - self._used_s >= idle_s:
                self._close()

    def _open(self) -> Reader:
        try:
            inode = (self.path / CATALOG_FILE).stat().st_ino
        except OSError:
            inode = 0
        if self._reader is not None and (inode != self._inode or self._reader.num_open_segments > MAX_SEGMENTS):
            self._close()  # the store was replaced, or too many of its files are open
        if self._reader is None:
            self._reader, self._inode = Reader(self.path), inode
        return self._reader

    def _close(self) -> None:
        if self._reader is not None:
            self._reader.close()
            self._reader = None


def make_targets(paths: list[Path]) -> list[Target]:
    """A target for each path, with different names."""
    paths = list(dict.fromkeys(path.resolve() for path in paths))
    names = [path.parent.name if path.name == "store" else path.name for path in paths]
    return [
        Target(path, name if names.count(name) == 1 else f"{path.parent.name}/{path.name}")
        for path, name in zip(paths, names, strict=True)
    ]
