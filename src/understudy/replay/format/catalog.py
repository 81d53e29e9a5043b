"""Catalog: the SQLite database that lists what is in a store. Rows that it does not list are not part of the store.

Tables (docs/formats.md has every column): meta, specs, writers, segments, episodes, spans, edits, commits. A *span* is
a run of rows of one episode that lie next to each other in one segment. Every change carries the number of its commit,
so that a reader asks only for what is new. One process writes, under the store's lock; each reader has its own
connection, and a forked process opens another.
"""

from __future__ import annotations

import ctypes
import json
import sqlite3
import threading
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from functools import cache
from itertools import chain
from pathlib import Path
from typing import TypeAlias

import numpy as np
import xxhash

from understudy.core import DamageError, StepSpec, StoreClosedError, StoreError, StoreFailedError, StoreFormatError
from understudy.processes import forks
from understudy.replay.format.arrays import Array, Records
from understudy.replay.format.conditions import Guard, SqlRow, SqlValue, check_condition, guard_problem, shown
from understudy.replay.format.layout import Layout
from understudy.replay.format.paths import SEAL_FILE, no_store, segment_files
from understudy.replay.format.records import (
    EPISODE_COLUMNS,
    SEGMENT_FIELDS,
    EpisodeRecord,
    EpisodeTotals,
    SegmentRecord,
    SpanRecord,
    WriterRecord,
    decode_checks,
    decode_episode,
    editable_fields,
    encode_checks,
    encode_episode,
)

FORMAT = 1  # of a store without encoded cameras
ENCODED_FORMAT = 2  # of one that has them, so that a version that knows no codecs refuses it in a sentence

SCHEMA = """
create table meta (key text primary key, value text not null) without rowid;
create table specs (id integer primary key, digest text not null unique, spec text not null);
create table writers (
    id integer primary key autoincrement, name text not null, incarnation text not null, last_seq integer not null,
    checks blob, unique (name, incarnation)
);
create table segments (
    id integer primary key autoincrement, spec integer not null references specs, capacity integer not null,
    heap_bytes integer not null, num_rows integer not null, heap_used integer not null, sealed integer not null
);
create table episodes (
    id integer primary key autoincrement, writer integer not null references writers, number integer not null,
    spec integer not null references specs, state text not null, kind text not null,
    num_rows integer not null, num_bytes integer not null, num_steps integer not null,
    num_policy integer not null, num_human integer not null, num_script integer not null, num_random integer not null,
    total_reward real not null, task text, instruction text, init_state integer, seed integer, group_key text,
    actor text, operator text, success integer, split text not null, labels text not null,
    begun integer not null, changed integer not null, deleted integer, purged integer not null,
    begun_at real not null, ended_at real, row_check integer not null,
    unique (writer, number)
);
create index episodes_changed on episodes (changed);
create index episodes_open on episodes (id) where state = 'open';
create table spans (
    id integer primary key autoincrement, commit_id integer not null, episode integer not null references episodes,
    first_index integer not null, segment integer not null references segments, first_row integer not null,
    num_rows integer not null, row_check integer not null
);
create index spans_episode on spans (episode, first_index);
create index spans_segment on spans (segment);
create index spans_commit on spans (commit_id);
create table edits (
    id integer primary key autoincrement, commit_id integer not null, episode integer not null references episodes,
    state text not null, deleted integer, info text not null
);
create index edits_episode on edits (episode);
create table commits (id integer primary key, time real not null, num_rows integer not null);
"""

ADDED_COLUMNS = {"writers": {"checks": "blob"}}  # that catalogs of older versions lack until they are written to

PAGE_EPISODES = 1000  # that are read in one transaction

SPAN_COLUMNS = "id, commit_id, episode, first_index, segment, first_row, num_rows, row_check"
SPAN_DTYPE = np.dtype([(name.strip(), np.int64) for name in SPAN_COLUMNS.split(",")])


PUT_EPISODE = (
    f"insert or replace into episodes ({', '.join(EPISODE_COLUMNS)}) values ({', '.join('?' * len(EPISODE_COLUMNS))})"
)


class Catalog:
    """A connection to a catalog, for the one writing process or for one of many readers.

    Threads take turns: a thread that reads sees no half of another thread's transaction. SQLite's own lock of the
    connection would not do, because Python waits for it without letting go of its interpreter lock.
    """

    def __init__(
        self,
        path: Path,
        connection: sqlite3.Connection,
        store_id: str,
        *,
        write: bool,
        unchanged: FileStamps | None = None,
    ):
        self.path = path
        self.store_id = store_id
        self._connection: sqlite3.Connection | None = connection  # None in a forked process, until it is needed
        self._write = write
        self._identity = _file_identity(path)
        self._unchanged = unchanged  # the files as they must stay; None if SQLite notices changes by itself
        self._closed = False
        self._guard: Guard | None = None
        self._specs: dict[int, StepSpec] = {}
        self._turn = threading.RLock()
        forks.register(self)
        self._closer = self._close_when_dropped(connection)

    def _close_when_dropped(self, connection: sqlite3.Connection) -> weakref.finalize[..., Catalog] | None:
        """Nothing is lost with a connection that reads, and Python warns of one that nobody closed."""
        return None if self._write else weakref.finalize(self, _close_unforked, connection)

    def after_fork_in_child(self) -> None:
        """Close the copy of a connection that reads, because SQLite would share its state, which gets stale, with any
        other connection of this process. One that writes must not be closed: that may move its log into the file."""
        self._turn = threading.RLock()
        if self._connection is None or self._closed:
            return
        if self._write:
            forks.leave_to_parent(self._connection)
            _left_to_parent.add(self._identity)
        else:
            self._connection.close()
        self._connection = self._guard = None

    @property
    def _db(self) -> sqlite3.Connection:
        """The connection of this process."""
        return self._connection or self._connect_again()

    def _connect_again(self) -> sqlite3.Connection:
        """Open in this process what the process had open that it was forked from."""
        if self._closed:
            raise StoreClosedError(f"{self.path}: used after close(); open the store again")
        if self._write:
            raise forks.forked_error(f"{self.path.parent}: the open store", "write to it there")
        again = Catalog.open(self.path, immutable=self._unchanged is not None)
        if again.store_id != self.store_id:
            again.close()
            raise StoreError(f"{self.path.parent}: another store is here now; open it again")
        if again._closer is not None:
            again._closer.detach()
        self._connection, again._connection, again._closed = again._connection, None, True
        self._closer = self._close_when_dropped(self._db)
        return self._db

    @staticmethod
    def create(path: Path, store_id: str) -> Catalog:
        """Make a new catalog; the file must not exist."""
        with forks.unforked, _translate_errors(path, "create"), _connect(path, write=True) as db:
            db.execute("begin immediate")
            for statement in SCHEMA.split(";"):
                if statement.strip():
                    db.execute(statement)
            db.executemany("insert into meta values (?, ?)", [("format", str(FORMAT)), ("store", store_id)])
            db.execute("commit")
        return Catalog(path, db, store_id, write=True)

    @staticmethod
    def open(path: Path, *, write: bool = False, immutable: bool = False) -> Catalog:
        """Open an existing catalog; a StoreFormatError if there is none, or if this version cannot read its format.

        An immutable one is read without SQLite's locks, which need files beside it. If another process changes it,
        every read is refused from then on.
        """
        unchanged = file_stamps(path) if immutable else None
        require_catalog(path)
        if _left_to_parent and _file_identity(path) in _left_to_parent:
            raise forks.forked_error(
                f"{path.parent}: the open store", "start this process with multiprocessing's `spawn` or `forkserver`"
            )
        with forks.unforked, _translate_errors(path, "open"), _connect(path, write=write, immutable=immutable) as db:
            meta = dict(db.execute("select key, value from meta").fetchall())
            known = meta.get("format") in (str(FORMAT), str(ENCODED_FORMAT))
            if write and known:
                _add_columns(db)
        found = meta.get("format", "")
        if not known:
            db.close()
            if found.isdigit() and int(found) > ENCODED_FORMAT:
                raise StoreFormatError(
                    f"{path.parent}: written in store format {found}, and this version of understudy reads up to "
                    f"{ENCODED_FORMAT}; run `pip install --upgrade understudy-robotics`"
                )
            raise DamageError(f"{path}: expected a format number, got {found!r}; run `understudy repair`")
        catalog = Catalog(path, db, meta.get("store", ""), write=write, unchanged=unchanged)
        try:
            catalog._refuse_changed()
        except StoreError:
            catalog.close()
            raise
        return catalog

    def close(self) -> None:
        if self._connection is not None:
            with self._turn, forks.unforked, _translate_errors(self.path, "close"):
                self._connection.close()
        self._closed = True

    def abandon(self) -> None:
        """Never close the connection, because closing it removes the log by its name, which may be that of another
        catalog: for one whose file was removed or replaced.
        """
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._db))

    def close_as_one_file(self) -> None:
        """Close a catalog that is to be renamed: its write-ahead log, which keeps its name, must be empty."""
        with closing(self):
            if not self.checkpoint():
                raise StoreFailedError(f"{self.path}: in use by another process; stop it and try again")

    def checkpoint(self) -> bool:
        """Move all of the write-ahead log into the main file; False if a reader prevented it."""
        with self._translate_errors("checkpoint"):
            busy, _, _ = self._db.execute("pragma wal_checkpoint(truncate)").fetchone()
        return not busy

    @contextmanager
    def transaction(self, *, write: bool) -> Iterator[None]:
        """One snapshot for reading, or one atomic and durable change."""
        with self._translate_errors("commit" if write else "read"):
            self._db.execute("begin immediate" if write else "begin")
            try:
                yield
            except BaseException:
                if self._db.in_transaction:
                    self._db.execute("rollback")
                raise
            self._db.execute("commit")

    # ---- commits

    def last_commit(self) -> int:
        with self._translate_errors("read"):
            found = self._db.execute("select max(id) from commits").fetchone()[0]
        return int(found or 0)

    def add_commit(self, commit: int, time: float, num_rows: int) -> None:
        self._db.execute("insert into commits values (?, ?, ?)", (commit, time, num_rows))

    # ---- specs

    def spec(self, spec_id: int) -> StepSpec:
        if spec_id not in self._specs:
            with self._translate_errors("read"):
                found = self._db.execute("select digest, spec from specs where id = ?", (spec_id,)).fetchone()
            if found is None or spec_digest(found[1]) != found[0]:
                raise DamageError(f"{self.path}: spec {spec_id} is damaged; run `understudy repair`")
            self._specs[spec_id] = StepSpec.from_json(json.loads(found[1]))
        return self._specs[spec_id]

    def spec_ids(self) -> list[int]:
        return [row[0] for row in self._rows("select id from specs order by id")]

    def put_spec(self, spec: StepSpec) -> int:
        """The id of a spec, which is added if it is new."""
        content = spec.json_text
        found = self._rows("select id from specs where digest = ?", (spec_digest(content),))
        if found:
            return int(found[0][0])
        if spec.encoded:
            self._db.execute("update meta set value = ? where key = 'format'", (str(ENCODED_FORMAT),))
        added = self._db.execute("insert into specs (digest, spec) values (?, ?)", (spec_digest(content), content))
        return int(added.lastrowid or 0)

    # ---- writers

    def writers(self, where: str = "1", values: Sequence[SqlValue] = ()) -> list[WriterRecord]:
        """The writers that fit an SQL condition, by id."""
        rows = self._rows(f"select * from writers where {where} order by id", values)  # maybe without `checks`
        return [
            WriterRecord(id=row[0], name=row[1], incarnation=row[2], last_seq=row[3], checks=decode_checks(*row[4:]))
            for row in rows
        ]

    def writer(self, name: str, incarnation: str) -> WriterRecord | None:
        """An incarnation of a writer; None if it never began."""
        return next(iter(self.writers("name = ? and incarnation = ?", (name, incarnation))), None)

    def add_writer(self, name: str, incarnation: str) -> WriterRecord:
        added = self._db.execute(
            "insert into writers (name, incarnation, last_seq) values (?, ?, -1)", (name, incarnation)
        )
        return WriterRecord(id=int(added.lastrowid or 0), name=name, incarnation=incarnation, last_seq=-1)

    def put_last_seq(self, writer: int, seq: int, checks: Sequence[int] = ()) -> None:
        values = (seq, encode_checks(checks), writer)
        self._db.execute("update writers set last_seq = ?, checks = ? where id = ?", values)

    # ---- segments

    def segments(self, where: str = "1", values: Sequence[SqlValue] = ()) -> list[SegmentRecord]:
        """The segments that fit an SQL condition, by id."""
        names = ", ".join(SEGMENT_FIELDS)
        rows = self._rows(f"select {names} from segments where {where} order by id", values)
        return [
            SegmentRecord(**{**dict(zip(SEGMENT_FIELDS, row, strict=True)), "sealed": bool(row[-1])}) for row in rows
        ]

    def segment(self, segment_id: int) -> SegmentRecord | None:
        return next(iter(self.segments("id = ?", (segment_id,))), None)

    def segment_ids(self) -> set[int]:
        return {row[0] for row in self._rows("select id from segments")}

    def put_segment(self, segment: SegmentRecord) -> None:
        values = [getattr(segment, name) for name in SEGMENT_FIELDS]
        marks = ", ".join("?" * len(values))
        self._db.execute(f"insert or replace into segments ({', '.join(SEGMENT_FIELDS)}) values ({marks})", values)

    def remove_segment(self, segment_id: int) -> None:
        self._db.execute("delete from segments where id = ?", (segment_id,))

    def last_segment_id(self) -> int:
        """The highest id that a segment ever had."""
        return self._highest_id("segments")

    def last_row(self, segment_id: int) -> int:
        """The row after the last one that a span of a segment covers."""
        found = self._rows("select max(first_row + num_rows) from spans where segment = ?", (segment_id,))
        return int(found[0][0] or 0)

    def layout(self, segment: SegmentRecord) -> Layout:
        return Layout(
            spec=self.spec(segment.spec),
            capacity=segment.capacity,
            heap_bytes=segment.heap_bytes,
            store_id=self.store_id,
            segment_id=segment.id,
        )

    # ---- episodes

    def last_episode_id(self) -> int:
        """The highest id that an episode ever had."""
        return self._highest_id("episodes")

    def _highest_id(self, table: str) -> int:
        ever = self._rows("select seq from sqlite_sequence where name = ?", (table,))
        now = self._rows(f"select max(id) from {table}")  # nothing checks the other table, so do not rely on it alone
        return max([0, *(int(row[0] or 0) for row in (*ever, *now))])

    def episodes(
        self, where: str = "1", values: Sequence[SqlValue] = (), *, check: bool = True
    ) -> Iterator[EpisodeRecord]:
        """The episodes that fit an SQL condition, by id; a DamageError at one that is not as it was written.

        A condition that is wrong is a StoreError at once.
        """
        check_condition(where, SCHEMA, num_values=len(values))
        return self._episodes(where, values, check=check)

    def _episodes(self, where: str, values: Sequence[SqlValue], *, check: bool = True) -> Iterator[EpisodeRecord]:
        names = ", ".join(EPISODE_COLUMNS)
        sql = f"select {names} from episodes where ({where}\n) and id > ? order by id limit {PAGE_EPISODES}"
        last = 0
        while True:  # in pages, so that no read transaction stays open while the caller works
            page = self._guarded_rows(sql, (*values, last), where, of_view=False)
            for row in page:
                yield decode_episode(row, self.path, check=check)
            if len(page) < PAGE_EPISODES:
                return
            last = page[-1][0]

    def episode(self, episode_id: int) -> EpisodeRecord | None:
        if not 0 < episode_id < 2**63:  # SQLite has no larger numbers, so no episode has one
            return None
        return next(self._episodes("id = ?", (episode_id,)), None)

    def episode_ids(self, where: str, values: Sequence[SqlValue] = ()) -> list[int]:
        # Without `order by id`: with it, SQLite walks the whole table by id, whatever index the condition has.
        return sorted(row[0] for row in self._rows(f"select id from episodes where {where}", values))

    def episode_specs(self, first: int, last: int) -> Array:
        """Pairs of episode and spec, for the episodes from `first` to `last`."""
        rows = self._rows("select id, spec from episodes where id between ? and ?", (first, last))
        return np.array(rows, np.int64).reshape(-1, 2)

    def newest_episode_ids(self, limit: int) -> list[int]:
        """The last episodes whose rows are on disk, the newest first."""
        return [
            row[0] for row in self._rows("select id from episodes where not purged order by id desc limit ?", (limit,))
        ]

    def has_episode(self, writer: int, number: int) -> bool:
        return bool(self._rows("select 1 from episodes where writer = ? and number = ?", (writer, number)))

    def put_episode(self, episode: EpisodeRecord, before: EpisodeRecord | None = None) -> None:
        """Write an episode's row; its state `before` is kept as an edit, for views as of the past."""
        self._db.execute(PUT_EPISODE, encode_episode(episode))
        if before is not None and editable_fields(before) != editable_fields(episode):
            state, deleted, info = editable_fields(before)
            self._db.execute(
                "insert into edits (commit_id, episode, state, deleted, info) values (?, ?, ?, ?, ?)",
                (episode.changed, episode.id, state, deleted, json.dumps(info, sort_keys=True, ensure_ascii=False)),
            )

    def episode_totals(self) -> list[EpisodeTotals]:
        """Totals by kind, of episodes that are not purged."""
        rows = self._rows(
            "select kind, deleted is not null, count(*), sum(num_steps), sum(num_bytes), sum(num_human),"
            " coalesce(sum(success = 1), 0), sum(success is not null), sum(state = 'open'), sum(state = 'cut')"
            " from episodes where not purged group by 1, 2 order by 2, 1"
        )
        return [EpisodeTotals(*row) for row in rows]

    def newest_first(self, kind: str) -> Array:
        """Id, whether it is open, steps and bytes of a kind's episodes that are not deleted, the newest first."""
        rows = self._rows(
            "select id, state = 'open', num_steps, num_bytes from episodes where kind = ? and deleted is null"
            " order by id desc",
            (kind,),
        )
        return np.array(rows, np.int64).reshape(-1, 4)

    # ---- spans

    def add_span(self, commit: int, span: SpanRecord) -> None:
        self._db.execute(
            "insert into spans (commit_id, episode, first_index, segment, first_row, num_rows, row_check)"
            " values (?, ?, ?, ?, ?, ?, ?)",
            (commit, span.episode, span.first_index, span.segment, span.first_row, span.num_rows, span.row_check),
        )

    def last_span_id(self) -> int:
        """The highest id that a span ever had."""
        return self._highest_id("spans")

    def remove_spans(self, ids: Iterable[int]) -> None:
        self._db.executemany("delete from spans where id = ?", [(int(span),) for span in ids])

    def spans(self, where: str = "1", values: Sequence[SqlValue] = (), order: str = "id") -> Records:
        """Spans as a structured array (SPAN_DTYPE)."""
        with self._translate_errors("read"):
            rows = self._db.execute(f"select {SPAN_COLUMNS} from spans where {where} order by {order}", values)
            return np.fromiter(chain.from_iterable(rows), np.int64).view(SPAN_DTYPE)

    def dead_episodes(self, segment_id: int) -> set[int]:
        """The episodes with rows in a segment that are deleted; one that is still written to is not dead."""
        rows = self._rows(
            "select distinct e.id from spans s join episodes e on e.id = s.episode"
            " where s.segment = ? and e.deleted is not null and e.state != 'open'",
            (segment_id,),
        )
        return {row[0] for row in rows}

    def live_rows(self) -> dict[int, int]:
        """For each segment, how many of its rows belong to episodes that are not dead."""
        return dict(
            self._rows(
                "select s.segment, sum(s.num_rows) from spans s join episodes e on e.id = s.episode"
                " where e.deleted is null or e.state = 'open' group by 1"
            )
        )

    # ---- checks

    def integrity_problems(self) -> list[str]:
        """What SQLite itself finds wrong, and a table or column that is not there: its name may be damaged."""
        try:
            found = [str(row[0]) for row in self._rows("pragma integrity_check(20)")]
        except (DamageError, StoreFailedError) as error:
            return [str(error)]
        if found != ["ok"]:
            return found
        return [] if self._has_tables() else ["a table or a column is missing"]

    def select(self, sql: str, values: Sequence[SqlValue] = ()) -> list[SqlRow]:
        """The rows of any SQL query; a StoreError if it is wrong."""
        with self._translate_errors("read", given=f"query {shown(sql)}"):
            return self._db.execute(sql, values).fetchall()

    def view_rows(self, sql: str, values: Sequence[SqlValue], condition: str) -> list[SqlRow]:
        """The rows of a query of episodes that contains the condition of a view, which may be anyone's."""
        return self._guarded_rows(sql, values, condition, of_view=True)

    def _guarded_rows(self, sql: str, values: Sequence[SqlValue], condition: str, *, of_view: bool) -> list[SqlRow]:
        num_episodes = self.last_episode_id() if of_view else 0
        if self._guard is None:
            self._guard = Guard(self._db)
        with (
            self._translate_errors("read", given=f"condition {shown(condition)}"),
            self._guard.held(of_view=of_view, num_episodes=num_episodes),
        ):
            return self._db.execute(sql, values).fetchall()

    @contextmanager
    def _translate_errors(self, action: str, *, given: str | None = None) -> Iterator[None]:
        """As the function of this name; but if the tables are right, what fails is the SQL that the user gave."""
        try:
            with self._turn, forks.unforked:
                yield
                self._refuse_changed()
        except _SQL_ERRORS as error:
            if self._closed:
                raise StoreClosedError(f"{self.path}: {action} after close(); open the store again") from error
            self._refuse_changed()
            translated = _translated(error, self.path, action)
            if given is not None and (problem := guard_problem(error)) is not None:
                raise StoreError(f"{given}: {problem}") from error
            if _primary_code(error) in _STATEMENT_CODES and self._has_tables():
                if given is not None:
                    translated = StoreError(f"{given}: {error}; change the {given.partition(' ')[0]}")
                else:
                    translated = StoreFailedError(f"{self.path}: {action} failed: {error}; open the store again")
            raise translated from error

    def _refuse_changed(self) -> None:
        """Refuse what was read if another process has changed an immutable catalog: it may be of two commits."""
        if self._unchanged is not None and self._unchanged != file_stamps(self.path):
            raise StoreError(
                f"{self.path}: another process has written to the store since it was opened here, where this user may "
                f"not write; open it again"
            )

    def _has_tables(self) -> bool:
        """Whether all tables are there, with their columns."""
        try:
            for table, columns in _tables().items():
                found = {column[0] for column in self._db.execute(f"select * from {table} limit 0").description}
                if set(columns) - found - ADDED_COLUMNS.get(table, {}).keys():
                    return False
        except (sqlite3.Error, UnicodeDecodeError):
            return False
        return True

    def _rows(self, sql: str, values: Sequence[SqlValue] = ()) -> list[SqlRow]:
        with self._translate_errors("read"):
            return self._db.execute(sql, values).fetchall()


def require_catalog(path: Path) -> None:
    """An error if there is no catalog, which says what to do if there was one."""
    if path.is_file():
        return
    if segment_files(path.parent):
        raise DamageError(f"{path}: the catalog is gone; run `understudy repair`")
    raise no_store(path.parent)


@cache
def spec_digest(content: str) -> str:
    return xxhash.xxh3_128_hexdigest(content.encode())


@cache
def _tables() -> dict[str, list[str]]:
    """The tables of a catalog and their columns."""
    with closing(sqlite3.connect(":memory:")) as db:
        db.executescript(SCHEMA)
        names = [row[0] for row in db.execute("select name from sqlite_master where type = 'table'")]
        return {name: [row[1] for row in db.execute(f"pragma table_info({name})")] for name in names}


# ---- connections

_left_to_parent: set[tuple[int, int]] = set()  # catalogs that the process writes to which this one was forked from


def _file_identity(path: Path) -> tuple[int, int]:
    status = path.stat()
    return status.st_dev, status.st_ino


def _add_columns(db: sqlite3.Connection) -> None:
    """Bring a catalog of an older version up to date; what is in it stays as it is."""
    for table, columns in ADDED_COLUMNS.items():
        there = {row[1] for row in db.execute(f"pragma table_info({table})")}
        for name, kind in columns.items():
            if there and name not in there:
                db.execute(f"alter table {table} add column {name} {kind}")


LOG_SUFFIX, SHARED_SUFFIX = "-wal", "-shm"  # of SQLite's files beside the catalog
FileStamps: TypeAlias = tuple[tuple[int, int, int] | None, ...]


def beside(catalog: Path, suffix: str) -> Path:
    """SQLite's file of this suffix."""
    return catalog.with_name(catalog.name + suffix)


def file_stamps(catalog: Path) -> FileStamps:
    """What changes before a writing process changes the catalog (its seal, the log), and the catalog itself."""
    return tuple(_stamp(path) for path in (catalog.with_name(SEAL_FILE), beside(catalog, LOG_SUFFIX), catalog))


def _stamp(path: Path) -> tuple[int, int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns


def _close_unforked(connection: sqlite3.Connection) -> None:
    with forks.unforked:
        connection.close()


@contextmanager
def _connect(path: Path, *, write: bool, immutable: bool = False) -> Iterator[sqlite3.Connection]:
    """A connection that stays open unless the body, its first use, fails."""
    mode = "rwc" if write else "ro"
    uri = f"{path.resolve().as_uri()}?mode={mode}" + ("&immutable=1" if immutable else "")
    db = sqlite3.connect(uri, uri=True, isolation_level=None, check_same_thread=False, timeout=30)
    try:
        if write:
            (journal,) = db.execute("pragma journal_mode = wal").fetchone()
            if journal != "wal":  # SQLite does not call this an error
                raise StoreFailedError(
                    f"{path}: expected a write-ahead log, got journal mode {journal!r}; {_DISK_ADVICE}"
                )
            db.execute("pragma synchronous = full")
        yield db
    except BaseException:
        db.close()
        raise


# ---- errors

_DISK_ADVICE = (
    "check the disk and its free space, then run `understudy verify` and open the store again; all acknowledged is safe"
)
_ADVICE = {  # by SQLite's primary error code
    sqlite3.SQLITE_FULL: "free some space and open the store again; all that was acknowledged is safe",
    sqlite3.SQLITE_BUSY: "another process holds the catalog's lock; stop it and open the store again",
    sqlite3.SQLITE_READONLY: "give this user the right to write there and open the store again",
    sqlite3.SQLITE_CANTOPEN: "check that the file is there and that this user may open it",
}


# The sqlite3 module refuses a number above 64 bits and text with half a character with errors of Python, and cannot
# report an error of SQLite that quotes a damaged name.
_SQL_ERRORS = (sqlite3.Error, OverflowError, UnicodeError)
# What SQLite says of a statement, never of a file.
_STATEMENT_CODES = (
    sqlite3.SQLITE_ERROR,
    sqlite3.SQLITE_TOOBIG,
    sqlite3.SQLITE_MISMATCH,
    sqlite3.SQLITE_RANGE,
    sqlite3.SQLITE_AUTH,
)


@contextmanager
def _translate_errors(path: Path, action: str) -> Iterator[None]:
    """Turn SQLite's errors into ours, with the file and what to do."""
    try:
        yield
    except _SQL_ERRORS as error:
        raise _translated(error, path, action) from error


def _translated(error: Exception, path: Path, action: str) -> StoreError:
    """What an error means is decided by its type and SQLite's code, never by its text."""
    code = _primary_code(error)
    # The sqlite3 module raises an OperationalError without a code when a text in a row is not UTF-8, and a
    # UnicodeDecodeError when SQLite's own message is not.
    undecodable = code is None and isinstance(error, sqlite3.OperationalError | UnicodeDecodeError)
    # SQLITE_ERROR: our own SQL is right, so the tables are not those of this format.
    if undecodable or code in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_ERROR):
        return DamageError(f"{path}: the catalog is damaged ({error}); run `understudy repair`")
    if code is None:  # the sqlite3 module refused the call before SQLite saw it
        return StoreError(
            f"{path}: {action} was refused: {error}; pass int of 64 bits, float, str, bytes or None as values"
        )
    return StoreFailedError(f"{path}: {action} failed: {error}; {_ADVICE.get(code, _DISK_ADVICE)}")


def _primary_code(error: Exception) -> int | None:
    """SQLite's code without its extension; None if the error did not come from SQLite."""
    code: int | None = getattr(error, "sqlite_errorcode", None)
    return None if code is None else code & 0xFF
