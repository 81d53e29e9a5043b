"""Spool: what was recorded here and is not yet known to be on the server, on a disk or in memory.

    spool/
      lock                              held by the process that writes
      00000003-1f0c.../                 a stretch: the chunks of one incarnation of a writer
        hello.json                      who it is, and what its steps look like
        route.json                      to which shard its chunks go, once that is decided
        00000041.safetensors            chunk 41, byte for byte as it travels

A chunk is recorded when its file and the file's name are synced. It is removed when the server has acknowledged it. So
what a crash leaves is what is still to be sent, and a chunk that is sent again is stored once all the same.
"""

from __future__ import annotations

import json
import os
import shutil
import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from understudy.core import DamageError, StepSpec, StoreFormatError, WireError
from understudy.durable import files
from understudy.replay.format.records import info_from_json, info_to_json
from understudy.replay.write.writer import behind_gap
from understudy.service.wire.message import MAX_HEADER_BYTES, Buffer, pack, parse_header, size_of, unpack

_HELLO, _ROUTE, _SUFFIX = "hello.json", "route.json", ".safetensors"


@dataclass(frozen=True, kw_only=True)
class Route:
    """To which shard a stretch goes, and under what name. It changes if the shard is gone for good or its name taken.

    Chunk `base` is the first to go this way. If it goes on with an episode that began elsewhere, that episode's rows
    are numbered from `shift` on, so that here it is an episode of its own.
    """

    writer: str
    shard: str = ""  # by name, which outlives its address; "": not decided yet
    base: int = 0
    episode: int = -1
    shift: int = 0


@dataclass(frozen=True)
class _Held:
    num_bytes: int
    num_rows: int
    message: bytes | None = None  # in memory only


class Stretch:
    """The chunks of one incarnation, numbered from 0. Any thread may call."""

    def __init__(self, *, incarnation: str, spec: StepSpec, route: Route, directory: Path | None = None):
        self.incarnation = incarnation
        self.spec = spec
        self.route = route
        self.directory = directory
        self._held: OrderedDict[int, _Held] = OrderedDict()
        self._lock = threading.Lock()
        self.num_bytes = 0
        self.num_rows = 0

    @property
    def first(self) -> int | None:
        """The oldest chunk that is held."""
        with self._lock:
            return next(iter(self._held), None)

    def __contains__(self, seq: int) -> bool:
        return seq in self._held

    def __len__(self) -> int:
        return len(self._held)

    def put(self, seq: int, buffers: Sequence[Buffer], num_rows: int) -> None:
        """Record a chunk. When this returns, it survives this process, and if there is a directory, a power cut."""
        message = None
        if self.directory is None:
            message = b"".join(buffers)
        else:
            self._write(self.directory / f"{seq:08d}{_SUFFIX}", buffers)
        self._hold(seq, _Held(size_of(buffers), num_rows, message))

    def _write(self, path: Path, buffers: Sequence[Buffer]) -> None:
        with files.naming(path, "create"):
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        try:
            offset = 0
            for buffer in buffers:
                files.write_at(fd, buffer, offset, path)
                offset += len(buffer)
            files.sync_data(fd, path)
        finally:
            os.close(fd)
        files.sync_directory(path.parent)

    def _hold(self, seq: int, held: _Held) -> None:
        with self._lock:
            self._held[seq] = held
            self.num_bytes += held.num_bytes
            self.num_rows += held.num_rows

    def read(self, seq: int) -> bytes:
        """A chunk as it is sent."""
        message = self._held[seq].message
        if message is None:
            assert self.directory is not None
            message = _read(self.directory / f"{seq:08d}{_SUFFIX}")
        return message if self.route.base == 0 else self._rerouted(message)

    def _rerouted(self, message: bytes) -> bytes:
        metadata, arrays = unpack(message)
        parts = json.loads(metadata["parts"])
        for part in parts:
            if part[0] == self.route.episode:
                part[1] -= self.route.shift
                if self.route.shift:
                    info = behind_gap(info_from_json(part[4]), self.route.shift)
                    part[4] = info_to_json(info)
        if parts[0][0] == self.route.episode and parts[0][1:4] == [0, 0, "cut"]:
            del parts[0]  # the end of an episode that is elsewhere
        metadata |= {"seq": str(int(metadata["seq"]) - self.route.base), "parts": json.dumps(parts)}
        return b"".join(pack(metadata, arrays))

    def check(self, seq: int) -> None:
        """Raise if the spool itself is what is damaged."""
        try:
            unpack(self.read(seq))
        except WireError as error:
            raise DamageError(
                f"{self.directory}: chunk {seq} is not as it was recorded ({error}); move its file away to go on"
            ) from None

    def acknowledge(self, seq: int) -> int:
        """Forget all chunks up to `seq`; returns how many rows they had."""
        with self._lock:
            done = [number for number in self._held if number <= seq]
            gone = [self._held.pop(number) for number in done]
            num_rows = sum(held.num_rows for held in gone)
            self.num_bytes -= sum(held.num_bytes for held in gone)
            self.num_rows -= num_rows
        if self.directory is not None:
            for number in done:
                (self.directory / f"{number:08d}{_SUFFIX}").unlink(missing_ok=True)
        return num_rows

    def assign(self, shard: str) -> None:
        """Remember, before anything is sent, to which shard it goes."""
        self._keep(replace(self.route, shard=shard))

    def reroute(self, *, writer: str, shard: str) -> None:
        """Send what is left to another shard, or under another name."""
        first = self.first
        if first is None:
            route = replace(self.route, writer=writer, shard=shard)
        else:
            self.route = replace(self.route, base=0)
            parts = json.loads(parse_header(self.read(first)).metadata["parts"])
            route = Route(writer=writer, shard=shard, base=first, episode=parts[0][0], shift=parts[0][1])
        self._keep(route)

    def _keep(self, route: Route) -> None:
        self.route = route
        if self.directory is not None:
            files.replace_durably(self.directory / _ROUTE, json.dumps(asdict(self.route)).encode())

    def remove(self) -> None:
        """Take an empty stretch away, durably: what follows it may begin on the server."""
        if self.directory is not None and self.directory.exists():
            with files.naming(self.directory, "remove"):
                shutil.rmtree(self.directory)
            files.sync_directory(self.directory.parent)


class Spool:
    """The stretches of one writer's name, the oldest first. With `directory` None they are in memory only."""

    def __init__(self, directory: Path | None):
        self.directory = directory
        self._file_lock: files.WriterLock | None = None
        self.stretches: list[Stretch] = []
        self._next = 1
        if directory is not None:
            with files.naming(directory, "create"):
                directory.mkdir(parents=True, exist_ok=True)
            self._file_lock = files.WriterLock(directory / "lock")
            try:
                self._load(directory)
            except BaseException:
                self._file_lock.release()
                raise

    def begin(self, writer: str, incarnation: str, spec: StepSpec) -> Stretch:
        """A new stretch, behind all that are there."""
        directory = None
        if self.directory is not None:
            directory = self.directory / f"{self._next:08d}-{incarnation}"
            with files.naming(directory, "create"):
                directory.mkdir()
            hello = {"writer": writer, "incarnation": incarnation, "spec": spec.to_json()}
            files.replace_durably(directory / _HELLO, json.dumps(hello).encode())
            files.sync_directory(self.directory)
        self._next += 1
        stretch = Stretch(incarnation=incarnation, spec=spec, route=Route(writer=writer), directory=directory)
        self.stretches.append(stretch)
        return stretch

    @property
    def num_bytes(self) -> int:
        return sum(stretch.num_bytes for stretch in self.stretches)

    @property
    def num_rows(self) -> int:
        return sum(stretch.num_rows for stretch in self.stretches)

    @property
    def num_chunks(self) -> int:
        """Some have no rows, and only end an episode."""
        return sum(len(stretch) for stretch in self.stretches)

    def close(self) -> None:
        """Give the directory back; stretches of which nothing is left go away."""
        for stretch in self.stretches:
            if not len(stretch):
                stretch.remove()
        if self._file_lock is not None:
            self._file_lock.release()

    def _load(self, directory: Path) -> None:
        for place in sorted(path for path in directory.iterdir() if path.is_dir()):
            number, _, incarnation = place.name.partition("-")
            known = {_HELLO, _ROUTE, *(p.name for p in place.glob(f"*{_SUFFIX}") if p.stem.isdigit())}
            if not (len(number) == 8 and number.isdigit() and incarnation) or any(
                path.name not in known and not path.name.startswith((_HELLO, _ROUTE)) for path in place.iterdir()
            ):
                raise StoreFormatError(f"{place}: is not part of a spool; choose a directory of its own for the spool")
            self._next = max(self._next, int(number) + 1)
            stretch = _load_stretch(place, incarnation)
            if stretch is None:
                shutil.rmtree(place)
            else:
                self.stretches.append(stretch)


def _load_stretch(place: Path, incarnation: str) -> Stretch | None:
    """A stretch that an earlier process left; None if it holds nothing."""
    chunks = sorted(path for path in place.glob(f"*{_SUFFIX}") if path.stem.isdigit())
    if chunks and not _is_whole(chunks[-1]):  # a crash while it was written: nobody was told that it is there
        chunks.pop().unlink()
    if not chunks:
        return None
    try:
        hello = json.loads((place / _HELLO).read_text())
        route = Route(writer=hello["writer"])
        if (place / _ROUTE).exists():
            route = _route_of(json.loads((place / _ROUTE).read_text()))
        stretch = Stretch(incarnation=incarnation, spec=StepSpec.from_json(hello["spec"]), route=route, directory=place)
        for path in chunks:
            with path.open("rb") as file:
                header = parse_header(file.read(MAX_HEADER_BYTES + 8))
            num_rows = sum(part[2] for part in json.loads(header.metadata["parts"]))
            stretch._hold(int(path.stem), _Held(path.stat().st_size, num_rows))
    except (ValueError, KeyError, TypeError, OSError, WireError) as error:
        raise DamageError(f"{place}: not a readable part of a spool ({error}); move it away to go on") from None
    return stretch


def _route_of(said: dict[str, Any]) -> Route:
    """A route that was kept; before shards had names it held an address, which was its name."""
    if "address" in said:
        said["shard"] = said.pop("address")
    return Route(**said)


def _is_whole(path: Path) -> bool:
    try:
        unpack(_read(path))
    except WireError:
        return False
    return True


def _read(path: Path) -> bytes:
    with files.naming(path, "open"):
        fd = os.open(path, os.O_RDONLY)
    try:
        return files.read_at(fd, os.fstat(fd).st_size, 0, path)
    finally:
        os.close(fd)
