"""Sidecar files in `meta/understudy` with what LeRobot cannot store, so that exports can be read back exactly.

    spec.json       the spec and the column of each field
    rest.parquet    a row per episode: its attributes, its last observation, and the fields without a column

Of a camera whose frames are in the videos as a store had them (`codecs` in spec.json), the row has the checksums of the
decoded frames, the number of each in its GOP, and the last observation as an encoded frame.

LeRobot ignores both. If its tools changed the dataset afterwards, the sidecar no longer fits, which is detected.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.parquet as pq  # type: ignore[import-untyped]

from understudy.codecs import EncodedColumn
from understudy.core import H264, ArraySpec, Episode, EpisodeInfo, StepSpec, UnderstudyError
from understudy.core.codec import codec_from_json, codec_to_json
from understudy.formats.format import FormatError
from understudy.formats.lerobot.info import Feature, Info, parse_json, read_json, shown
from understudy.formats.lerobot.tables import Rows, refusing

FOLDER = Path("meta") / "understudy"
VERSION = 1
KEEPING_VERSION = 2  # with frames as a store had them
GROUP_BYTES = 16 * 2**20  # size of a row group

Column = Any  # an array, a list where the field is ragged, or KeptFrames


@dataclass(frozen=True, kw_only=True)
class Contents:
    """The content of spec.json."""

    spec: StepSpec
    columns: Mapping[str, Feature]  # field of the Episode: its LeRobot column
    paths: tuple[str, ...]  # fields in rest.parquet, in column order
    codecs: Mapping[str, H264] = field(default_factory=dict)  # fields whose videos have frames as a store had them


@dataclass(frozen=True, kw_only=True)
class KeptFrames:
    """What the sidecar has of T+1 encoded frames; those before the last are in the video."""

    frame_numbers: list[int]
    checksums: list[int]
    last: bytes


def contents_of(spec: StepSpec, columns: Mapping[str, Feature], codecs: Mapping[str, H264] | None = None) -> Contents:
    """The sidecar has the last value of observations with a LeRobot column, and all values of fields without one."""
    kept = [path for path in spec.columns if path != "is_step"]
    paths = tuple(path for path in kept if path not in columns or is_observation(path))
    return Contents(spec=spec, columns=columns, paths=paths, codecs=codecs or {})


def is_observation(path: str) -> bool:
    return path.partition("/")[0] == "observation"


# --- writing -----------------------------------------------------------------------------------------------------


class SidecarWriter:
    def __init__(self, root: Path, contents: Contents) -> None:
        self._contents = contents
        self._root = root
        self._schema = pa.schema(
            [
                ("episode_index", pa.int64()),
                ("length", pa.int64()),
                ("info", pa.string()),
                *((str(number), pa.large_binary()) for number in range(len(contents.paths))),
            ]
        )
        (root / FOLDER).mkdir(parents=True)
        self._writer = pq.ParquetWriter(
            root / FOLDER / "rest.parquet",
            self._schema,
            compression="zstd",
            use_dictionary=False,
            write_page_checksum=True,
            write_statistics=False,
        )
        self._rows: list[dict[str, Any]] = []
        self._size_bytes = 0

    def keep(self, codecs: Mapping[str, H264]) -> None:
        """These fields come as encoded frames."""
        self._contents = replace(self._contents, codecs=codecs)

    def add(self, number: int, episode: Episode, kept: Mapping[str, EncodedColumn]) -> None:
        columns = episode.columns()
        row: dict[str, Any] = {"episode_index": number, "length": len(episode)}
        row["info"] = json.dumps(asdict(episode.info), ensure_ascii=False)
        for index, path in enumerate(self._contents.paths):
            leaf, column = self._contents.spec.columns[path], columns[path]
            if path in kept:
                row[str(index)] = _pack_kept(kept[path])
            else:
                row[str(index)] = pack(column[-1:] if path in self._contents.columns else column, leaf)
            self._size_bytes += len(row[str(index)])
        self._rows.append(row)
        if self._size_bytes > GROUP_BYTES:
            self._flush()

    def close(self, facts: Mapping[str, Any]) -> None:
        self._flush()
        self._writer.close()
        fields = {
            "understudy": KEEPING_VERSION if self._contents.codecs else VERSION,
            "spec": self._contents.spec.to_json(),
            "columns": {path: feature.key for path, feature in self._contents.columns.items()},
            "codecs": {path: codec_to_json(codec) for path, codec in self._contents.codecs.items()},
            **facts,
        }
        (self._root / FOLDER / "spec.json").write_text(json.dumps(fields, indent=1) + "\n", encoding="utf-8")

    def abandon(self) -> None:
        self._writer.close()

    def _flush(self) -> None:
        if self._rows:
            self._writer.write_table(pa.Table.from_pylist(self._rows, schema=self._schema))
            self._rows, self._size_bytes = [], 0


def _pack_kept(column: EncodedColumn) -> bytes:
    """Checksums, numbers of frames in their GOPs, and the last packet."""
    checksums, numbers = np.array(column.checksums, "<u8"), np.array(column.frame_numbers, np.uint8)
    return checksums.tobytes() + numbers.tobytes() + column.packets[-1]


def _unpack_kept(data: Any, num: int, where: str) -> KeptFrames:
    if not isinstance(data, bytes) or len(data) <= 9 * num:
        raise FormatError(f"{where}: expected {num} checksums and a frame; fetch the dataset again")
    return KeptFrames(
        checksums=np.frombuffer(data, "<u8", num).tolist(),
        frame_numbers=list(data[8 * num : 9 * num]),
        last=data[9 * num :],
    )


def pack(column: Column, leaf: ArraySpec) -> bytes:
    """Encode the values of one field: texts as JSON; ragged values after their lengths; others as raw bytes."""
    if leaf.dtype == "str":
        return json.dumps(list(column), ensure_ascii=False).encode()
    dtype = leaf.numpy_dtype.newbyteorder("<")
    if leaf.ragged:
        lengths = np.array([len(value) for value in column], "<i8")
        return lengths.tobytes() + b"".join(np.ascontiguousarray(value, dtype).tobytes() for value in column)
    return np.ascontiguousarray(column, dtype).tobytes()


# --- reading -----------------------------------------------------------------------------------------------------


def read_contents(info: Info) -> Contents | None:
    """The sidecar's content; None if Understudy did not write this dataset."""
    path = info.root / FOLDER / "spec.json"
    if not path.exists():
        return None
    fields = read_json(path)
    if not isinstance(fields, dict) or fields.get("understudy") not in (VERSION, KEEPING_VERSION):
        raise FormatError(f"{path}: has another version; use the Understudy that wrote it, or ?rest=ignore")
    try:
        spec = StepSpec.from_json(fields["spec"])
        keys = {name: info.features[key] for name, key in fields["columns"].items()}
        leaves = {name: spec.columns[name] for name in keys}
        codecs = {name: codec_from_json(codec) for name, codec in fields.get("codecs", {}).items()}
        kept = {
            name: codec for name, codec in codecs.items() if isinstance(codec, H264) and keys[name].dtype == "video"
        }
    except (UnderstudyError, ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        raise FormatError(
            f"{path}: does not fit meta/info.json ({shown(str(error))}); fetch the dataset again, or use ?rest=ignore"
        ) from None
    for name, feature in keys.items():
        leaf = leaves[name]
        dtype = "string" if leaf.dtype == "str" else leaf.dtype
        shape = (1,) if leaf.dtype == "str" else None if leaf.ragged else leaf.fixed_shape or (1,)
        if feature.shape != shape or (dtype not in (feature.dtype, "uint8") and not feature.is_camera):
            raise FormatError(f"{path}: {shown(name)} does not fit {feature.key!r} in meta/info.json; use ?rest=ignore")
    return contents_of(spec, keys, kept)


class SidecarReader:
    """Reads the rows of rest.parquet in order."""

    def __init__(self, root: Path, contents: Contents, num_episodes: int) -> None:
        self._path = root / FOLDER / "rest.parquet"
        self._contents = contents
        names = ["episode_index", "length", "info", *(str(number) for number in range(len(contents.paths)))]
        self._rows = Rows(self._path, dict.fromkeys(names, 1), batch_rows=1)
        if self._rows.num_rows != num_episodes:
            self._rows.close()
            raise FormatError(
                f"{self._path}: has {self._rows.num_rows} episodes and the dataset has {num_episodes}: "
                f"it was changed after Understudy wrote it; read it with ?rest=ignore"
            )

    def take(self, number: int, length: int) -> tuple[dict[str, Column], EpisodeInfo]:
        """The columns of an episode; only the last value of observations that have a LeRobot column."""
        table = self._rows.take(number, 1)
        with refusing(self._path):
            row = table.to_pylist()[0]
        if (row["episode_index"], row["length"]) != (number, length):
            raise FormatError(
                f"{self._path}: episode {number} has another length than in the dataset: it was changed after "
                f"Understudy wrote it; read it with ?rest=ignore"
            )
        found: dict[str, Column] = {}
        for index, path in enumerate(self._contents.paths):
            leaf = self._contents.spec.columns[path]
            num = 1 if path in self._contents.columns else length + is_observation(path)
            where = f"{self._path}: episode {number}: {shown(path)}"
            if path in self._contents.codecs:
                found[path] = _unpack_kept(row[str(index)], length + 1, where)
            else:
                found[path] = unpack(row[str(index)], leaf, num, where)
        return found, self._info(row["info"], number)

    def close(self) -> None:
        self._rows.close()

    def _info(self, text: Any, number: int) -> EpisodeInfo:
        where = f"{self._path}: episode {number}: info"
        fields = parse_json(text, where) if isinstance(text, str) else None
        if not isinstance(fields, dict):
            raise FormatError(f"{where}: expected attributes, got {shown(fields)}; fetch the dataset again")
        try:
            return EpisodeInfo(**fields)
        except (UnderstudyError, TypeError, ValueError) as error:
            raise FormatError(f"{where}: {shown(str(error))}; fetch the dataset again") from None


def unpack(data: Any, leaf: ArraySpec, num: int, where: str) -> Column:
    """Decode `num` values of one field that `pack` wrote."""
    wrong = FormatError(f"{where}: expected {num} values of {leaf}; fetch the dataset again")
    if not isinstance(data, bytes):
        raise wrong
    if leaf.dtype == "str":
        try:
            values = parse_json(data.decode(), where)
        except UnicodeDecodeError:
            raise wrong from None
        if not isinstance(values, list) or len(values) != num or not all(isinstance(value, str) for value in values):
            raise wrong
        return values
    if not leaf.ragged:
        if len(data) != num * leaf.row_bytes:
            raise wrong
        return _numbers(data, leaf, wrong).reshape(num, *leaf.fixed_shape)
    if len(data) < 8 * num:
        raise wrong
    lengths = np.frombuffer(data, "<i8", num)
    tail = tuple(size for size in leaf.shape[1:] if size is not None)
    elements = int(np.prod(tail, dtype=np.int64))
    if (lengths < 0).any() or (lengths > len(data)).any():
        raise wrong
    if int(lengths.sum()) * elements * leaf.numpy_dtype.itemsize != len(data) - 8 * num:
        raise wrong
    flat = _numbers(data[8 * num :], leaf, wrong)
    pieces = np.split(flat, np.cumsum(lengths[:-1]) * elements)
    return [piece.reshape(length, *tail) for piece, length in zip(pieces, lengths.tolist(), strict=True)]


def _numbers(data: bytes, leaf: ArraySpec, wrong: FormatError) -> np.ndarray[Any, Any]:
    if leaf.dtype == "bool" and data.strip(b"\0\1"):
        raise wrong
    return np.frombuffer(data, leaf.numpy_dtype.newbyteorder("<")).astype(leaf.numpy_dtype)
