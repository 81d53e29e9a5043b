"""Heard: what a server knows of each writer, from what it heard of it: actors on other machines have no file here."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

MOST_WRITERS = 1000  # that are remembered; those that left longest ago are forgotten


@dataclass(kw_only=True)
class HeardWriter:
    """One writer. Times are of this machine's clock, in seconds since 1970."""

    writer: str
    incarnation: str
    peer: str
    since_s: float
    heard_s: float
    streams: int = 0  # open ones; a new one may begin before the end of the old is noticed
    seq: int = 0  # the last chunk that is durable
    commit: int = 0  # and its commit
    chunks: int = 0
    repeated: int = 0  # chunks that came again
    received_bytes: int = 0
    working_since_s: float | None = None  # on a chunk that came and is not yet durable

    def came(self, num_bytes: int) -> None:
        """A chunk has come."""
        self.heard_s = self.working_since_s = time.time()
        self.received_bytes += num_bytes

    def stored(self, seq: int, commit: int, *, again: bool) -> None:
        """It is durable."""
        self.seq, self.commit = max(self.seq, seq), commit
        self.repeated += again
        self.chunks += not again
        self.working_since_s = None


class Heard:
    """All writers since the server began. The event loop writes; any thread may read."""

    def __init__(self) -> None:
        self._writers: dict[str, HeardWriter] = {}

    @contextmanager
    def writer(self, name: str, incarnation: str, peer: str, last_seq: int) -> Iterator[HeardWriter]:
        """A writer while its stream is open; what it did in earlier streams counts on."""
        now_s = time.time()
        found = self._writers.pop(name, None)
        if found is None or found.incarnation != incarnation:
            found = HeardWriter(
                writer=name, incarnation=incarnation, peer=peer, since_s=now_s, heard_s=now_s, seq=last_seq
            )
        found.peer, found.heard_s = peer, now_s
        found.streams += 1
        self._writers[name] = found
        self._forget()
        try:
            yield found
        finally:
            found.streams -= 1
            found.working_since_s = None

    def _forget(self) -> None:
        gone = [name for name, writer in self._writers.items() if not writer.streams]
        for name in gone[: max(len(self._writers) - MOST_WRITERS, 0)]:
            del self._writers[name]

    @property
    def oldest_s(self) -> float:
        """How long the chunk has been waiting that has waited longest to become durable."""
        now_s = time.time()
        return max((now_s - (w.working_since_s or now_s) for w in list(self._writers.values())), default=0.0)

    def to_json(self) -> dict[str, Any]:
        return {"writers": [asdict(writer) for writer in list(self._writers.values())], "oldest_s": self.oldest_s}
