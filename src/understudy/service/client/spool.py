"""Spool: what a writer recorded and no server has acknowledged yet, on disk or in memory.

    spool/
      lock                              held by the process that writes
      00000003-1f0c.../                 a log: the chunks of one incarnation of a writer
        hello.json                      the writer's name, and the spec of its steps
        route.json                      the shard that its chunks go to, once that is decided
        hello.json.check, ...           copies of these two with a checksum; what is damaged is read from the other
        00000041.safetensors            chunk 41, byte for byte as it is sent
      damaged-00000002-8a3e.../         chunks of that log that were not as they were recorded; kept for people

A chunk is recorded when its file and the file's name are synced. It is removed when the server has acknowledged it. So
what a crash leaves behind still has to be sent; a server stores a chunk that is sent twice only once. A damaged chunk
is set aside, logged and counted, and all others are sent.

A chunk that is *held* is in memory only: it is sent from there, and recorded unless the server acknowledges it first.
Chunks are recorded in their order, so what is on disk never lacks one that is older than another.
"""

from __future__ import annotations

import errno
import json
import logging
import shutil
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import xxhash

from understudy.core import DamageError, SpecError, StepSpec, StoreFormatError, WireError
from understudy.durable.errors import store_errors
from understudy.durable.files import create_durably, make_directory_durably, sync_directory, write_durably
from understudy.durable.lock import WriterLock, lock_is_held
from understudy.replay.format.records import info_from_json, info_to_json
from understudy.replay.write.writer import info_after_gap
from understudy.service.wire.message import MAX_HEADER_BYTES, Buffer, check_of, pack, parse_header, size_of, unpack

logger = logging.getLogger(__name__)

_HELLO, _ROUTE, _SUFFIX = "hello.json", "route.json", ".safetensors"
_CHECKED = ".check"  # after the name of a description: its copy with a checksum
_DAMAGED = "damaged-"  # before the name of a log: what was set aside of it


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
    message: bytes | None = None  # without a directory, or while it is held


class SpoolLog:
    """The chunks of one incarnation, numbered from 0. Any thread may call."""

    def __init__(self, *, incarnation: str, spec: StepSpec, route: Route, directory: Path | None = None):
        self.incarnation = incarnation
        self.spec = spec
        self.route = route
        self.directory = directory
        self._chunks: OrderedDict[int, _RecordedChunk] = OrderedDict()
        self._held: OrderedDict[int, float] = OrderedDict()  # when each was held, on the monotonic clock
        self._removed = False  # a file, since the directory was synced
        self._lock = threading.Lock()
        self.highest = -1  # the number of the newest chunk that it ever had
        self.num_bytes = 0
        self.num_rows = 0
        self.num_damaged = 0  # chunks that were set aside

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
            self._create(seq, buffers)
        self._add(seq, _RecordedChunk(size_of(buffers), num_rows, message))

    def hold(self, seq: int, buffers: Sequence[Buffer], num_rows: int) -> None:
        """Keep a chunk in memory until `record`, or until it is acknowledged."""
        assert self.directory is not None
        if self._removed:  # a name that comes back after a power cut must be among the server's last chunks
            self._removed = False
            with store_errors(self.directory, "fsync"):
                sync_directory(self.directory)
        self._add(seq, _RecordedChunk(size_of(buffers), num_rows, b"".join(buffers)), held=True)

    def record(self, seq: int) -> None:
        """Record the oldest held chunk, unless it is acknowledged meanwhile."""
        chunk = self._chunks.get(seq)
        if chunk is None or chunk.message is None:
            return
        self._create(seq, [chunk.message])
        with self._lock:
            self._held.pop(seq, None)
            acknowledged = seq not in self._chunks
            if not acknowledged:
                self._chunks[seq] = replace(chunk, message=None)
        if acknowledged:
            self._unlink(seq)

    def _create(self, seq: int, buffers: Sequence[Buffer]) -> None:
        path = self._path(seq)
        self._removed = False
        with store_errors(path, "write"):
            create_durably(path, buffers)

    def _unlink(self, seq: int) -> None:
        path = self._path(seq)
        with store_errors(path, "remove"):
            path.unlink(missing_ok=True)
        self._removed = True

    @property
    def held(self) -> tuple[int, float] | None:
        """The oldest chunk that is held, and since when; None if none is."""
        with self._lock:
            return next(iter(self._held.items()), None)

    @property
    def num_held(self) -> int:
        return len(self._held)

    @property
    def held_rows(self) -> int:
        with self._lock:
            return sum(self._chunks[seq].num_rows for seq in self._held)

    def _add(self, seq: int, chunk: _RecordedChunk, *, held: bool = False) -> None:
        with self._lock:
            if held:
                self._held[seq] = time.monotonic()
            self._chunks[seq] = chunk
            self.highest = max(self.highest, seq)
            self.num_bytes += chunk.num_bytes
            self.num_rows += chunk.num_rows

    def read(self, seq: int) -> bytes:
        """A chunk as it is sent; a DamageError if its file cannot be read. Its checksum is left to the receiver."""
        message = self._recorded(seq)
        try:
            return message if self.route.base == 0 else self._renumbered(message)
        except WireError as error:
            raise DamageError(f"{self._path(seq)}: is not as it was recorded ({error})") from None

    def _recorded(self, seq: int) -> bytes:
        message = self._chunks[seq].message
        return _read(self._path(seq)) if message is None else message

    def _path(self, seq: int) -> Path:
        assert self.directory is not None
        return self.directory / f"{seq:08d}{_SUFFIX}"

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

    def set_damaged_aside(self, num_chunks: int) -> int:
        """Check the oldest chunks, and set aside those that are not as they were recorded; returns how many."""
        with self._lock:
            oldest = list(islice(self._chunks, num_chunks))
        return sum(self._set_aside_if_damaged(seq) for seq in oldest)

    def _set_aside_if_damaged(self, seq: int) -> bool:
        try:
            unpack(self.read(seq))
        except (WireError, DamageError) as error:
            self.set_aside(seq, error)
            return True
        return False

    def set_aside(self, seq: int, reason: Exception) -> None:
        """Keep the file of a damaged chunk where people find it, and send it no more."""
        assert self.directory is not None
        kept = self.directory.with_name(f"{_DAMAGED}{self.directory.name}")
        with self._lock:
            chunk = self._chunks.pop(seq, None)
            self.highest = max(self.highest, seq)
            self.num_damaged += 1
            if chunk is not None:
                self.num_bytes -= chunk.num_bytes
                self.num_rows -= chunk.num_rows
        with store_errors(kept, "create"):
            kept.mkdir(exist_ok=True)
            for name in (_HELLO, _HELLO + _CHECKED):  # without the spec, nobody can read a chunk
                if (self.directory / name).exists():
                    shutil.copyfile(self.directory / name, kept / name)
            self._path(seq).replace(kept / self._path(seq).name)
            for directory in (kept, self.directory, kept.parent):
                sync_directory(directory)
        logger.error(
            "%s: chunk %d is not as it was recorded (%s); it is kept in %s, and all others are delivered",
            self.directory,
            seq,
            reason,
            kept,
        )

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
        except (KeyError, WireError, DamageError):
            return None
        return check_of(message)

    def acknowledge(self, seq: int) -> int:
        """Remove all chunks up to `seq`; returns how many rows they had."""
        with self._lock:
            acknowledged = [number for number in self._chunks if number <= seq]
            chunks = [self._chunks.pop(number) for number in acknowledged]
            for number in acknowledged:
                self._held.pop(number, None)
            num_rows = sum(chunk.num_rows for chunk in chunks)
            self.num_bytes -= sum(chunk.num_bytes for chunk in chunks)
            self.num_rows -= num_rows
        if self.directory is not None:
            for number, chunk in zip(acknowledged, chunks, strict=True):
                if chunk.message is None:
                    self._unlink(number)
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
            metadata, _ = unpack(self._recorded(first))  # checked: what it says of its rows is saved
            parts = json.loads(metadata["parts"])
            route = Route(writer=writer, shard=shard, base=first, episode=parts[0][0], shift=parts[0][1])
        self._save_route(route)

    def _save_route(self, route: Route) -> None:
        self.route = route
        if self.directory is not None:
            _write_description(self.directory / _ROUTE, asdict(self.route))

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
        self._every_log: list[SpoolLog] = []  # with those that are delivered and gone
        self._num_damaged_before = 0
        self._next_number = 1
        if directory is not None:
            with store_errors(directory, "create"):
                make_directory_durably(directory)
            self._file_lock = WriterLock(directory / "lock")
            try:
                with store_errors(directory, "open"):
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
                _write_description(directory / _HELLO, hello)
                sync_directory(self.directory)
        self._next_number += 1
        log = SpoolLog(incarnation=incarnation, spec=spec, route=Route(writer=writer), directory=directory)
        self.logs.append(log)
        self._every_log.append(log)
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

    @property
    def num_damaged(self) -> int:
        """Chunks that were set aside, by this process or an earlier one, and are still in the directory."""
        return self._num_damaged_before + sum(log.num_damaged for log in self._every_log)

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
            if path.name.startswith(_DAMAGED):
                self._num_damaged_before += len(_chunk_files(path))
                continue
            number, _, incarnation = path.name.partition("-")
            expected = {_HELLO, _ROUTE, *(file.name for file in path.glob(f"*{_SUFFIX}") if file.stem.isdigit())}
            if not (len(number) == 8 and number.isdigit() and incarnation) or any(
                file.name not in expected and not file.name.startswith((_HELLO, _ROUTE)) for file in path.iterdir()
            ):
                raise StoreFormatError(
                    f"{path}: is not part of a spool; choose a directory for the spool that holds nothing else"
                )
            self._next_number = max(self._next_number, int(number) + 1)
            chunks = _chunk_files(path)
            if not chunks:
                shutil.rmtree(path)
                continue
            log = _load_log(path, incarnation)
            if log is None:
                self._num_damaged_before += len(chunks)
                _set_log_aside(path)
                continue
            self._every_log.append(log)
            if len(log):
                self.logs.append(log)
            else:
                log.remove()


def _chunk_files(directory: Path) -> list[Path]:
    return sorted(path for path in directory.glob(f"*{_SUFFIX}") if path.stem.isdigit())


def _load_log(directory: Path, incarnation: str) -> SpoolLog | None:
    """A log that an earlier process left; None if nobody can tell what its chunks are."""
    try:
        hello = _read_description(directory / _HELLO)
        route = Route(writer=hello["writer"])
        if any((directory / name).exists() for name in (_ROUTE, _ROUTE + _CHECKED)):
            route = _route_from_json(_read_description(directory / _ROUTE))
        spec = StepSpec.from_json(hello["spec"])
    except (ValueError, KeyError, TypeError, AttributeError, DamageError, SpecError) as error:
        logger.error("%s: cannot read where its chunks belong (%s)", directory, error)
        return None
    log = SpoolLog(incarnation=incarnation, spec=spec, route=route, directory=directory)
    damaged: list[tuple[int, Exception]] = []
    for path in _chunk_files(directory):
        seq = int(path.stem)
        try:
            log._add(seq, _RecordedChunk(path.stat().st_size, _num_rows_in(path)))
        except (ValueError, KeyError, TypeError, IndexError, WireError, DamageError) as error:
            damaged.append((seq, error))
    for seq, reason in damaged:
        log.set_aside(seq, reason)
    if log.highest in log:  # it may be torn: the process may have died while it wrote this file
        log._set_aside_if_damaged(log.highest)
    return log


def _num_rows_in(path: Path) -> int:
    with _damage_errors(path), path.open("rb") as file:
        header = parse_header(file.read(MAX_HEADER_BYTES + 8))
    return sum(part[2] for part in json.loads(header.metadata["parts"]))


def _set_log_aside(directory: Path) -> None:
    """Keep a log that cannot be sent where people find it."""
    kept = directory.with_name(f"{_DAMAGED}{directory.name}")
    with store_errors(kept, "create"):
        directory.replace(kept)
        sync_directory(kept.parent)
    logger.error("%s: its chunks are kept in %s, and those of the other logs are delivered", directory, kept)


@dataclass(frozen=True, kw_only=True)
class SpoolSummary:
    """What a spool's directory contains."""

    path: Path
    being_written: bool
    num_chunks: int  # recorded and not yet delivered
    num_bytes: int  # of these
    num_damaged: int  # chunks that were set aside


def summarize_spool(directory: Path) -> SpoolSummary | None:
    """Count the chunks of a spool, also while a process writes to it; None if the directory is not a spool."""
    logs = [path for path in directory.glob("*-*") if (path / _HELLO).exists() or path.name.startswith(_DAMAGED)]
    if not (directory / "lock").exists() or any(path not in logs for path in directory.iterdir() if path.is_dir()):
        return None
    chunks = [path for log in logs if not log.name.startswith(_DAMAGED) for path in _chunk_files(log)]
    return SpoolSummary(
        path=directory,
        being_written=lock_is_held(directory / "lock"),
        num_chunks=len(chunks),
        num_bytes=sum(path.stat().st_size for path in chunks),
        num_damaged=sum(len(_chunk_files(log)) for log in logs if log.name.startswith(_DAMAGED)),
    )


# ---- descriptions: small JSON files, each with a copy that has a checksum


def _write_description(path: Path, value: dict[str, Any]) -> None:
    """Write the copy first: it is the one that is believed."""
    content = json.dumps(value)
    checked = json.dumps({"check": _check_of_text(content), "content": content})
    with store_errors(path, "write"):
        write_durably(path.with_name(path.name + _CHECKED), checked.encode())
        write_durably(path, content.encode())


def _read_description(path: Path) -> dict[str, Any]:
    """The content of the copy if its checksum holds, or else of the file itself. Older versions wrote no copy."""
    copy = path.with_name(path.name + _CHECKED)
    if copy.exists():
        try:
            checked = json.loads(_read(copy))
            if _check_of_text(checked["content"]) == checked["check"]:
                return dict(json.loads(checked["content"]))
            logger.error("%s: its checksum does not hold; using %s", copy, path.name)
        except (ValueError, KeyError, TypeError, AttributeError, DamageError) as error:
            logger.error("%s: cannot be read (%s); using %s", copy, error, path.name)
    return dict(json.loads(_read(path)))


def _check_of_text(text: str) -> str:
    return xxhash.xxh3_64_hexdigest(text.encode())


def _route_from_json(value: dict[str, Any]) -> Route:
    """A saved route. Before shards had names it held an address, which was the shard's name."""
    if "address" in value:
        value["shard"] = value.pop("address")
    return Route(**value)


def _read(path: Path) -> bytes:
    with _damage_errors(path):
        return path.read_bytes()


@contextmanager
def _damage_errors(path: Path) -> Iterator[None]:
    """A sector that the disk cannot read is damage; other errors stop the writer."""
    with store_errors(path, "read"):
        try:
            yield
        except OSError as error:
            if error.errno != errno.EIO:
                raise
            raise DamageError(f"{path}: the disk cannot read it ({error.strerror})") from None
