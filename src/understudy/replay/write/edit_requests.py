"""Edit requests: how other processes delete, restore, label and judge episodes of a store that is being written.

Only the process that holds the store's lock changes its catalog. Any other process leaves a request: one small JSON
file in STORE/inbox, which gets its name only when it is whole and on disk. The store applies requests in the order of
their names, when it is opened and after a commit. A request is removed when its change is durable; after a crash it is
applied again, which changes nothing. A request that cannot be applied is moved to inbox/refused, with a warning.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
import uuid
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol, TypeAlias, get_args

from understudy.core import StoreClosedError, StoreError, StoreFailedError, UnderstudyError
from understudy.durable import files
from understudy.durable.errors import store_errors
from understudy.replay.format.paths import CATALOG_FILE, INBOX_DIRECTORY, REFUSED_DIRECTORY, no_store

logger = logging.getLogger(__name__)

Action: TypeAlias = Literal["delete", "restore", "label", "judge"]
ACTIONS: tuple[Action, ...] = get_args(Action)

POLL_S = 1.0  # between two looks at the inbox of a store that commits
CLOCK_TICK_S = 0.1  # in which a directory may change twice with the same modification time
MAX_REQUEST_BYTES = 2**20
MAX_TEXT = 200  # characters


class EpisodeEditor(Protocol):
    """The edits that a request can ask for; a Store has them. Each returns how many episodes changed."""

    def delete(self, episodes: Iterable[int]) -> int: ...

    def restore(self, episodes: Iterable[int]) -> int: ...

    def label(self, episodes: Iterable[int], labels: Mapping[str, str | None]) -> int: ...

    def set_success(self, episodes: Iterable[int], success: bool | None) -> int: ...


@dataclass(frozen=True, kw_only=True)
class EditRequest:
    """One edit of some episodes. Only `label` has `labels`; a value of None removes a label.

    `judge` sets the outcome: success, failure, or None where it is not known.
    """

    action: Action
    episodes: tuple[int, ...]
    labels: Mapping[str, str | None] = field(default_factory=dict)
    success: bool | None = None
    who: str = ""
    when: float = field(default_factory=time.time)

    def __post_init__(self) -> None:
        if self.action not in ACTIONS:
            raise StoreError(f"action: expected one of {', '.join(ACTIONS)}, got {self.action!r}")
        if not self.episodes or not all(type(e) is int and 0 < e < 2**63 for e in self.episodes):
            raise StoreError(f"episodes: expected numbers from 1, got {self.episodes!r:.100}")
        if (self.action == "label") != bool(self.labels):
            raise StoreError(f"labels: expected some for `label` and none otherwise, got {self.labels!r:.100}")
        if self.success is not None and not (self.action == "judge" and type(self.success) is bool):
            raise StoreError(f"success: expected true, false or null, and only for `judge`, got {self.success!r:.100}")
        for name, value in self.labels.items():
            if not _is_text(name) or not name or not (value is None or _is_text(value)):
                raise StoreError(f"labels: expected up to {MAX_TEXT} letters of text, got {name!r:.99}: {value!r:.99}")
        if not _is_text(self.who) or type(self.when) not in (int, float):
            raise StoreError(f"who, when: expected a name and a time, got {self.who!r:.100}, {self.when!r:.100}")

    @staticmethod
    def parse(content: bytes) -> EditRequest:
        """The request in a file; a StoreError if it holds none."""
        try:
            fields = json.loads(content)
            return EditRequest(
                **{**fields, "episodes": tuple(fields["episodes"]), "labels": dict(fields.get("labels", {}))}
            )
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise StoreError(f"not a request ({error})") from None

    def to_json(self) -> dict[str, Any]:
        """The content of its file; only `judge` has `success`, so that earlier versions read the others."""
        content = asdict(self)
        return content if self.action == "judge" else {name: content[name] for name in content if name != "success"}

    def apply(self, editor: EpisodeEditor) -> int:
        """Edit the episodes; returns how many changed."""
        if self.action == "delete":
            return editor.delete(self.episodes)
        if self.action == "restore":
            return editor.restore(self.episodes)
        if self.action == "judge":
            return editor.set_success(self.episodes, self.success)
        return editor.label(self.episodes, self.labels)


def _is_text(value: object) -> bool:
    return isinstance(value, str) and len(value) <= MAX_TEXT and value.isprintable()


# ---- for processes that want an edit


def submit_edit(store: Path, request: EditRequest) -> Path:
    """Leave a request for the process that writes to the store; on disk when this returns."""
    if not (store / CATALOG_FILE).is_file():
        raise no_store(store)
    inbox = store / INBOX_DIRECTORY
    name = f"{time.time_ns():020d}-{uuid.uuid4().hex[:8]}.json"
    with store_errors(inbox, "create"):
        files.make_directory_durably(inbox)
        files.write_durably(inbox / name, json.dumps(request.to_json()).encode())
    return inbox / name


def pending_edits(store: Path) -> list[EditRequest]:
    """The requests that are not applied yet, in order, without those that are damaged."""
    found = []
    for path in _request_files(store / INBOX_DIRECTORY):
        with suppress(OSError, UnderstudyError):
            found.append(EditRequest.parse(_read_request(path)))
    return found


# ---- for the store


class EditInbox:
    """The inbox of an open store. Any thread may call `poll`; one at a time applies requests."""

    def __init__(self, store: Path, editor: EpisodeEditor):
        self._editor = editor
        self._path = store / INBOX_DIRECTORY
        self._applying = threading.Lock()
        self._polled_s = float("-inf")
        self._seen_ns = -1  # modification time of the directory when all its requests had been applied
        self._applied: Path | None = None  # a request whose file could not be removed

    def poll(self) -> None:
        """Apply new requests, at most once in POLL_S. If the directory has not changed, this costs one system call."""
        if time.monotonic() - self._polled_s < POLL_S or not self._applying.acquire(blocking=False):
            return
        try:
            self._polled_s = time.monotonic()
            try:
                changed_ns = os.stat(self._path).st_mtime_ns
            except OSError:
                return  # there has been no request yet
            if changed_ns != self._seen_ns:
                finished = self._apply_all()
                settled = time.time_ns() - changed_ns > CLOCK_TICK_S * 1e9
                self._seen_ns = changed_ns if finished and settled else -1
        finally:
            self._applying.release()

    def _apply_all(self) -> bool:
        """Apply the requests in their order; returns whether there is none left.

        While the file of one cannot be removed, those after it wait: a process that opens the store again applies it
        once more, which changes nothing only as long as no later one has been applied.
        """
        for path in _request_files(self._path):
            if path != self._applied:
                try:
                    request = EditRequest.parse(_read_request(path))
                    num_changed = request.apply(self._editor)
                except (StoreFailedError, StoreClosedError):
                    return False  # the disk failed, not the request; it is applied when the store is opened again
                except (UnderstudyError, OSError) as error:
                    self._refuse(path, error)
                    continue
                who = request.who
                logger.info("%s: %s of %d episodes, asked for by %s", path.name, request.action, num_changed, who)
            try:
                files.remove_durably(path)
            except OSError as error:
                if path != self._applied:
                    logger.warning("%s: was applied and cannot be removed: %s; later requests wait", path, error)
                self._applied = path
                return False
        return True

    def _refuse(self, path: Path, error: Exception) -> None:
        logger.warning("%s: moved to %s/: %s", path, REFUSED_DIRECTORY, error)
        with suppress(OSError):
            (self._path / REFUSED_DIRECTORY).mkdir(exist_ok=True)
            path.rename(self._path / REFUSED_DIRECTORY / path.name)


def _request_files(inbox: Path) -> list[Path]:
    try:
        return sorted(inbox / name for name in os.listdir(inbox) if name.endswith(".json"))
    except OSError:
        return []


def _read_request(path: Path) -> bytes:
    with path.open("rb") as file:
        content = file.read(MAX_REQUEST_BYTES + 1)
    if len(content) > MAX_REQUEST_BYTES:
        raise StoreError(f"expected up to {MAX_REQUEST_BYTES} bytes, got more")
    return content
