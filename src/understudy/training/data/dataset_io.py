"""Data set import and export: foreign data sets into a store, and a store's episodes into foreign formats.

Each imported episode has its origin in the label `origin`, such as rlds:kitchen/1.0.0@5f3a9c1e#train/17: the format,
the data set's name, a digest of its first episode, and the episode's key. An episode whose origin is in the store is
not imported again, so an import that was killed continues, and one that is repeated adds nothing. The label
`origin_digest` is a digest of the episode itself. With it, episodes of a data set that was moved or renamed are found:
they are read again and not stored again. An episode is in the store completely or not at all. Over the network, an
episode that a kill cut in two stays as one that no view trains on, beside the complete one.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Container, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal, Protocol, TypeAlias

import numpy as np
import xxhash

from understudy.codecs import EncodedColumn
from understudy.core import H264, NO_VERSION, Codec, Episode, EpisodeInfo, Kind, SpecError, StepSpec, StoreError
from understudy.core import tree as trees
from understudy.core.cameras import encode_cameras, with_codecs
from understudy.core.episode import NAMES, ROBOT_TYPE
from understudy.core.spec import canonical_json
from understudy.core.step import decoded_checksum_of, frame_number_of
from understudy.formats import (
    ORIGIN,
    DatasetPath,
    DatasetReader,
    DatasetWriter,
    EncodedDataset,
    EncodedDatasetWriter,
    FormatError,
    NamedDataset,
    NotedDataset,
)
from understudy.replay import Clause, EpisodeRecord, Reader, Store, View
from understudy.replay.format.chunk import Chunk, Part
from understudy.replay.format.encoded_columns import decode_columns
from understudy.replay.format.layout import row_bytes_of

WRITER = "import"
ORIGIN_DIGEST = "origin_digest"  # label of an imported episode: a digest of its content in the data set
_ORIGIN_SQL = f"json_extract(labels, '$.{ORIGIN}')"

ImportCodec: TypeAlias = Literal["raw", "keep", "auto", "jpeg", "h264", "png"]
ProgressCallback = Callable[[int, int | None], None]  # episodes finished, and in all if known


@dataclass(frozen=True, kw_only=True)
class ImportReport:
    num_imported: int = 0
    num_steps: int = 0  # of the imported episodes
    num_known: int = 0  # episodes that were in the store already
    num_without_steps: int = 0  # records that hold no step, such as a single observation
    kept: tuple[str, ...] = ()  # camera fields whose frames are stored as the data set has them encoded


@dataclass(frozen=True, kw_only=True)
class Origin:
    """Where the episodes of a data set come from. The name is for people, and changes when the directory is renamed."""

    format: str
    name: str
    first: str  # digest of the data set's first episode

    @property
    def prefix(self) -> str:
        """How the label `origin` of its episodes begins; the episode's key follows."""
        return f"{self.format}:{self.name}{self.mark}"

    @property
    def mark(self) -> str:
        """What stands between the name and the key."""
        return f"@{self.first}#"


NOTHING: Mapping[str, EncodedColumn] = {}


class ImportTarget(Protocol):
    """A store or server that episodes are imported into."""

    def known(self, origin: str) -> Container[str]:
        """The origins in the store that begin with this text."""
        ...

    def copies(self, origin: Origin) -> Container[tuple[str, str]]:
        """Key and digest of the episodes in the store that have this origin under any name of the data set."""
        ...

    @property
    def takes_encoded(self) -> bool:
        """Whether `add` takes frames that are encoded already."""
        ...

    def add(
        self, spec: StepSpec, episode: Episode, info: EpisodeInfo, encoded: Mapping[str, EncodedColumn] = NOTHING
    ) -> None:
        """Add an episode; when this returns, it is durable and complete.

        `encoded` has the T+1 frames of fields that are stored as they are here.
        """
        ...


def import_episodes(
    reader: DatasetReader,
    target: ImportTarget,
    dataset: DatasetPath,
    *,
    kind: Kind | None = None,
    codec: ImportCodec = "raw",
    progress: ProgressCallback | None = None,
) -> ImportReport:
    """Add the episodes that the target does not have, in order. `kind` overrides the episodes' own kind.

    `codec` says how camera frames are stored; with 'raw' or 'png' they stay what the data set has, pixel by pixel. With
    'keep' they are stored as the data set has them encoded, where that is H.264 which a store can read frame by frame,
    and raw elsewhere; 'auto' does this where GOPs are as short as its own.
    """
    kept = _kept(reader, target, codec)
    spec = with_codecs(encode_cameras(reader.spec, "raw" if codec == "keep" else codec), kept)
    origin = origin_of(reader, dataset)
    if origin is None:
        return ImportReport(num_without_steps=reader.num_episodes or 0)
    known = _Counted(target.known(origin.prefix), origin.prefix)
    copies = target.copies(origin)
    report = ImportReport()
    num_copies = 0  # episodes that the store has from the same data set under another name
    for key, episode in reader.episodes(known):
        digest = _digest(reader.spec, episode)
        if (key, digest) in copies:
            num_copies += 1
        else:
            _check(reader.spec, episode, f"{dataset.path}: {key}")
            labels = {**episode.info.labels, ORIGIN: f"{origin.prefix}{key}", ORIGIN_DIGEST: digest}
            info = replace(episode.info, kind=kind or episode.info.kind, labels=labels)
            if kept:
                assert isinstance(reader, EncodedDataset)
                frames = reader.encoded_frames(key)
                target.add(spec, episode, info, {path: frames[path] for path in kept})
            else:
                target.add(spec, episode, info)
            report = replace(report, num_imported=report.num_imported + 1, num_steps=report.num_steps + len(episode))
        if progress is not None:
            progress(report.num_imported + known.num_found + num_copies, reader.num_episodes)
    report = replace(report, num_known=known.num_found + num_copies, kept=tuple(kept))
    left_out = (reader.num_episodes or 0) - report.num_imported - report.num_known
    return replace(report, num_without_steps=max(left_out, 0))


def _kept(reader: DatasetReader, target: ImportTarget, codec: ImportCodec) -> Mapping[str, Codec]:
    """The fields whose frames are stored as the data set has them encoded."""
    if codec not in ("keep", "auto"):
        return {}
    if not target.takes_encoded:
        if codec == "auto":
            return {}
        raise StoreError(
            "codec: expected auto, raw, jpeg, h264 or png, because the writer to a server encodes frames itself, got "
            "'keep'; import into a directory on this machine to keep them"
        )
    found = reader.encoded if isinstance(reader, EncodedDataset) else {}
    if codec == "keep":
        return found
    automatic = encode_cameras(reader.spec, "auto").encoded
    usual = {path: automatic[path] for path in found if isinstance(automatic.get(path), H264)}
    return {path: found[path] for path, own in usual.items() if found[path].gop_size <= own.gop_size}


def origin_of(reader: DatasetReader, dataset: DatasetPath) -> Origin | None:
    """Where a data set's episodes come from; None if it has no episode."""
    with closing(_generator(reader.episodes())) as episodes:
        for _, episode in episodes:
            name = reader.name if isinstance(reader, NamedDataset) else dataset.path.resolve().name
            return Origin(format=dataset.format.name, name=name, first=_digest(reader.spec, episode))
    return None


def _generator(episodes: Iterator[tuple[str, Episode]]) -> Any:
    """A generator, whose close() closes the reader's files when only its first episode is needed."""
    return (pair for pair in episodes)


def _digest(spec: StepSpec, episode: Episode) -> str:
    state = xxhash.xxh3_64(spec.json_text.encode())
    for path, column in sorted(episode.columns().items()):
        state.update(path.encode())
        for value in column if isinstance(column, list) else (column,):
            state.update(value.encode() if isinstance(value, str) else np.ascontiguousarray(value).tobytes())
    about = asdict(episode.info)
    for label in _NEWER_LABELS:
        about["labels"].pop(label, None)
    state.update(canonical_json(about).encode())
    digest: str = state.hexdigest()
    return digest


_NEWER_LABELS = (ROBOT_TYPE, NAMES)  # earlier versions did not read them, and their imports must be known again


class _Counted(Container[str]):
    """The keys whose origin is in the store; counts those that were found."""

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
    """Check what a store does not check for whole columns: finite rewards, and values within their bounds."""
    columns = episode.columns()
    try:
        if not np.isfinite(columns["reward"]).all():
            raise SpecError("reward: expected finite numbers, got nan or infinity; check the data set")
        for path, leaf in spec.columns.items():
            if leaf.bounded and path in columns:
                proposal = path.partition(trees.SEPARATOR)[0] == "proposal"
                for row, value in enumerate(columns[path]):
                    if not proposal or columns["has_proposal"][row]:
                        leaf.check(value, path)
    except SpecError as error:
        raise FormatError(f"{where}: {error}") from None


# ---- targets


@contextmanager
def open_import_target(
    where: str, *, token_file: Path | None = None, tls_cert: Path | None = None
) -> Iterator[ImportTarget]:
    """Open a store's directory, creating it if needed, or connect to a server (host:port)."""
    with ExitStack() as undo:
        host, colon, port = where.rpartition(":")
        if host and colon and port.isdigit() and not Path(where).exists():
            yield _ServerImportTarget(undo, where, token_file, tls_cert)
        else:
            yield StoreImportTarget(undo.enter_context(Store.open(where)))


class StoreImportTarget:
    """A store on this machine: an episode is one chunk, so its commit is atomic."""

    def __init__(self, store: Store, writer: str = WRITER):
        self._store = store
        self._writer = writer
        self._incarnation = uuid.uuid4().hex
        self._next = 0
        store.begin_writer(writer, self._incarnation)

    def known(self, origin: str) -> Container[str]:
        return {labels[ORIGIN] for labels in self._imported() if labels[ORIGIN].startswith(origin)}

    def copies(self, origin: Origin) -> Container[tuple[str, str]]:
        found = set()
        for labels in self._imported():
            before, mark, key = labels[ORIGIN].partition(origin.mark)
            if mark and before.startswith(f"{origin.format}:"):
                found.add((key, labels.get(ORIGIN_DIGEST, "")))
        return found

    def _imported(self) -> Iterator[Mapping[str, str]]:
        """The labels of all imported episodes; of deleted ones too, because they are not to come back."""
        with self._store.snapshot() as catalog:
            for record in catalog.episodes(f"{_ORIGIN_SQL} is not null"):
                yield record.info.labels

    takes_encoded = True

    def add(
        self, spec: StepSpec, episode: Episode, info: EpisodeInfo, encoded: Mapping[str, EncodedColumn] = NOTHING
    ) -> None:
        columns = rows_of(spec, episode)
        for path, frames in encoded.items():
            columns[path] = [np.frombuffer(packet, np.uint8) for packet in frames.packets]
            columns[frame_number_of(path)] = np.array(frames.frame_numbers, np.uint8)
            columns[decoded_checksum_of(path)] = np.array(frames.checksums, np.uint64)
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


class _ServerImportTarget:
    """A server: an episode is sent in chunks, and views see it when the last one arrives."""

    def __init__(self, undo: ExitStack, address: str, token_file: Path | None, tls_cert: Path | None):
        from understudy.service import connect  # only now: it needs gRPC

        self._undo = undo
        self._remote = undo.enter_context(connect(address, token_file=token_file, tls_cert=tls_cert))
        self._writers: dict[str, Any] = {}

    def known(self, origin: str) -> Container[str]:
        some = self._num_episodes(f"substr({_ORIGIN_SQL}, 1, {len(origin)}) = {_quoted(origin)}")
        return _ServerOrigins(self._num_episodes) if some else ()

    def copies(self, origin: Origin) -> Container[tuple[str, str]]:
        some = self._num_episodes(_any_name_sql(origin))
        return _ServerCopies(self._num_episodes, origin) if some else ()

    def _num_episodes(self, where: str) -> int:
        view = View(name="imported", clauses=(Clause(where=where),))
        return sum(int(status["episodes"][view.name]) for status in self._remote.status([view]).values())

    takes_encoded = False

    def add(
        self, spec: StepSpec, episode: Episode, info: EpisodeInfo, encoded: Mapping[str, EncodedColumn] = NOTHING
    ) -> None:
        assert not encoded
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


class _ServerOrigins(Container[str]):
    """The origins on the server; asks it for one at a time."""

    def __init__(self, num_episodes: Callable[[str], int]):
        self._num_episodes = num_episodes

    def __contains__(self, origin: object) -> bool:
        return self._num_episodes(f"{_ORIGIN_SQL} = {_quoted(str(origin))}") > 0


class _ServerCopies(Container[tuple[str, str]]):
    """The keys and digests of a data set's episodes on the server; asks it for one at a time."""

    def __init__(self, num_episodes: Callable[[str], int], origin: Origin):
        self._num_episodes = num_episodes
        self._origin = origin

    def __contains__(self, key_and_digest: object) -> bool:
        assert isinstance(key_and_digest, tuple)
        key, digest = key_and_digest
        ending = f"{self._origin.mark}{key}"
        conditions = (
            _any_name_sql(self._origin),
            f"substr({_ORIGIN_SQL}, -{len(ending)}) = {_quoted(ending)}",
            f"json_extract(labels, '$.{ORIGIN_DIGEST}') = {_quoted(digest)}",
        )
        return self._num_episodes(" and ".join(conditions)) > 0


def _any_name_sql(origin: Origin) -> str:
    start = f"{origin.format}:"
    same_format = f"substr({_ORIGIN_SQL}, 1, {len(start)}) = {_quoted(start)}"
    return f"{same_format} and instr({_ORIGIN_SQL}, {_quoted(origin.mark)}) > 0"


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"


def rows_of(spec: StepSpec, episode: Episode) -> dict[str, Any]:
    """An episode's T+1 rows as a store keeps them; the last row holds only the last observation."""
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


# ---- export


@dataclass(frozen=True, kw_only=True)
class ExportReport:
    num_episodes: int = 0
    num_steps: int = 0
    num_unfinished: int = 0  # episodes left out because they have no complete step
    kept: tuple[str, ...] = ()  # camera fields whose frames were written as they are stored
    notes: tuple[str, ...] = ()  # what the writer changed, one sentence each


def export_episodes(
    store: Path, dataset: DatasetPath, *, where: str = "1", progress: ProgressCallback | None = None
) -> ExportReport:
    """Write a store's episodes as a new data set, which is complete when this returns or does not exist."""
    with Reader(store) as reader:
        chosen = list(reader.episodes(f"deleted is null and ({where})"))
        ready = [record for record in chosen if record.num_rows > 1]
        if not ready:
            raise StoreError(f"{store}: no episode matches {where!r}; see `understudy info --episodes`")
        spec = _only_spec(reader, ready, store)
        infos = [record.info for record in ready]
        writer = dataset.format.write(dataset.path, spec, dataset.options, infos)
        try:
            num_steps = 0
            kept = _kept_by(writer, [reader.spec(spec_id) for spec_id in sorted({record.spec for record in ready})])
            for number, record in enumerate(ready):
                num_steps += _export_episode(reader, record.id, writer, kept)
                if progress is not None:
                    progress(number + 1, len(ready))
            writer.close()
        except BaseException:
            writer.abandon()
            raise
    return ExportReport(
        num_episodes=len(ready),
        num_steps=num_steps,
        num_unfinished=len(chosen) - len(ready),
        kept=kept,
        notes=writer.notes if isinstance(writer, NotedDataset) else (),
    )


def _export_episode(reader: Reader, episode_id: int, writer: DatasetWriter, kept: tuple[str, ...]) -> int:
    """Write one episode and return its steps. Nothing of it is in memory when the next one is read."""
    key = f"{episode_id:06d}"
    if kept:
        assert isinstance(writer, EncodedDatasetWriter)
        episode, encoded = _read_encoded(reader, episode_id, kept)
        writer.add_encoded(key, episode, encoded)
    else:
        episode = reader.read(episode_id)
        writer.add(key, episode)
    return len(episode)


def _kept_by(writer: DatasetWriter, specs: list[StepSpec]) -> tuple[str, ...]:
    """The fields whose frames a writer takes as they are stored; all episodes must have them encoded."""
    if not isinstance(writer, EncodedDatasetWriter):
        return ()
    codecs = {path: _common_codec([spec.encoded.get(path) for spec in specs]) for path in specs[0].encoded}
    common = {path: codec for path, codec in codecs.items() if codec is not None and path.startswith("observation")}
    taken = writer.keep(common)
    return tuple(path for path in common if path in taken)


def _common_codec(codecs: list[Codec | None]) -> Codec | None:
    """The codec of frames of several specs; None if they are of different kinds."""
    if all(codec == codecs[0] for codec in codecs):
        return codecs[0]
    alike = [codec for codec in codecs if isinstance(codec, H264)]
    if len(alike) < len(codecs):
        return None
    return H264(crf=None, gop_size=max(codec.gop_size for codec in alike))


def _read_encoded(reader: Reader, episode: int, paths: tuple[str, ...]) -> tuple[Episode, dict[str, EncodedColumn]]:
    """An episode, and the frames of some fields as they are stored."""
    record, stored = reader.stored_rows(episode)
    encoded = {
        path: EncodedColumn(
            [bytes(packet) for packet in stored[path]],
            stored[frame_number_of(path)].tolist(),
            stored[decoded_checksum_of(path)].tolist(),
        )
        for path in paths
    }
    return Episode.from_columns(decode_columns(reader.spec(record.spec), stored), record.info), encoded


def _only_spec(reader: Reader, chosen: list[EpisodeRecord], store: Path) -> StepSpec:
    """The one spec of all chosen episodes as they are read; raises StoreError if there are several."""
    specs = sorted({record.spec for record in chosen})
    if len({reader.spec(spec).decoded.json_text for spec in specs}) > 1:
        counts = ", ".join(f"{sum(r.spec == spec for r in chosen)} of spec {spec}" for spec in specs)
        raise StoreError(
            f"{store}: its episodes differ in their fields ({counts}); choose with --where 'spec = {specs[0]}'"
        )
    return reader.spec(specs[0]).decoded
