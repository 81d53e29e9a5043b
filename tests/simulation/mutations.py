"""Mutations: defects that are planted in the product, to see whether the simulator finds them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from tests.simulation import threads

from understudy.durable import files
from understudy.replay.format.catalog import Catalog
from understudy.replay.format.chunk import Chunk
from understudy.replay.format.segment import Segment
from understudy.replay.write.commit import Commit
from understudy.service.client import spool
from understudy.service.server.parameter_store import ParameterStore
from understudy.service.server.server import Server


def skip_sync() -> None:
    """A commit lists rows that are not on the disk yet."""
    Segment.sync = lambda self: None  # type: ignore[method-assign]


def skip_directory_sync() -> None:
    """New files do not get their names durably."""
    for module in (files, spool):
        module.sync_directory = lambda directory: None  # type: ignore[attr-defined]


def acknowledge_early() -> None:
    """A server acknowledges a chunk before its commit is durable."""

    def commit(
        self: Server, decode: Callable[[], Chunk], num_bytes: int, *, last_seq: int, begun: bool
    ) -> tuple[int, int]:
        chunk = decode()
        if not begun:
            self.store.begin_writer(chunk.writer, chunk.incarnation)
        assert threads.scheduler.current is not None
        threads.scheduler.spawn("late commit", threads.scheduler.current.process, lambda: self.store.commit(chunk))
        return chunk.seq, self.store.last_commit

    Server._commit = commit  # type: ignore[method-assign]


def forget_fence() -> None:
    """A chunk of a replaced process counts as one of its successor."""
    add = Commit.add

    def unfenced(self: Commit, chunk: Chunk) -> bool:
        writer = self._new.writers.get(chunk.writer)
        return add(self, chunk if writer is None else replace(chunk, incarnation=writer.incarnation))

    Commit.add = unfenced  # type: ignore[method-assign]


def drop_tail() -> None:
    """A spool that is opened again forgets the last chunk that it recorded."""
    chunk_files = spool._chunk_files
    spool._chunk_files = lambda directory: chunk_files(directory)[:-1]


def reuse_chunk_number() -> None:
    """A store forgets the number of a writer's last chunk, so that it takes the chunk again."""
    Catalog.put_last_seq = lambda self, writer, seq, checks=(): None  # type: ignore[method-assign]


def reuse_version() -> None:
    """A server that starts again numbers parameters from 1."""
    load = ParameterStore._load

    def forgetful(self: ParameterStore) -> None:
        load(self)
        self.version = 0

    ParameterStore._load = forgetful  # type: ignore[method-assign]


MUTATIONS: dict[str, Callable[[], Any]] = {
    mutation.__name__: mutation
    for mutation in (
        skip_sync,
        skip_directory_sync,
        acknowledge_early,
        forget_fence,
        drop_tail,
        reuse_chunk_number,
        reuse_version,
    )
}
