"""ParameterStore: the newest version of a policy's weights on a server, from the learner to every actor.

The server gives each publication the next version, keeps the newest on disk and in memory, and sends it to every
subscriber, and to each that connects later. A subscriber gets a version whole or not at all, and never an older one
after a newer.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path
from typing import ParamSpec, Protocol, TypeVar

from understudy.core import StoreError, UnavailableError, WireError
from understudy.durable.errors import store_errors
from understudy.durable.files import write_durably
from understudy.service.wire.message import Assembly, pieces
from understudy.service.wire.parameters import NO_PARAMETERS

logger = logging.getLogger(__name__)
P = ParamSpec("P")
T = TypeVar("T")

_SUFFIX = ".safetensors"


class InThread(Protocol):
    """Runs a function in a thread of a server while the event loop goes on."""

    def __call__(self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Awaitable[T]: ...


class Publication:
    """A version on its way through a server. Its pieces are sent on as they arrive, its number once all is on disk."""

    def __init__(self, pieces: Sequence[bytes] = (), version: int | None = None):
        self._pieces = list(pieces)
        self._complete = version is not None
        self._version = version
        self._failed = False
        self._changed = asyncio.Condition()

    @property
    def number(self) -> int | None:
        """Its version; None until that is on disk."""
        return self._version

    async def add(self, piece: bytes) -> None:
        async with self._changed:
            self._pieces.append(piece)
            self._changed.notify_all()

    async def complete(self) -> None:
        """No more pieces will be added."""
        async with self._changed:
            self._complete = True
            self._changed.notify_all()

    async def finish(self, version: int | None) -> None:
        """Give it its number, or None if the publication failed."""
        async with self._changed:
            self._version, self._failed = version, version is None
            self._changed.notify_all()

    async def pieces(self) -> AsyncIterator[bytes]:
        """All pieces, each as soon as it is here."""
        number = 0
        while True:
            async with self._changed:
                await self._changed.wait_for(partial(self._is_decided, number))
            if self._failed:
                raise UnavailableError("the learner broke off a publication; subscribe again")
            if number == len(self._pieces):
                return
            yield self._pieces[number]
            number += 1

    def _is_decided(self, number: int) -> bool:
        """Whether the piece of this number is here, or will never be."""
        return self._failed or self._complete or number < len(self._pieces)

    async def version(self) -> int:
        """Wait until it is on disk; returns its number."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._failed or self._version is not None)
        if self._version is None:
            raise UnavailableError("the learner broke off a publication; subscribe again")
        return self._version


class ParameterStore:
    """The newest version, for all streams of a server. Its coroutines run in the server's event loop."""

    def __init__(self, directory: Path, store_id: str, in_thread: InThread):
        self._directory = directory
        self.store_id = store_id
        self._in_thread = in_thread
        self.version = NO_PARAMETERS
        self._newest: Publication | None = None  # perhaps still on its way
        self._newest_changed = asyncio.Condition()
        self._publishing = asyncio.Lock()
        self._load()

    def _load(self) -> None:
        """Resume with the version on disk. A file that cannot be read is not sent, but its number is not used again."""
        for path in sorted(self._directory.glob(f"*{_SUFFIX}")):
            self.version = int(path.stem)
            try:
                self._newest = Publication(_read_pieces(path), self.version)
            except (WireError, OSError) as error:
                logger.error("%s: not a readable version of parameters (%s); subscribers get the next one", path, error)
                self._newest = None

    async def publish(self, messages: AsyncIterator[bytes], version: int | None, max_bytes: int) -> int:
        """Receive a version, send it on to subscribers and save it; returns its number."""
        async with self._publishing:
            number = self.version + 1 if version is None else version
            if number <= self.version:
                raise StoreError(f"version: {self.version} is published already, got {number}; publish newer ones only")
            publication, before = Publication(), self._newest
            try:
                assembly = await self._receive(messages, publication, max_bytes)
                await self._in_thread(self._save, number, await self._in_thread(assembly.pieces))
            except BaseException:
                self._newest = before
                await publication.finish(None)
                raise
            self.version = number
            await publication.finish(number)
        return number

    async def _receive(self, messages: AsyncIterator[bytes], publication: Publication, max_bytes: int) -> Assembly:
        assembly: Assembly | None = None
        async for message in messages:
            if assembly is None:
                assembly = Assembly(message, max_bytes=max_bytes)
                async with self._newest_changed:
                    self._newest = publication
                    self._newest_changed.notify_all()
            else:
                assembly.add(message)
            await publication.add(message)
            if assembly.complete:
                await publication.complete()
                return assembly
        raise WireError("the stream ended in the middle of a version; publish it again")

    def _save(self, version: int, content: Sequence[bytes]) -> None:
        path = self._directory / f"{version:012d}{_SUFFIX}"
        with store_errors(path, "write"):
            self._directory.mkdir(exist_ok=True)
            write_durably(path, content)
        for older in sorted(self._directory.glob(f"*{_SUFFIX}"))[:-1]:
            older.unlink()

    async def newest(self, *, have: int) -> Publication:
        """Wait for another version than `have`."""
        async with self._newest_changed:
            await self._newest_changed.wait_for(lambda: self._newest is not None and self._newest.number != have)
            assert self._newest is not None
            return self._newest


def _read_pieces(path: Path) -> list[bytes]:
    content = path.read_bytes()
    header_bytes = int.from_bytes(content[:8], "little") + 8
    assembly = Assembly(content[:header_bytes], max_bytes=len(content))
    for piece in list(pieces([content[:header_bytes], content[header_bytes:]]))[1:]:
        assembly.add(piece)
    if not assembly.complete:
        raise WireError("it is cut short")
    return assembly.pieces()
