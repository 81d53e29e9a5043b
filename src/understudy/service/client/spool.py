"""Spool: what a writer recorded and no server has acknowledged yet, on disk or in memory.

    spool/
      lock                              held by the process that writes
      00000003-1f0c.../                 a log: the chunks of one incarnation of a writer
        hello.json                      the writer's name, and the spec of its steps
        route.json                      the shard that its chunks go to, once that is decided
        00000041.safetensors            chunk 41, byte for byte as it is sent

A chunk is recorded when its file and the file's name are synced. It is removed when the server has acknowledged it. So
what a crash leaves behind still has to be sent; a server stores a chunk that is sent twice only once.
"""

from __future__ import annotations

import json
import shutil
import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from understudy.core import DamageError, StepSpec, StoreFormatError, WireError
from understudy.durable.errors import store_errors
from understudy.durable.files import create_durably, sync_directory, write_durably
from understudy.durable.lock import WriterLock
from understudy.replay.format.records import info_from_json, info_to_json
from understudy.replay.write.writer import info_after_gap
from understudy.service.wire.message import MAX_HEADER_BYTES, Buffer, check_of, pack, parse_header, size_of, unpack

_HELLO, _ROUTE, _SUFFIX = "hello.json", "route.json", ".safetensors"


@dataclass(frozen=True, kw_only=True)
class Route:
    """The shard that a log goes to, and the writer's name there. Both change if the shard is lost or the name taken.

    Chunk `base` is the first of this route. If it continues an episode that began on another route, the rows of that
    episode are numbered from `shift` on, so that here it is an episode of its own.
    """

    writer: str
    shard: str = ""  # its name, which outlives its address; "": not decided yet
    base: int = 0
    episode: int = -1
    shift: int = 0


@dataclass(frozen=True)
class _RecordedChunk:
    num_bytes: int
    num_rows: int
    message: bytes | None = None  # without a directory only


class SpoolLog:
    """The chunks of one incarnation, numbered from 0. Any thread may call."""

    def __init__(self, *, incarnation: str, spec: StepSpec, route: Route, directory: Path | None = None):
        self.incarnation = incarnation
        self.spec = spec
        self.route = route
        self.directory = directory
        self._chunks: OrderedDict[int, _RecordedChunk] = OrderedDict()
        self._lock = threading.Lock()
        self.highest = -1  # the number of the newest chunk that it ever had
        self.num_bytes = 0
        self.num_rows = 0

    @property
    def first(self) -> int | None:
        """The number of the oldest chunk; None if the log is empty."""
        with self._lock:
            return next(iter(self._chunks), None)

    def __contains__(self, seq: int) -> bool:
        return seq in self._chunks

    def __len__(self) -> int:
        return len(self._chunks)

    def put(self, seq: int, buffers: Sequence[Buffer], num_rows: int) -> None:
        """Record a chunk. When this returns and there is a directory, the chunk survives a kill and a power cut."""
        message = None
        if self.directory is None:
            message = b"".join(buffers)
        else:
            path = self.directory / f"{seq:08d}{_SUFFIX}"
            with store_errors(path, "write"):
                create_durably(path, buffers)
        self._add(seq, _RecordedChunk(size_of(buffers), num_rows, message))

    def _add(self, seq: int, chunk: _RecordedChunk) -> None:
        with self._lock:
            self._chunks[seq] = chunk
            self.highest = max(self.highest, seq)
            self.num_bytes += chunk.num_bytes
            self.num_rows += chunk.num_rows

    def read(self, seq: int) -> bytes:
        """A chunk as it is sent."""
        message = self._chunks[seq].message
        if message is None:
            assert self.directory is not None
            message = _read(self.directory / f"{seq:08d}{_SUFFIX}")
        return message if self.route.base == 0 else self._renumbered(message)

    def _renumbered(self, message: bytes) -> bytes:
        """The chunk with the numbers that it has on its new route."""
        metadata, arrays = unpack(message)
        parts = json.loads(metadata["parts"])
        for part in parts:
            if part[0] == self.route.episode:
                part[1] -= self.route.shift
                if self.route.shift:
                    info = info_after_gap(info_from_json(part[4]), self.route.shift)
                    part[4] = info_to_json(info)
        if parts[0][0] == self.route.episode and parts[0][1:4] == [0, 0, "cut"]:
            del parts[0]  # the end of an episode whose rows all went to another shard
        metadata |= {"seq": str(int(metadata["seq"]) - self.route.base), "parts": json.dumps(parts)}
        return b"".join(pack(metadata, arrays))

    def check(self, seq: int) -> None:
        """Raise a DamageError if the file of this chunk is damaged."""
        try:
            unpack(self.read(seq))
        except WireError as error:
            raise DamageError(
                f"{self.directory}: chunk {seq} is not as it was recorded ({error}); move its file away to deliver the "
                f"others"
            ) from None

    def last_common(self, last_seq: int, checks: Sequence[int]) -> int:
        """The last chunk up to which a server has the chunks of this log; below `last_seq` if it has those of a copy.

        `last_seq` is the server's last chunk, and `checks` are the checksums of its last ones, the newest last. What
        cannot be compared counts as the same if a chunk that can be compared is.
        """
        first = self.first
        if not checks or first is None or first > last_seq:
            return last_seq
        oldest = last_seq - len(checks) + 1
        common = None
        for seq, check in enumerate(checks, oldest):
            mine = self._check_of(seq)
            if mine is not None and mine != check:
                return first - 1 if common is None else common
            common = common if mine is None else seq
        return first - 1 if self.highest < oldest else last_seq

    def _check_of(self, seq: int) -> int | None:
        """The checksum of a chunk as it is sent; None if the chunk is not here, or is damaged."""
        try:
            message = self.read(seq)
            unpack(message)
        except (KeyError, WireError):
            return None
        return check_of(message)

    def acknowledge(self, seq: int) -> int:
        """Remove all chunks up to `seq`; returns how many rows they had."""
        with self._lock:
            acknowledged = [number for number in self._chunks if number <= seq]
            chunks = [self._chunks.pop(number) for number in acknowledged]
            num_rows = sum(chunk.num_rows for chunk in chunks)
            self.num_bytes -= sum(chunk.num_bytes for chunk in chunks)
            self.num_rows -= num_rows
        if self.directory is not None:
            for number in acknowledged:
                (self.directory / f"{number:08d}{_SUFFIX}").unlink(missing_ok=True)
        return num_rows

    def assign(self, shard: str) -> None:
        """Save, before anything is sent, which shard it goes to."""
        self._save_route(replace(self.route, shard=shard))

    def reroute(self, *, writer: str, shard: str) -> None:
        """Send what is left to another shard, or under another writer's name."""
        first = self.first
        if first is None:
            route = replace(self.route, writer=writer, shard=shard)
        else:
            self.route = replace(self.route, base=0)
            parts = json.loads(parse_header(self.read(first)).metadata["parts"])
            route = Route(writer=writer, shard=shard, base=first, episode=parts[0][0], shift=parts[0][1])
        self._save_route(route)

    def _save_route(self, route: Route) -> None:
        self.route = route
        if self.directory is not None:
            path = self.directory / _ROUTE
            with store_errors(path, "write"):
                write_durably(path, json.dumps(asdict(self.route)).encode())

    def remove(self) -> None:
        """Remove an empty log durably, before the server may begin with the next one."""
        if self.directory is not None and self.directory.exists():
            with store_errors(self.directory, "remove"):
                shutil.rmtree(self.directory)
                sync_directory(self.directory.parent)


class Spool:
    """The logs of one writer's name, the oldest first. With `directory` None they are in memory only."""

    def __init__(self, directory: Path | None):
        self.directory = directory
        self._file_lock: WriterLock | None = None
        self.logs: list[SpoolLog] = []
        self._next_number = 1
        if directory is not None:
            with store_errors(directory, "create"):
                directory.mkdir(parents=True, exist_ok=True)
            self._file_lock = WriterLock(directory / "lock")
            try:
                self._load(directory)
            except BaseException:
                self._file_lock.release()
                raise

    def begin(self, writer: str, incarnation: str, spec: StepSpec) -> SpoolLog:
        """Add a new log after all others."""
        directory = None
        if self.directory is not None:
            directory = self.directory / f"{self._next_number:08d}-{incarnation}"
            hello = {"writer": writer, "incarnation": incarnation, "spec": spec.to_json()}
            with store_errors(directory, "create"):
                directory.mkdir()
                write_durably(directory / _HELLO, json.dumps(hello).encode())
                sync_directory(self.directory)
        self._next_number += 1
        log = SpoolLog(incarnation=incarnation, spec=spec, route=Route(writer=writer), directory=directory)
        self.logs.append(log)
        return log

    @property
    def num_bytes(self) -> int:
        return sum(log.num_bytes for log in self.logs)

    @property
    def num_rows(self) -> int:
        return sum(log.num_rows for log in self.logs)

    @property
    def num_chunks(self) -> int:
        """Some chunks have no rows and only end an episode."""
        return sum(len(log) for log in self.logs)

    def close(self) -> None:
        """Remove empty logs and release the directory."""
        for log in self.logs:
            if not len(log):
                log.remove()
        if self._file_lock is not None:
            self._file_lock.release()

    def _load(self, directory: Path) -> None:
        """Read the logs that earlier processes left."""
        for path in sorted(path for path in directory.iterdir() if path.is_dir()):
            number, _, incarnation = path.name.partition("-")
            expected = {_HELLO, _ROUTE, *(file.name for file in path.glob(f"*{_SUFFIX}") if file.stem.isdigit())}
            if not (len(number) == 8 and number.isdigit() and incarnation) or any(
                file.name not in expected and not file.name.startswith((_HELLO, _ROUTE)) for file in path.iterdir()
            ):
                raise StoreFormatError(
                    f"{path}: is not part of a spool; choose a directory for the spool that holds nothing else"
                )
            self._next_number = max(self._next_number, int(number) + 1)
            log = _load_log(path, incarnation)
            if log is None:
                shutil.rmtree(path)
            else:
                self.logs.append(log)


def _load_log(directory: Path, incarnation: str) -> SpoolLog | None:
    """A log that an earlier process left; None if it is empty."""
    chunks = sorted(path for path in directory.glob(f"*{_SUFFIX}") if path.stem.isdigit())
    if chunks and not _is_whole(chunks[-1]):  # a crash while it was written: nobody was told that it is recorded
        chunks.pop().unlink()
    if not chunks:
        return None
    try:
        hello = json.loads((directory / _HELLO).read_text())
        route = Route(writer=hello["writer"])
        if (directory / _ROUTE).exists():
            route = _route_from_json(json.loads((directory / _ROUTE).read_text()))
        spec = StepSpec.from_json(hello["spec"])
        log = SpoolLog(incarnation=incarnation, spec=spec, route=route, directory=directory)
        for path in chunks:
            with path.open("rb") as file:
                header = parse_header(file.read(MAX_HEADER_BYTES + 8))
            num_rows = sum(part[2] for part in json.loads(header.metadata["parts"]))
            log._add(int(path.stem), _RecordedChunk(path.stat().st_size, num_rows))
    except (ValueError, KeyError, TypeError, OSError, WireError) as error:
        raise DamageError(
            f"{directory}: not a readable part of a spool ({error}); move it away to deliver the others"
        ) from None
    return log


def _route_from_json(value: dict[str, Any]) -> Route:
    """A saved route. Before shards had names it held an address, which was the shard's name."""
    if "address" in value:
        value["shard"] = value.pop("address")
    return Route(**value)


def _is_whole(path: Path) -> bool:
    try:
        unpack(_read(path))
    except WireError:
        return False
    return True


def _read(path: Path) -> bytes:
    with store_errors(path, "read"):
        return path.read_bytes()
