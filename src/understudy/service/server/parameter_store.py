"""ParameterStore: the newest version of a policy's weights on a server, from the learner to every actor.

A version counts when all of it has arrived, was checked and is on disk. Then it gets its number and is sent to every
subscriber, and to each that connects later. Until then the version before it is sent. So a slow or broken upload is
seen by nobody but its sender, and other publications do not wait for it. A subscriber never gets an older version
after a newer one.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import ParamSpec, Protocol, TypeVar

from understudy.core import StoreError, UnavailableError, WireError
from understudy.durable.errors import store_errors
from understudy.durable.files import make_directory_durably, write_durably
from understudy.replay.format.paths import parameter_files, parameters_path
from understudy.service.wire.message import Assembly, pieces
from understudy.service.wire.parameters import NO_PARAMETERS, check_flags, check_parameters

logger = logging.getLogger(__name__)
P = ParamSpec("P")
T = TypeVar("T")


class InThread(Protocol):
    """Runs a function in a thread of a server while the event loop goes on."""

    def __call__(self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Awaitable[T]: ...


@dataclass(frozen=True, kw_only=True, eq=False)
class SavedVersion:
    """A version that is on disk, in the pieces in which it is sent."""

    number: int
    pieces: Sequence[bytes]


class ParameterStore:
    """The newest version, for all streams of a server. Its coroutines run in the server's event loop.

    A version may have `max_bytes`, and all uploads under way together twice as many. An upload is ended when its next
    piece does not come for `timeout_s`.
    """

    def __init__(self, store: Path, store_id: str, in_thread: InThread, *, max_bytes: int, timeout_s: float):
        self._store = store
        self.store_id = store_id
        self._in_thread = in_thread
        self._max_bytes, self._timeout_s = max_bytes, timeout_s
        self._uploading_bytes = 0
        self.version = NO_PARAMETERS  # the highest that this store has given out, as far as this server knows
        self._newest: SavedVersion | None = None
        self._newest_changed = asyncio.Condition()
        self._saving = asyncio.Lock()  # of one complete version after the other; no upload holds it
        self._saves: set[asyncio.Task[int]] = set()  # a task that nobody refers to may be dropped
        self._load()

    def _load(self) -> None:
        """Resume with the newest version on disk that is whole. The number of a damaged one is not used again."""
        for path in reversed(parameter_files(self._store)):
            self.version = max(self.version, int(path.stem))
            try:
                self._newest = SavedVersion(number=int(path.stem), pieces=_read_pieces(path))
            except (WireError, OSError) as error:
                logger.error("%s: this version of the parameters is damaged and is not sent (%s)", path, error)
            else:
                break
        if self._newest is None and self.version:
            logger.error("%s: no version is left to send; actors wait for the learner's next one", self._store)
        elif self._newest is not None and self._newest.number < self.version:
            logger.error("version %d is sent instead, which is older, until the next is published", self._newest.number)

    # ---- from the learner

    def has_existed(self, version: int) -> None:
        """A client has this version of this store, so newer ones get higher numbers."""
        if version > self.version:
            logger.warning(
                "a client has version %d of the parameters, and this store knows versions up to %d: it was restored "
                "from an older backup; the next version is %d",
                *(version, self.version, version + 1),
            )
            self.version = version

    async def publish(self, messages: AsyncIterator[bytes], version: int | None) -> int:
        """Receive a version, check it, save it and send it to subscribers; returns its number."""
        self._check_number(version)
        content = await self._receive(messages)
        # A client that goes away now does not stop this: a number is on disk with its version, or it is not used.
        save = asyncio.ensure_future(self._save(content, version))
        self._saves.add(save)
        save.add_done_callback(self._saves.discard)
        return await asyncio.shield(save)

    def _check_number(self, version: int | None) -> None:
        if version is not None and version <= self.version:
            raise StoreError(f"version: {self.version} is published already, got {version}; publish newer ones only")

    async def _receive(self, messages: AsyncIterator[bytes]) -> Sequence[bytes]:
        """All pieces of a version, checked."""
        assembly: Assembly | None = None
        num_bytes = 0
        try:
            while assembly is None or not assembly.complete:
                message = await self._next_piece(messages)
                num_bytes += len(message)
                self._uploading_bytes += len(message)
                if assembly is None:
                    assembly = Assembly(message, max_bytes=self._max_bytes)
                    check_parameters(assembly.header)
                else:
                    assembly.add(message)
                if self._uploading_bytes > 2 * self._max_bytes:
                    raise UnavailableError("the server receives too many versions at once; publish this one again")
            return await self._in_thread(_checked_pieces, assembly)
        finally:
            self._uploading_bytes -= num_bytes

    async def _next_piece(self, messages: AsyncIterator[bytes]) -> bytes:
        try:
            async with asyncio.timeout(self._timeout_s):
                return await anext(messages)
        except StopAsyncIteration:
            raise WireError("the stream ended in the middle of a version; publish it again") from None
        except TimeoutError:
            raise UnavailableError(
                f"no piece of the version came for {self._timeout_s:g} s; publish it again"
            ) from None

    async def _save(self, content: Sequence[bytes], version: int | None) -> int:
        async with self._saving:
            self._check_number(version)  # another one may have been faster
            number = self.version + 1 if version is None else version
            await self._in_thread(self._write, number, content)
            self.version = max(self.version, number)
            async with self._newest_changed:
                self._newest = SavedVersion(number=number, pieces=content)
                self._newest_changed.notify_all()
        return number

    def _write(self, version: int, content: Sequence[bytes]) -> None:
        path = parameters_path(self._store, version)
        with store_errors(path, "write"):
            make_directory_durably(path.parent)
            write_durably(path, content)
        for older in path.parent.iterdir():  # files that a crash left unfinished, too
            if older != path:
                with suppress(OSError):  # it is tried again with the next version
                    older.unlink()

    # ---- to the actors

    async def newest(self, *, newer_than: int) -> SavedVersion:
        """Wait for a version newer than this."""
        async with self._newest_changed:
            await self._newest_changed.wait_for(lambda: self._newest is not None and self._newest.number > newer_than)
            assert self._newest is not None
            return self._newest


def parameter_problems(store: Path) -> list[str]:
    """What is wrong with the versions of the parameters that a store has on disk."""
    problems = []
    for path in parameter_files(store):
        try:
            _read_pieces(path)
        except FileNotFoundError:
            continue  # a newer version has taken its place
        except (WireError, OSError) as error:
            problems.append(f"{path}: damaged ({error}), so a server does not send it; publish again")
    return problems


def _checked_pieces(assembly: Assembly) -> list[bytes]:
    found = assembly.pieces()
    check_flags(assembly)
    return found


def _read_pieces(path: Path) -> list[bytes]:
    content = path.read_bytes()
    header_bytes = int.from_bytes(content[:8], "little") + 8
    assembly = Assembly(content[:header_bytes], max_bytes=len(content))
    for piece in list(pieces([content[:header_bytes], content[header_bytes:]]))[1:]:
        assembly.add(piece)
    if not assembly.complete:
        raise WireError("it is cut short")
    check_parameters(assembly.header, new=False)
    return _checked_pieces(assembly)
