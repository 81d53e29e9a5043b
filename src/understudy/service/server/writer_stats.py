"""WriterStats: what a server counts for each of its writers. Actors on other machines leave no status file here."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

MAX_WRITERS = 1000  # beyond this, the writers that disconnected longest ago are forgotten


@dataclass(kw_only=True)
class WriterEntry:
    """One writer. Times are of this machine's clock, in seconds since 1970."""

    writer: str
    incarnation: str
    peer: str
    first_seen_s: float
    last_seen_s: float
    streams: int = 0  # open ones; a new one may begin before the server notices that the old one ended
    seq: int = 0  # the last durable chunk
    commit: int = 0  # and its commit
    chunks: int = 0
    repeated: int = 0  # chunks that the writer sent again
    received_bytes: int = 0
    pending_since_s: float | None = None  # when the chunk arrived that is not yet durable

    def received(self, num_bytes: int) -> None:
        """A chunk has arrived."""
        self.last_seen_s = self.pending_since_s = time.time()
        self.received_bytes += num_bytes

    def committed(self, seq: int, commit: int, *, repeated: bool) -> None:
        """The chunk is durable."""
        self.seq, self.commit = max(self.seq, seq), commit
        self.repeated += repeated
        self.chunks += not repeated
        self.pending_since_s = None


class WriterStats:
    """All writers since the server started. The event loop writes; any thread may read."""

    def __init__(self) -> None:
        self._writers: dict[str, WriterEntry] = {}

    @contextmanager
    def writer(self, name: str, incarnation: str, peer: str, last_seq: int) -> Iterator[WriterEntry]:
        """The entry of a writer while its stream is open. A later stream of the same process adds to it."""
        now_s = time.time()
        entry = self._writers.pop(name, None)
        if entry is None or entry.incarnation != incarnation:
            entry = WriterEntry(
                writer=name, incarnation=incarnation, peer=peer, first_seen_s=now_s, last_seen_s=now_s, seq=last_seq
            )
        entry.peer, entry.last_seen_s = peer, now_s
        entry.streams += 1
        self._writers[name] = entry
        self._forget_oldest()
        try:
            yield entry
        finally:
            entry.streams -= 1
            entry.pending_since_s = None

    def _forget_oldest(self) -> None:
        disconnected = [name for name, writer in self._writers.items() if not writer.streams]
        for name in disconnected[: max(len(self._writers) - MAX_WRITERS, 0)]:
            del self._writers[name]

    @property
    def oldest_pending_s(self) -> float:
        """How long the oldest chunk that is not yet durable has been waiting; 0 if there is none."""
        now_s = time.time()
        return max((now_s - (w.pending_since_s or now_s) for w in list(self._writers.values())), default=0.0)

    def to_json(self) -> dict[str, Any]:
        return {
            "writers": [_public(writer) for writer in list(self._writers.values())],
            "oldest_pending_s": self.oldest_pending_s,
        }


def _public(entry: WriterEntry) -> dict[str, Any]:
    """An entry for everyone to see: without the incarnation, which is as good as a key to the writer's stream."""
    return {name: value for name, value in asdict(entry).items() if name != "incarnation"}
