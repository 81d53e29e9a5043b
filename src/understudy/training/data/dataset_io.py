"""Exchange: data sets of others into a store, and a store's episodes into theirs. The only place that knows both.

Each imported episode says where it came from in its label `origin`, such as rlds:kitchen/1.0.0@5f3a9c1e#train/17: the
format, the data set's name, a digest of its first episode, and the episode's key. What has its origin in the
store already is not imported again, so an import that was killed goes on, and one that is repeated adds nothing.
An episode is in the store whole or not at all. Over the network, the episode that a kill cut in two stays as one that
no view trains on, beside the whole one.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Container, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import xxhash

from understudy.core import NO_VERSION, Episode, EpisodeInfo, Kind, SpecError, StepSpec, StoreError
from understudy.core import tree as trees
from understudy.core.spec import canonical_json
from understudy.formats import ORIGIN, EpisodeSource, FormatError, Named, Place
from understudy.replay import Clause, EpisodeRecord, Reader, Store, View
from understudy.replay.format.chunk import Chunk, Part
from understudy.replay.format.layout import row_bytes_of

WRITER = "import"

Progress = Callable[[int, int | None], None]  # done, of


@dataclass(frozen=True, kw_only=True)
class ImportReport:
    num_imported: int = 0
    num_steps: int = 0  # of those
    num_known: int = 0  # that were there already
    num_without_steps: int = 0  # records that hold no step, such as a single observation


class Destination(Protocol):
    """Where imported episodes go."""

    def known(self, origin: str) -> Container[str]:
        """The origins that are there already, of those that begin so."""
        ...

    def add(self, spec: StepSpec, episode: Episode, info: EpisodeInfo) -> None:
        """Take an episode; it is there, durable and whole, when this returns."""
        ...


def import_episodes(
    source: EpisodeSource,
    destination: Destination,
    place: Place,
    *,
    kind: Kind | None = None,
    progress: Progress | None = None,
) -> ImportReport:
    """Write the episodes that the destination does not have, in order. `kind` replaces what they say of it."""
    origin = origin_of(source, place)
    if origin is None:
        return ImportReport(num_without_steps=source.num_episodes or 0)
    known = _Counted(destination.known(origin), origin)
    report = ImportReport()
    for key, episode in source.episodes(known):
        _check(source.spec, episode, f"{place.path}: {key}")
        info = replace(
            episode.info, kind=kind or episode.info.kind, labels={**episode.info.labels, ORIGIN: f"{origin}{key}"}
        )
        destination.add(source.spec, episode, info)
        report = replace(report, num_imported=report.num_imported + 1, num_steps=report.num_steps + len(episode))
        if progress is not None:
            progress(report.num_imported + known.num_found, source.num_episodes)
    left_out = (source.num_episodes or 0) - report.num_imported - known.num_found
    return replace(report, num_known=known.num_found, num_without_steps=max(left_out, 0))


def origin_of(source: EpisodeSource, place: Place) -> str | None:
    """What the origins of a data set's episodes begin with; None if it has no episode."""
    with closing(_generator(source.episodes())) as episodes:
        for _, episode in episodes:
            name = source.name if isinstance(source, Named) else place.path.resolve().name
            return f"{place.format.name}:{name}@{_digest(source.spec, episode)}#"
    return None


def _generator(episodes: Iterator[tuple[str, Episode]]) -> Any:
    """So that what a source has open is closed when only its first episode is wanted."""
    return (pair for pair in episodes)


def _digest(spec: StepSpec, episode: Episode) -> str:
    state = xxhash.xxh3_64(spec.json_text.encode())
    for path, column in sorted(episode.columns().items()):
        state.update(path.encode())
        for value in column if isinstance(column, list) else (column,):
            state.update(value.encode() if isinstance(value, str) else np.ascontiguousarray(value).tobytes())
    state.update(canonical_json(asdict(episode.info)).encode())
    digest: str = state.hexdigest()
    return digest


class _Counted(Container[str]):
    """Keys whose origin is known; counts those that were asked for."""

    def __init__(self, known: Container[str], origin: str):
        self._known = known
        self._origin = origin
        self._found: set[str] = set()

    def __contains__(self, key: object) -> bool:
        found = f"{self._origin}{key}" in self._known
        if found:
            self._found.add(str(key))
        return found

    @property
    def num_found(self) -> int:
        return len(self._found)


def _check(spec: StepSpec, episode: Episode, where: str) -> None:
    """What a store does not check when it takes whole columns: that rewards are finite and values within bounds."""
    columns = episode.columns()
    try:
        if not np.isfinite(columns["reward"]).all():
            raise SpecError("reward: expected finite numbers, got others; check where it came from")
        for path, leaf in spec.columns.items():
            if leaf.bounded and path in columns:
                proposal = path.partition(trees.SEPARATOR)[0] == "proposal"
                for row, value in enumerate(columns[path]):
                    if not proposal or columns["has_proposal"][row]:
                        leaf.check(value, path)
    except SpecError as error:
        raise FormatError(f"{where}: {error}") from None


# ---- where they go


@contextmanager
def open_destination(
    where: str, *, token_file: Path | None = None, tls_cert: Path | None = None
) -> Iterator[Destination]:
    """A store's directory, made if it is not there; or the address of a server (host:port)."""
    with ExitStack() as undo:
        host, colon, port = where.rpartition(":")
        if host and colon and port.isdigit() and not Path(where).exists():
            yield _RemoteDestination(undo, where, token_file, tls_cert)
        else:
            yield StoreDestination(undo.enter_context(Store.open(where)))


class StoreDestination:
    """A store here: an episode is one chunk, so it is committed whole."""

    def __init__(self, store: Store, writer: str = WRITER):
        self._store = store
        self._writer = writer
        self._incarnation = uuid.uuid4().hex
        self._next = 0
        store.begin_writer(writer, self._incarnation)

    def known(self, origin: str) -> Container[str]:
        with self._store.snapshot() as catalog:  # deleted ones too: they were not wanted
            found = catalog.episodes(f"json_extract(labels, '$.{ORIGIN}') is not null")
            return {e.info.labels[ORIGIN] for e in found if e.info.labels[ORIGIN].startswith(origin)}

    def add(self, spec: StepSpec, episode: Episode, info: EpisodeInfo) -> None:
        columns = rows_of(spec, episode)
        ended = bool(episode.terminated[-1] or episode.truncated[-1])
        part = Part(
            episode=self._next, first_index=0, num_rows=len(episode) + 1, state="ended" if ended else "cut", info=info
        )
        chunk = Chunk(
            writer=self._writer,
            incarnation=self._incarnation,
            seq=self._next,
            spec=spec,
            columns=columns,
            parts=(part,),
        )
        self._store.commit(chunk)
        self._next += 1


class _RemoteDestination:
    """A server: an episode goes out in chunks, and becomes one to train on with the last of them."""

    def __init__(self, undo: ExitStack, address: str, token_file: Path | None, tls_cert: Path | None):
        from understudy.service import connect  # only now: it needs gRPC

        self._undo = undo
        self._remote = undo.enter_context(connect(address, token_file=token_file, tls_cert=tls_cert))
        self._writers: dict[str, Any] = {}

    def known(self, origin: str) -> Container[str]:
        some = self._num_episodes(f"substr({_ORIGIN_SQL}, 1, {len(origin)}) = {_quoted(origin)}")
        return _Asking(self._num_episodes) if some else ()

    def _num_episodes(self, where: str) -> int:
        view = View(name="imported", clauses=(Clause(where=where),))
        return sum(int(said["episodes"][view.name]) for said in self._remote.status([view]).values())

    def add(self, spec: StepSpec, episode: Episode, info: EpisodeInfo) -> None:
        if spec.json_text not in self._writers:
            for writer in self._writers.values():
                writer.close(None)
            commit_steps = max(len(episode) + 1, 64 * 2**20 // row_bytes_of(spec), 1)
            writer = self._remote.writer(WRITER, spec, commit_steps=min(commit_steps, 4096))
            self._writers = {spec.json_text: self._undo.enter_context(writer)}
        writer = self._writers[spec.json_text]
        writer.begin(replace(info, split="eval", labels={}))
        for step in episode.steps():
            writer.append(step)
        end = writer.end if episode.terminated[-1] or episode.truncated[-1] else writer.cut
        end(episode.last_observation, split=info.split, labels=info.labels)
        writer.wait_delivered()


_ORIGIN_SQL = f"json_extract(labels, '$.{ORIGIN}')"


class _Asking(Container[str]):
    """Asks the server for one origin after the other."""

    def __init__(self, num_episodes: Callable[[str], int]):
        self._num_episodes = num_episodes

    def __contains__(self, origin: object) -> bool:
        return self._num_episodes(f"{_ORIGIN_SQL} = {_quoted(str(origin))}") > 0


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"


def rows_of(spec: StepSpec, episode: Episode) -> dict[str, Any]:
    """An episode's T+1 rows as a store has them; the last holds nothing but the last observation."""
    given = episode.columns()
    given["is_step"] = np.ones(len(episode), bool)
    rows: dict[str, Any] = {}
    for path, leaf in spec.columns.items():
        if path not in given:
            raise SpecError(f"{path}: expected {leaf}, got nothing; the episode is not of this spec")
        column = given[path]
        if path.partition(trees.SEPARATOR)[0] != "observation":
            last = NO_VERSION if path == "policy_version" else leaf.zero()
            column = [*column, last] if leaf.ragged else np.concatenate([column, np.asarray(last, column.dtype)[None]])
        rows[path] = column if leaf.ragged else np.ascontiguousarray(column)
    return rows


# ---- the other way


@dataclass(frozen=True, kw_only=True)
class ExportReport:
    num_episodes: int = 0
    num_steps: int = 0
    num_unfinished: int = 0  # left out: no step in them has an outcome yet


def export_episodes(store: Path, place: Place, *, where: str = "1", progress: Progress | None = None) -> ExportReport:
    """Write a store's episodes as a new data set, which is there, whole, when this returns, or not at all."""
    with Reader(store) as reader:
        chosen = list(reader.episodes(f"deleted is null and ({where})"))
        ready = [record for record in chosen if record.num_rows > 1]
        if not ready:
            raise StoreError(f"{store}: no episode fits {where!r}; see `understudy info --episodes`")
        spec = _only_spec(reader, ready, store)
        target = place.format.write(place.path, spec, place.options)
        try:
            num_steps = 0
            for number, record in enumerate(ready):
                episode = reader.read(record.id)
                target.add(f"{record.id:06d}", episode)
                num_steps += len(episode)
                if progress is not None:
                    progress(number + 1, len(ready))
            target.close()
        except BaseException:
            target.abandon()
            raise
    return ExportReport(num_episodes=len(ready), num_steps=num_steps, num_unfinished=len(chosen) - len(ready))


def _only_spec(reader: Reader, chosen: list[EpisodeRecord], store: Path) -> StepSpec:
    """A data set has one spec."""
    specs = sorted({record.spec for record in chosen})
    if len(specs) > 1:
        counts = ", ".join(f"{sum(r.spec == spec for r in chosen)} of spec {spec}" for spec in specs)
        raise StoreError(
            f"{store}: its episodes differ in their fields ({counts}); choose with --where 'spec = {specs[0]}'"
        )
    return reader.spec(specs[0])
