"""Store: the write side of a directory of experience. When `commit` returns, the rows survive any crash.

Any number of threads may call `commit`. There is no committing thread: the first caller to get the lock commits what
all waiting callers have queued (group commit), so the two syncs are shared.

| caller | takes from | blocks on | woken by |
|---|---|---|---|
| `commit`, leading | the queue of waiting chunks | the disk | - |
| `commit`, following | - | the commit lock | the leader's release; finds its chunk committed |
| `delete`, `label`, ... | - | the commit lock | the leader's release |

Edits that other processes ask for (edit_requests.py) are applied when the store is opened and after a commit.
Compaction is a function of a Store: see maintain/compaction.py.
"""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from pathlib import Path
from weakref import WeakSet

from understudy.core import (
    DamageError,
    FencedError,
    StepSpec,
    StoreClosedError,
    StoreError,
    StoreFailedError,
    StoreFormatError,
    UnderstudyError,
)
from understudy.core.closeable import Closeable
from understudy.durable import files
from understudy.durable.errors import store_errors
from understudy.durable.file_identity import FileIdentity
from understudy.durable.file_system import refuse_network_file_system
from understudy.durable.lock import WriterLock
from understudy.processes import forks
from understudy.replay.format.catalog import Catalog, require_catalog
from understudy.replay.format.chunk import Chunk
from understudy.replay.format.commit_mark import CommitMark
from understudy.replay.format.encoded_columns import encoded_chunk
from understudy.replay.format.layout import plan_capacity
from understudy.replay.format.lost_commits import check_commits, newest_commit
from understudy.replay.format.paths import (
    CATALOG_FILE,
    LOCK_FILE,
    SEAL_FILE,
    SEGMENTS_DIRECTORY,
    segment_files,
    segment_path,
)
from understudy.replay.format.records import EpisodeRecord, SegmentRecord, WriterRecord, with_labels
from understudy.replay.format.seal import check_seal, write_seal
from understudy.replay.format.segment import Segment
from understudy.replay.write.background import BackgroundCommits, Overflow
from understudy.replay.write.commit import Commit, StoreState
from understudy.replay.write.edit_requests import EditInbox
from understudy.replay.write.local_writer import LocalWriter, check_overflow
from understudy.replay.write.not_finite import NotFiniteWarnings
from understudy.replay.write.retention import Retention, expired
from understudy.replay.write.writer import Writer, check_commit_steps

SEGMENT_BYTES = 256 * 2**20
MAX_OPEN_SEGMENTS = 16  # between commits; each spec has one that is written to


class _QueuedChunk:
    """A chunk that waits to be committed, and what became of it."""

    def __init__(self, chunk: Chunk):
        self.chunk = chunk
        self.finished = False
        self.commit = 0
        self.error: UnderstudyError | None = None


class Store(Closeable):
    """An open store, in the one process that writes to it. Use as a context manager, or call `close`.

    `catalog`, `state`, `commit_lock`, `maintenance_lock` and `create_segment` are for the modules of this package.
    """

    keeps_columns = False  # a chunk is written when `commit` returns

    def __init__(
        self, path: Path, catalog: Catalog, lock: WriterLock, *, segment_bytes: int, clock: Callable[[], float]
    ):
        self.path = path
        self.catalog = catalog
        self._lock_file = lock
        self._catalog_file = FileIdentity(catalog.path)
        self._log_files = [FileIdentity(path / f"{CATALOG_FILE}-{part}") for part in ("wal", "shm")]
        self.segment_bytes = segment_bytes
        self.clock = clock
        self._segments: dict[int, Segment] = {}
        self._background: WeakSet[BackgroundCommits] = WeakSet()  # of its writers
        self._not_finite = NotFiniteWarnings()
        self._failure: StoreFailedError | None = None
        self._make_locks()
        self._queue: list[_QueuedChunk] = []
        self.state = self._load_state()
        self._mark = CommitMark(path, self.state.commit)
        self._inbox = EditInbox(path, self)
        forks.register(self)

    def _make_locks(self) -> None:
        self._commit_lock = threading.Lock()
        self.maintenance_lock = threading.Lock()  # one retention or compaction at a time
        self._queue_lock = threading.Lock()

    def after_fork_in_child(self) -> None:
        self._make_locks()  # the others may be held by threads that are not here

    # ---- opening and closing

    @staticmethod
    def open(
        path: str | Path,
        *,
        create: bool = True,
        segment_bytes: int = SEGMENT_BYTES,
        clock: Callable[[], float] = time.time,
    ) -> Store:
        """Open a store for writing, and create it if there is none; refused if another process writes to it.

        `segment_bytes` is the size at which a new segment file is begun; `clock` gives the times in the catalog.
        """
        path = Path(path)
        if not create:
            require_catalog(path / CATALOG_FILE)
        _make_directory(path)
        refuse_network_file_system(path)
        with ExitStack() as cleanup:
            lock_was_there = (path / LOCK_FILE).exists()
            lock = WriterLock(path / LOCK_FILE)
            cleanup.callback(lock.release)
            if not (path / CATALOG_FILE).exists():
                _create_catalog(path)
            clean = check_seal(path)
            with closing(Catalog.open(path / CATALOG_FILE)) as old:  # for reading: this leaves the log as it is
                check_commits(path, old, sealed=clean)
            with store_errors(path / SEAL_FILE, "remove"):
                files.remove_durably(path / SEAL_FILE)
            log = path / f"{CATALOG_FILE}-wal"
            if log.exists():  # the last process crashed, or stopped at an error
                with store_errors(log, "write"):
                    files.rewrite(log)
            catalog = Catalog.open(path / CATALOG_FILE, write=True)
            cleanup.callback(catalog.close)
            with store_errors(path, "fsync"):  # SQLite created its log and does not make the log's name durable
                files.sync_directory(path)
            store = Store(path, catalog, lock, segment_bytes=segment_bytes, clock=clock)
            cleanup.callback(store._close_files)
            if not clean:
                store._clear_after_crash()
            if not lock_was_there:  # a process may have had the lock that was removed: write to no segment of its own
                for segment in list(store.state.filling.values()):
                    store.seal(segment.id)
            store._inbox.poll()
            cleanup.pop_all()
        return store

    def close(self) -> None:
        """Commit what writers have handed over and release the lock. Everything committed is safe without this.

        Raises the error that stopped a writer's thread, if no call of the writer has raised it.
        """
        in_order = sorted(self._background, key=lambda commits: commits.writer)  # addresses decide that of a WeakSet
        unheard = [error for commits in in_order if (error := commits.drain()) is not None]
        self._close()
        if unheard:
            raise unheard[0].with_traceback(None) from None

    def _close(self) -> None:
        with self._commit_lock:
            if not self._lock_file.held:
                return
            try:
                self._close_files()
                if not self._catalog_file.is_in_place():
                    self.catalog.abandon()
                    return
                with closing(self.catalog):
                    settled = self._failure is None and self.catalog.checkpoint()
                alone = self._lock_file.identity.is_in_place() and not (self.path / f"{CATALOG_FILE}-wal").exists()
                if settled and alone:
                    write_seal(self.path)
            finally:
                self._lock_file.release()

    # ---- writing

    def writer(
        self,
        name: str,
        spec: StepSpec,
        *,
        commit_steps: int = 50,
        flush_each_episode: bool = True,
        background: bool = True,
        overflow: Overflow = "block",
    ) -> Writer:
        """A writer that takes steps one by one. It replaces an older one of this name, and cuts its open episodes.

        A thread encodes and commits what it takes, and `overflow` says what happens if steps come faster than that.
        Without `background`, every `commit_steps`-th `append` encodes and commits itself.
        """
        check_commit_steps(commit_steps)
        check_overflow(overflow)
        incarnation = uuid.uuid4().hex
        self.begin_writer(name, incarnation)
        if not background:
            return Writer(
                self, name, incarnation, spec, commit_steps=commit_steps, flush_each_episode=flush_each_episode
            )
        writer = LocalWriter(
            self.commit,
            name,
            incarnation,
            spec,
            commit_steps=commit_steps,
            flush_each_episode=flush_each_episode,
            overflow=overflow,
        )
        self._background.add(writer.commits)
        return writer

    def begin_writer(self, name: str, incarnation: str) -> WriterRecord:
        """Register an incarnation of a writer, or find it again: `last_seq` is its last chunk that is stored."""
        with self.commit_lock() as commit:
            known = self._find_writer(name, incarnation)
            if known is not None and known.incarnation == incarnation:
                return known
            unfinished = [e for e in self.state.episodes.values() if known is not None and e.writer == known.id]
            with self.transaction(commit):
                record = self.catalog.add_writer(name, incarnation)
                for episode in unfinished:
                    cut = replace(episode, state="cut", changed=commit, ended_at=self.clock())
                    self.catalog.put_episode(cut, before=episode)
            self.state.writers[name] = record
            for episode in unfinished:
                del self.state.episodes[episode.writer, episode.number]
            return record

    def find_writer(self, name: str, incarnation: str) -> WriterRecord | None:
        """An incarnation of a writer with its last chunk that is stored; None if there is none. Registers nothing."""
        with self.commit_lock():
            known = self._find_writer(name, incarnation)
        return known if known is not None and known.incarnation == incarnation else None

    def _find_writer(self, name: str, incarnation: str) -> WriterRecord | None:
        """The newest incarnation of a writer; an error if this one is an older one."""
        known = self.state.writers.get(name)
        if known is None or known.incarnation == incarnation:
            return known
        older = self.catalog.writer(name, incarnation)
        if older is not None:
            raise FencedError(
                f"writer {name!r} was replaced by a newer process of the same name; stop this process, or begin a "
                f"writer with another name",
                last_seq=older.last_seq,
                checks=older.checks,
            )
        return known

    def commit(self, chunk: Chunk) -> int:
        """Store a chunk durably and return the number of its commit; one that is stored already is not stored again.

        Camera fields are encoded first, unless the chunk comes with them encoded.

        Blocks until the disk has it. A chunk that is wrong raises and changes nothing; if the disk fails, all waiting
        callers get the error and the store takes no more chunks until it is opened again.
        """
        mine = _QueuedChunk(encoded_chunk(chunk))
        with self._queue_lock:
            self._queue.append(mine)
        with self._commit_lock:
            if not mine.finished:
                self._lead()
        if mine.error is not None:
            raise mine.error
        self._not_finite.look(chunk)
        self._inbox.poll()
        return mine.commit

    def _lead(self) -> None:
        """Commit all queued chunks, in the order they came."""
        with self._queue_lock:
            group, self._queue = self._queue, []
        try:
            self._check_usable()
            taken = self._commit_group(group)
        except UnderstudyError as error:
            self._fail(group, error)
        except BaseException as error:  # what is in memory may no longer be what is on disk
            self._fail(group, StoreFailedError(f"{self.path}: a commit was interrupted ({error!r}); open it again"))
            raise
        else:
            for queued in taken:
                queued.commit, queued.finished = self.state.commit, True

    def _commit_group(self, group: list[_QueuedChunk]) -> list[_QueuedChunk]:
        """Make the valid chunks of a group durable and return them; each invalid one gets an error of its own."""
        commit = Commit(self.state, self.catalog, self._open_segment, self.segment_bytes, self.clock())
        taken = []
        for queued in group:
            try:
                commit.add(queued.chunk)
                taken.append(queued)
            except (StoreFailedError, DamageError):  # not the chunk is wrong, but the store
                raise
            except UnderstudyError as error:
                queued.error, queued.finished = error, True
        if commit.changes:
            commit.record()
            for segment in commit.written:
                segment.identity.check()
            sealed = commit.publish()
            self._acknowledge(commit.number)
            for segment_id in (*sealed, *list(self._segments)[:-MAX_OPEN_SEGMENTS]):  # all are synced
                self._close_segment(segment_id)
        return taken

    def _fail(self, group: list[_QueuedChunk], error: UnderstudyError) -> None:
        """Stop after a commit that broke off: numbers that it took in memory must not be used again."""
        if self._failure is None and not isinstance(error, StoreClosedError):
            self._failure = error if isinstance(error, StoreFailedError) else StoreFailedError(str(error))
        for queued in group:
            if not queued.finished:
                queued.error, queued.finished = error, True

    # ---- editing episodes

    def delete(self, episodes: Iterable[int]) -> int:
        """Take episodes out of every view; their rows stay until compaction. Returns how many were not yet deleted."""
        return self._edit(episodes, lambda e, commit: None if e.deleted else replace(e, deleted=commit, changed=commit))

    def restore(self, episodes: Iterable[int]) -> int:
        """Take back a `delete`; refused for an episode whose rows are gone."""

        def edit(episode: EpisodeRecord, commit: int) -> EpisodeRecord | None:
            if episode.purged:
                raise StoreError(f"episode {episode.id}: its rows were removed by compaction; import it again")
            return replace(episode, deleted=None, changed=commit) if episode.deleted else None

        return self._edit(episodes, edit)

    def label(self, episodes: Iterable[int], labels: Mapping[str, str | None]) -> int:
        """Set labels on episodes; a value of None removes a label."""
        return self._edit(episodes, lambda episode, commit: with_labels(episode, labels, commit))

    def set_success(self, episodes: Iterable[int], success: bool | None) -> int:
        """Set the success of episodes that have been evaluated afterwards; None means not known."""
        return self._edit(
            episodes,
            lambda episode, commit: replace(episode, info=replace(episode.info, success=success), changed=commit),
        )

    def _edit(self, episodes: Iterable[int], edit: Callable[[EpisodeRecord, int], EpisodeRecord | None]) -> int:
        """One commit that rewrites episodes; `edit` returns None to leave one as it is."""
        with self.commit_lock() as commit:
            edited = []
            for episode_id in dict.fromkeys(int(e) for e in episodes):
                found = self.catalog.episode(episode_id)
                if found is None:
                    raise StoreError(f"{self.path}: there is no episode {episode_id}; see `understudy info --episodes`")
                new = edit(found, commit)
                if new is not None:
                    edited.append((found, new))
            if edited:
                with self.transaction(commit):
                    for before, episode in edited:
                        self.catalog.put_episode(episode, before)
                for _, episode in edited:
                    if episode.state == "open":
                        self.state.episodes[episode.writer, episode.number] = episode
            return len(edited)

    # ---- retention and compaction

    def retain(self, retention: Retention) -> int:
        """Delete (softly) the oldest episodes of each kind beyond its budget; returns how many."""
        with self.maintenance_lock:
            return self.delete(self.over_budget(retention))

    def over_budget(self, retention: Retention) -> list[int]:
        """The episodes that `retain` would delete."""
        with self.snapshot() as catalog:
            return expired(catalog, retention)

    def create_segment(self, spec_id: int, num_rows: int, heap_bytes: int) -> tuple[SegmentRecord, Segment]:
        """A new segment with room for these rows, not in the catalog yet; sealed, so that no commit writes to it."""
        with self.commit_lock():
            segment_id = self.state.next_segment
            self.state.next_segment += 1
            capacity, heap = plan_capacity(self.catalog.spec(spec_id), self.segment_bytes, num_rows, heap_bytes)
            record = SegmentRecord(
                id=segment_id, spec=spec_id, capacity=capacity, heap_bytes=heap, num_rows=0, heap_used=0, sealed=True
            )
            layout = self.catalog.layout(record)
        return record, Segment.create(layout, self.segment_path(segment_id))

    def seal(self, segment_id: int) -> SegmentRecord:
        """Write no more rows to a segment."""
        with self.commit_lock():
            segment = self.catalog.segment(segment_id)
            if segment is None:
                raise StoreError(f"{self.path}: there is no segment {segment_id}")
            sealed = replace(segment, sealed=True)
            with self.catalog.transaction(write=True):
                self.catalog.put_segment(sealed)
            filling = self.state.filling.get(segment.spec)
            if filling is not None and filling.id == segment_id:
                del self.state.filling[segment.spec]
            self._close_segment(segment_id)
            return sealed

    @contextmanager
    def snapshot(self) -> Iterator[Catalog]:
        """A connection for long reads of the catalog, which no commit has to wait for."""
        catalog = Catalog.open(self.catalog.path)
        try:
            with catalog.transaction(write=False):
                yield catalog
        finally:
            catalog.close()

    @contextmanager
    def commit_lock(self) -> Iterator[int]:
        """Hold the commit lock; gives the number of the next commit. If the disk fails in the body, the store stops."""
        with self._commit_lock:
            self._check_usable()
            try:
                yield self.state.commit + 1
            except StoreFailedError as error:
                self._failure = error
                raise

    @contextmanager
    def transaction(self, commit: int) -> Iterator[None]:
        """The transaction of a commit without rows, acknowledged at its end; the caller holds the commit lock."""
        with self.catalog.transaction(write=True):
            yield
            self.catalog.add_commit(commit, self.clock(), 0)
        self._acknowledge(commit)

    def _acknowledge(self, commit: int) -> None:
        """Mark a commit that is durable, if the files it was written to are still those of the store."""
        for file in (self._lock_file.identity, self._catalog_file, *self._log_files):
            file.check()
        self._mark.write(commit)
        self.state.commit = commit

    # ---- properties and paths

    @property
    def failure(self) -> StoreFailedError | None:
        """The error at which the store stopped: it takes no more commits until it is opened again."""
        return self._failure

    @property
    def last_commit(self) -> int:
        """The number of the last durable commit."""
        return self.state.commit

    def segment_path(self, segment_id: int) -> Path:
        return segment_path(self.path, segment_id)

    def segment_files(self) -> list[Path]:
        return segment_files(self.path)

    # ---- internals

    def _check_usable(self) -> None:
        if self._failure is not None:
            raise StoreFailedError(f"the store stopped at an earlier error: {self._failure}")
        if not self._lock_file.held:
            raise StoreClosedError(f"{self.path}: the store is closed in this process; open it here to write to it")
        self._lock_file.identity.check()  # before rows are written: without its lock, they may be those of another

    def _load_state(self) -> StoreState:
        catalog = self.catalog
        files_there = [int(path.stem) for path in self.segment_files()]
        state = StoreState(
            commit=catalog.last_commit(),
            next_episode=catalog.last_episode_id() + 1,
            next_segment=max([catalog.last_segment_id(), *files_there]) + 1,
            writers={w.name: w for w in catalog.writers()},
            episodes={(e.writer, e.number): e for e in catalog.episodes("state = 'open'")},
            spec_ids={catalog.spec(spec_id).json_text: spec_id for spec_id in catalog.spec_ids()},
        )
        for segment in catalog.segments():
            if not segment.sealed:
                state.filling[segment.spec] = segment
        return state

    def _open_segment(self, record: SegmentRecord, *, create: bool) -> Segment:
        if record.id not in self._segments:
            path = segment_path(self.path, record.id)
            layout = self.catalog.layout(record)
            self._segments[record.id] = (
                Segment.create(layout, path) if create else Segment.open(layout, path, write=True)
            )
        return self._segments[record.id]

    def _close_files(self) -> None:
        self._mark.close()
        for segment_id in list(self._segments):
            self._close_segment(segment_id)

    def _close_segment(self, segment_id: int) -> None:
        if segment_id in self._segments:
            self._segments.pop(segment_id).close()

    def _clear_after_crash(self) -> None:
        """Zero the bytes that uncommitted writes left after the last rows, and remove the files that they began."""
        for record in list(self.state.filling.values()):
            try:
                self._open_segment(record, create=False).clear_tail(record.num_rows, record.heap_used)
            except DamageError:  # verify and repair report it; write no more rows to a damaged file
                del self.state.filling[record.spec]
        listed = {segment.id for segment in self.catalog.segments()}
        for path in self.segment_files():
            if int(path.stem) not in listed and newest_commit(path) > self.state.commit:
                with store_errors(path, "remove"):
                    files.remove_durably(path)


def _make_directory(path: Path) -> None:
    """Create the directory of a store, durably; refuse one that holds other files."""
    with store_errors(path, "create"):
        if path.exists() and not path.is_dir():
            raise StoreFormatError(f"{path}: a store is a directory, and this is a file; choose another path")
        known = {CATALOG_FILE, LOCK_FILE, SEGMENTS_DIRECTORY, SEAL_FILE}
        if path.is_dir() and not (path / CATALOG_FILE).exists():
            others = [p.name for p in path.iterdir() if p.name not in known and not p.name.startswith(CATALOG_FILE)]
            if others or any((path / SEGMENTS_DIRECTORY).glob("*.safetensors")):
                raise StoreFormatError(
                    f"{path}: holds other files ({', '.join(sorted(others)[:3]) or 'segments'}) and no {CATALOG_FILE}; "
                    f"choose an empty directory, or run `understudy repair` if this was a store"
                )
        resolved = path.resolve()
        new = [directory for directory in (resolved, *resolved.parents) if not directory.exists()]
        (path / SEGMENTS_DIRECTORY).mkdir(parents=True, exist_ok=True)
    for directory in dict.fromkeys([path, resolved.parent, *(made.parent for made in new)]):
        with store_errors(directory, "fsync"):
            files.sync_directory(directory)


def _create_catalog(path: Path) -> None:
    """Create a catalog that gets its name only when it is whole."""
    new = path / f"{CATALOG_FILE}.new"
    with store_errors(new, "create"):
        for leftover in path.glob(f"{CATALOG_FILE}.new*"):
            leftover.unlink()
        Catalog.create(new, uuid.uuid4().hex).close_as_one_file()
        files.rename_durably(new, path / CATALOG_FILE)
