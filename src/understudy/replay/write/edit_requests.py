"""Inbox: what other processes ask of a store that is being written: delete, restore, label.

Only the process that holds the store's lock changes its catalog. A request is one small JSON file in STORE/inbox,
there under its name only when it is whole and on disk. The store applies requests in the order of their names, when it
is opened and after a commit; a request is removed when its change is durable, so that after a crash it is applied
again, which changes nothing. One that cannot be applied is set aside in inbox/refused with a warning.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
import uuid
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, get_args

from understudy.core import StoreClosedError, StoreError, StoreFailedError, StoreFormatError, UnderstudyError
from understudy.durable import files
from understudy.replay.format.catalog import CATALOG_FILE

if TYPE_CHECKING:
    from understudy.replay.write.store import Store

logger = logging.getLogger(__name__)

Action: TypeAlias = Literal["delete", "restore", "label"]
ACTIONS: tuple[Action, ...] = get_args(Action)

INBOX_DIRECTORY = "inbox"
REFUSED_DIRECTORY = "refused"
LOOK_S = 1.0  # between two looks of a store that commits
TICK_S = 0.1  # in which a directory may change twice with the same time
MAX_REQUEST_BYTES = 2**20
MAX_TEXT = 200


@dataclass(frozen=True, kw_only=True)
class Request:
    """One wish. `labels` are for `label`; a value of None takes one off."""

    action: Action
    episodes: tuple[int, ...]
    labels: Mapping[str, str | None] = field(default_factory=dict)
    who: str = ""
    when: float = field(default_factory=time.time)

    def __post_init__(self) -> None:
        if self.action not in ACTIONS:
            raise StoreError(f"action: expected one of {', '.join(ACTIONS)}, got {self.action!r}")
        if not self.episodes or not all(type(e) is int and 0 < e < 2**63 for e in self.episodes):
            raise StoreError(f"episodes: expected numbers from 1, got {self.episodes!r:.100}")
        if (self.action == "label") != bool(self.labels):
            raise StoreError(f"labels: expected some for `label` and none otherwise, got {self.labels!r:.100}")
        for name, value in self.labels.items():
            if not _is_text(name) or not name or not (value is None or _is_text(value)):
                raise StoreError(f"labels: expected up to {MAX_TEXT} letters of text, got {name!r:.99}: {value!r:.99}")
        if not _is_text(self.who) or type(self.when) not in (int, float):
            raise StoreError(f"who, when: expected a name and a time, got {self.who!r:.100}, {self.when!r:.100}")

    @staticmethod
    def parse(content: bytes) -> Request:
        """A request from its file; an error says what is wrong with it."""
        try:
            said = json.loads(content)
            return Request(**{**said, "episodes": tuple(said["episodes"]), "labels": dict(said.get("labels", {}))})
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise StoreError(f"not a request ({error})") from None

    def apply(self, store: Store) -> int:
        """Do it; returns how many episodes changed."""
        if self.action == "delete":
            return store.delete(self.episodes)
        if self.action == "restore":
            return store.restore(self.episodes)
        return store.label(self.episodes, self.labels)


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and len(value) <= MAX_TEXT and value.isprintable()


# ---- for those who ask


def put(store: Path, request: Request) -> Path:
    """Leave a request for whoever writes to the store; on disk when this returns."""
    if not (store / CATALOG_FILE).is_file():
        raise StoreFormatError(f"{store}: not an Understudy store (it has no {CATALOG_FILE}); check the path")
    inbox = store / INBOX_DIRECTORY
    name = f"{time.time_ns():020d}-{uuid.uuid4().hex[:8]}.json"
    with files.naming(inbox, "create"):
        inbox.mkdir(exist_ok=True)
        files.replace_durably(inbox / name, json.dumps(asdict(request)).encode())
    return inbox / name


def pending(store: Path) -> list[Request]:
    """What was asked for and is not applied yet, in order; what is damaged is left out."""
    found = []
    for path in _requests(store / INBOX_DIRECTORY):
        with suppress(OSError, UnderstudyError):
            found.append(Request.parse(_content(path)))
    return found


# ---- for the store


class Inbox:
    """The inbox of an open store. Any thread may `look`; one of them does the work."""

    def __init__(self, store: Store):
        self._store = store
        self._path = store.path / INBOX_DIRECTORY
        self._working = threading.Lock()
        self._looked_s = float("-inf")
        self._seen_ns = -1  # the directory's time when all that was in it was done

    def look(self) -> None:
        """Apply what is new, at most once in LOOK_S; a look at an inbox that has not changed is one system call."""
        if time.monotonic() - self._looked_s < LOOK_S or not self._working.acquire(blocking=False):
            return
        try:
            self._looked_s = time.monotonic()
            try:
                changed_ns = os.stat(self._path).st_mtime_ns
            except OSError:
                return  # nobody has asked for anything yet
            if changed_ns != self._seen_ns:
                self._work()
                settled = time.time_ns() - changed_ns > TICK_S * 1e9
                self._seen_ns = changed_ns if settled else -1
        finally:
            self._working.release()

    def _work(self) -> None:
        for path in _requests(self._path):
            try:
                request = Request.parse(_content(path))
                num_changed = request.apply(self._store)
            except (StoreFailedError, StoreClosedError):
                return  # the disk, not the request; it is applied when the store is opened again
            except (UnderstudyError, OSError) as error:
                self._refuse(path, error)
                continue
            logger.info("%s: %s of %d episodes, asked for by %s", path.name, request.action, num_changed, request.who)
            with suppress(StoreFailedError):
                files.remove_durably(path)

    def _refuse(self, path: Path, error: Exception) -> None:
        logger.warning("%s: set aside in %s/: %s", path, REFUSED_DIRECTORY, error)
        with suppress(OSError):
            (self._path / REFUSED_DIRECTORY).mkdir(exist_ok=True)
            path.rename(self._path / REFUSED_DIRECTORY / path.name)


def _requests(inbox: Path) -> list[Path]:
    try:
        return sorted(inbox / name for name in os.listdir(inbox) if name.endswith(".json"))
    except OSError:
        return []


def _content(path: Path) -> bytes:
    with path.open("rb") as file:
        content = file.read(MAX_REQUEST_BYTES + 1)
    if len(content) > MAX_REQUEST_BYTES:
        raise StoreError(f"expected up to {MAX_REQUEST_BYTES} bytes, got more")
    return content
