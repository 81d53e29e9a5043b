"""Parameters: versions of a policy's weights, from the learner to every actor.

The server gives each publication the next version, keeps the newest on disk and in memory, and sends it to all who
listen, and to each who connects. A version is seen whole or not at all, and never an older one after a newer.

| loop | takes from | blocks on | woken by |
|---|---|---|---|
| Subscription's thread | the server's stream | that stream; a pause after an error | the server; `close` |
| `Subscription.wait` | - | a newer version | the thread above |
"""

from __future__ import annotations

import asyncio
import json
import logging
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from understudy.core import StoreError, UnavailableError, UnderstudyError, WireError
from understudy.core import tree as trees
from understudy.core.closing import Closes
from understudy.core.spec import describe
from understudy.core.tree import Tree
from understudy.durable import files
from understudy.replay.format.layout import SAFETENSORS_DTYPES
from understudy.service.client.connection import FIRST_PAUSE_S, LONGEST_PAUSE_S, Connection
from understudy.service.wire.message import Assembly, Buffer, gather, pack, pieces, to_bfloat16
from understudy.service.wire.protocol import PUBLISH, SUBSCRIBE, from_json, to_json

logger = logging.getLogger(__name__)
InThread: TypeAlias = Callable[..., Awaitable[Any]]

NO_PARAMETERS = 0  # versions count from 1


@dataclass(frozen=True, kw_only=True, eq=False)
class Parameters:
    """One published version. Stamp `version` on each step that the policy chooses (`Step.policy_version`)."""

    version: int
    tree: Tree  # of arrays
    metadata: Mapping[str, str] = field(default_factory=dict)  # what the learner said of it


def encode_parameters(tree: Tree, metadata: Mapping[str, str], *, bfloat16: bool) -> list[Buffer]:
    """A version as the buffers of a message; with `bfloat16`, float32 and float64 go in two bytes a number."""
    arrays = {}
    for path, leaf in trees.leaves(tree):
        arrays[path] = array = np.asarray(leaf)
        if array.dtype.name not in SAFETENSORS_DTYPES:
            raise StoreError(
                f"{path}: expected an array of numbers, got {describe(array)}; convert it, or leave it out"
            )
    _refuse_empty(tree, "parameters")
    if "" in arrays:
        raise StoreError("parameters: expected a dict of arrays, got one array; give it a name")
    halved = frozenset(p for p, a in arrays.items() if bfloat16 and a.dtype in (np.float32, np.float64))
    arrays |= {path: to_bfloat16(arrays[path]) for path in halved}
    return pack({"said": json.dumps(dict(metadata))}, arrays, bfloat16=halved)


def _refuse_empty(tree: Tree, path: str) -> None:
    """A dict without arrays would not arrive, and the tree would be another there."""
    if isinstance(tree, Mapping):
        if not tree:
            raise StoreError(f"{path}: expected at least one array, got none; leave the empty dict out")
        for name, child in tree.items():
            _refuse_empty(child, f"{path}/{name}")


# ---- the server's side


class Publication:
    """A version on its way through a server: its pieces are sent on as they come, its number when all is on disk."""

    def __init__(self, pieces: Sequence[bytes] = (), version: int | None = None):
        self._pieces = list(pieces)
        self._complete = version is not None
        self._version = version
        self._failed = False
        self._news = asyncio.Condition()

    @property
    def number(self) -> int | None:
        """Its version, if that is known yet."""
        return self._version

    async def add(self, piece: bytes) -> None:
        async with self._news:
            self._pieces.append(piece)
            self._news.notify_all()

    async def complete(self) -> None:
        async with self._news:
            self._complete = True
            self._news.notify_all()

    async def settle(self, version: int | None) -> None:
        """Give it its number; None if it came to nothing."""
        async with self._news:
            self._version, self._failed = version, version is None
            self._news.notify_all()

    async def pieces(self) -> AsyncIterator[bytes]:
        number = 0
        while True:
            async with self._news:
                await self._news.wait_for(partial(self._has, number))
            if self._failed:
                raise UnavailableError("a publication was broken off; connect again")
            if number == len(self._pieces):
                return
            yield self._pieces[number]
            number += 1

    def _has(self, number: int) -> bool:
        """Whether there is a piece of this number, or known that there will be none."""
        return self._failed or self._complete or number < len(self._pieces)

    async def version(self) -> int:
        """Its number, once it is on disk."""
        async with self._news:
            await self._news.wait_for(lambda: self._failed or self._version is not None)
        if self._version is None:
            raise UnavailableError("a publication was broken off; connect again")
        return self._version


class Board:
    """The newest version, for all streams of a server. Its methods run in the event loop."""

    def __init__(self, directory: Path, store_id: str, in_thread: InThread):
        self._directory = directory
        self.store_id = store_id
        self._in_thread = in_thread
        self.version = NO_PARAMETERS
        self._newest: Publication | None = None  # perhaps still on its way
        self._newer = asyncio.Condition()
        self._publishing = asyncio.Lock()
        self._load()

    def _load(self) -> None:
        """Go on from the version on disk. What cannot be read is not sent, but its number is not used again."""
        for path in sorted(self._directory.glob("*.safetensors")):
            self.version = int(path.stem)
            try:
                self._newest = Publication(_read_pieces(path), self.version)
            except (WireError, OSError) as error:
                logger.error("%s: not a version that can be sent (%s)", path, error)
                self._newest = None

    async def publish(self, messages: AsyncIterator[bytes], version: int | None, max_bytes: int) -> int:
        """Take a version in, to those who listen and to the disk; returns its number."""
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
                await publication.settle(None)
                raise
            self.version = number
            await publication.settle(number)
        return number

    async def _receive(self, messages: AsyncIterator[bytes], publication: Publication, max_bytes: int) -> Assembly:
        assembly: Assembly | None = None
        async for message in messages:
            if assembly is None:
                assembly = Assembly(message, max_bytes=max_bytes)
                async with self._newer:
                    self._newest = publication
                    self._newer.notify_all()
            else:
                assembly.add(message)
            await publication.add(message)
            if assembly.complete:
                await publication.complete()
                return assembly
        raise WireError("the stream ended in the middle of a version; publish it again")

    def _save(self, version: int, content: Sequence[bytes]) -> None:
        path = self._directory / f"{version:012d}.safetensors"
        with files.naming(path, "create"):
            self._directory.mkdir(exist_ok=True)
        files.replace_durably(path, content)
        for older in sorted(self._directory.glob("*.safetensors"))[:-1]:
            older.unlink()

    async def newest(self, *, have: int) -> Publication:
        """Wait for another version than the one that is there already."""
        async with self._newer:
            await self._newer.wait_for(lambda: self._newest is not None and self._newest.number != have)
            assert self._newest is not None
            return self._newest


def _read_pieces(path: Path) -> list[bytes]:
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little") + 8
    assembly = Assembly(content[:length], max_bytes=len(content))
    for piece in list(pieces([content[:length], content[length:]]))[1:]:
        assembly.add(piece)
    if not assembly.complete:
        raise WireError("it is cut short")
    return assembly.pieces()


# ---- the clients' side


def publish(
    connection: Connection, buffers: Sequence[Buffer], version: int | None, timeout_s: float, *, wait: bool = True
) -> int:
    """Send a version to a server; returns its number when the server has it on disk."""

    def messages() -> Iterator[bytes]:
        yield to_json({"version": version})
        yield from pieces(buffers)

    return int(connection.upload(PUBLISH, messages(), timeout_s=timeout_s, wait=wait)["version"])


class Subscription(Closes):
    """The newest parameters, kept up to date by a thread. Use as a context manager, or call `close`.

    It listens to one server; when that is away, to the next of `choose()`. What one has missed is not taken for news.
    """

    def __init__(self, choose: Callable[[], Sequence[Connection]], *, max_bytes: int):
        self._choose = choose
        self._max_bytes = max_bytes
        self._changed = threading.Condition()
        self._latest: Parameters | None = None
        self._heard: dict[str, tuple[str, int]] = {}  # by server: its store, and the version that came from it last
        self._turn = 0  # which of the servers is listened to
        self._problem: UnderstudyError | None = None
        self._fatal = False
        self._closed = False
        self._stream: Any = None
        self._thread = threading.Thread(target=self._run, name="parameters", daemon=True)
        self._thread.start()

    @property
    def latest(self) -> Parameters | None:
        """The newest version that is here, whole; None before the first."""
        return self._latest

    @property
    def problem(self) -> str | None:
        """Why the server cannot be heard now."""
        return None if self._problem is None else str(self._problem)

    def wait(self, newer_than: Parameters | None = None, timeout_s: float | None = None) -> Parameters | None:
        """The newest version, once there is another than `newer_than`; None if the time is over before."""
        with self._changed:
            self._changed.wait_for(lambda: self._fatal or self._closed or self._is_news(newer_than), timeout_s)
            if self._fatal and self._problem is not None:
                raise self._problem.with_traceback(None)
            return self._latest if self._is_news(newer_than) else None

    def _is_news(self, known: Parameters | None) -> bool:
        return self._latest is not None and self._latest is not known

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            if self._stream is not None:
                self._stream.cancel()
        self._thread.join()

    def _run(self) -> None:
        pause_s = FIRST_PAUSE_S
        while not self._closed:
            before = self._latest
            try:
                self._listen()
            except StopIteration:  # the server ended the stream; it is stopping
                pass
            except (UnavailableError, WireError) as error:
                with self._changed:
                    self._problem = error
            except UnderstudyError as error:
                with self._changed:
                    self._problem, self._fatal = error, True
                    self._changed.notify_all()
                return
            self._turn += 1
            pause_s = FIRST_PAUSE_S if self._latest is not before else min(pause_s * 2, LONGEST_PAUSE_S)
            with self._changed:
                self._changed.wait_for(lambda: self._closed, pause_s)

    def _listen(self) -> None:
        servers = self._choose()
        server = servers[self._turn % len(servers)]
        store, have = self._heard.get(server.name, ("", NO_PARAMETERS))
        stream = server.listen(SUBSCRIBE, {"have": have, "store": store})
        with self._changed:
            self._stream = stream
            if self._closed:
                stream.cancel()
        while True:
            metadata, arrays = gather(stream, max_bytes=self._max_bytes)
            news = from_json(next(stream))
            said = json.loads(metadata.get("said", "{}"))
            found = Parameters(version=int(news["version"]), tree=trees.unflatten(arrays), metadata=said)
            with self._changed:
                store, _ = self._heard.get(server.name, (str(news["store"]), 0))
                self._heard[server.name] = (str(news["store"]), found.version)
                if self._latest is None or found.version > self._latest.version or store != news["store"]:
                    self._latest = found  # an older one counts only from a server that has another store than it had
                self._problem = None
                self._changed.notify_all()
