"""Dataset: a directory of TensorFlow Datasets with its splits, shards and records.

<name>/[<config>/]<version>/
    dataset_info.json     name, version, file format, and number of records per shard
    features.json         the fields
    understudy.json       only in exports of Understudy: the exact spec, including bounds
    <name>-<split>.tfrecord-00000-of-00002 ...
"""

from __future__ import annotations

import json
import re
from collections.abc import Container, Generator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from understudy.core import StepSpec
from understudy.formats.format import FormatError
from understudy.formats.rlds.example import Malformed, Values, parse
from understudy.formats.rlds.features import Found, parse_features
from understudy.formats.rlds.records import read_records

INFO_FILE, FEATURES_FILE, SPEC_FILE = "dataset_info.json", "features.json", "understudy.json"
FILE_FORMATS = ("tfrecord", "array_record")
TEMPLATE = "{DATASET}-{SPLIT}.{FILEFORMAT}-{SHARD_X_OF_Y}"
_MAX_JSON_BYTES = 64 * 2**20
_MAX_SHARDS = 10**6


@dataclass(frozen=True, kw_only=True)
class Split:
    """One split: its shards and their numbers of records."""

    name: str
    shards: tuple[tuple[Path, int], ...]

    @property
    def num_records(self) -> int:
        return sum(length for _, length in self.shards)


@dataclass(frozen=True, kw_only=True)
class Record:
    """One record, which is one episode. `key` identifies it in its dataset."""

    key: str
    split: str
    where: str  # for error messages: the file and the number in it
    data: bytes

    def fields(self) -> dict[str, Values]:
        return parse(self.data)

    def malformed(self, error: Malformed) -> FormatError:
        return FormatError(f"{self.where}: {error}; fetch the file again, or ask who made it")


@dataclass(frozen=True, kw_only=True)
class Dataset:
    """The dataset's description, without its records."""

    path: Path
    name: str  # name/config/version
    file_format: str
    splits: Mapping[str, Split]
    of_step: Mapping[str, Found]
    of_episode: Mapping[str, Found]
    spec: StepSpec | None  # if Understudy wrote it

    @property
    def num_records(self) -> int:
        return sum(split.num_records for split in self.splits.values())

    def records(self, skip: Container[str] = ()) -> Generator[Record, None, None]:
        """The records in order, except those in `skip`; refuses a shard with more or fewer records than declared."""
        for split in self.splits.values():
            first = 0
            for path, length in split.shards:

                def wanted(number: int, first: int = first, name: str = split.name) -> bool:
                    return f"{name}/{first + number}" not in skip

                for number, data in read_records(path, self.file_format, wanted):
                    if number >= length and data:
                        raise FormatError(f"{path}: has more than the {length} records that {INFO_FILE} declares")
                    if data:
                        key = f"{split.name}/{first + number}"
                        yield Record(key=key, split=split.name, where=f"{path}: record {number}", data=data)
                    elif number != length:  # the file's end, or an empty record, which is not an episode
                        raise FormatError(
                            f"{path}: has {number} records and {INFO_FILE} declares {length}; fetch the file again"
                        )
                first += length


def open_dataset(path: Path, split: str | None = None) -> Dataset:
    """Open the dataset at `path`: its directory, or a parent that contains only this dataset."""
    directory = _find(path)
    try:
        info = _load(directory / INFO_FILE)
        name, file_format = info["name"], info.get("fileFormat") or "tfrecord"
        version, config = info.get("version", ""), info.get("configName", "")
        if not all(isinstance(text, str) for text in (name, version, config)) or not name:
            raise Malformed("its name, configName or version is not text")
        if file_format not in FILE_FORMATS:
            raise Malformed(f"its fileFormat is {file_format!r}; {' and '.join(FILE_FORMATS)} are read")
        splits = [_split(directory, name, file_format, declared) for declared in info["splits"]]
    except Malformed as error:
        raise FormatError(f"{directory / INFO_FILE}: {error}") from None
    except (KeyError, TypeError, AttributeError, ValueError, OverflowError) as error:
        raise FormatError(f"{directory / INFO_FILE}: is not what TensorFlow Datasets writes ({error!r})") from None
    chosen = {found.name: found for found in splits}
    if split is not None:
        if split not in chosen:
            raise FormatError(f"{directory}: has no split {split!r}; it has {', '.join(chosen) or 'none'}")
        chosen = {split: chosen[split]}
    try:
        of_step, of_episode = parse_features(_load(directory / FEATURES_FILE))
    except Malformed as error:
        raise FormatError(f"{directory / FEATURES_FILE}: {error}") from None
    return Dataset(
        path=directory,
        name="/".join(part for part in (name, config, version) if part),
        file_format=file_format,
        splits=chosen,
        of_step=of_step,
        of_episode=of_episode,
        spec=_spec(directory),
    )


def _find(path: Path) -> Path:
    """The directory with dataset_info.json: this one, or the only one below it."""
    if not path.is_dir():
        raise FormatError(f"{path}: expected a directory of TensorFlow Datasets, got {_what(path)}; check the path")
    if (path / INFO_FILE).is_file():
        return path
    found = sorted(file.parent for depth in ("*", "*/*", "*/*/*") for file in path.glob(f"{depth}/{INFO_FILE}"))
    if len(found) != 1:
        several = (
            f"several datasets ({', '.join(str(directory.relative_to(path)) for directory in found[:5])}); choose one"
        )
        raise FormatError(f"{path}: has {several if found else f'no {INFO_FILE}; is this a directory of RLDS data?'}")
    return found[0]


def _what(path: Path) -> str:
    return "a file" if path.exists() else "nothing"


def _load(path: Path) -> Any:
    try:
        if path.stat().st_size > _MAX_JSON_BYTES:
            raise Malformed(f"has {path.stat().st_size} bytes, too many for a description")
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise FormatError(f"{path}: cannot be read ({error.strerror})") from None
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{path}: is not JSON ({error})") from None
    if not isinstance(content, dict):
        raise FormatError(f"{path}: is not a JSON object")
    return content


def _split(directory: Path, dataset: str, file_format: str, declared: Mapping[str, Any]) -> Split:
    name = declared["name"]
    template = declared.get("filepathTemplate") or TEMPLATE
    lengths = [int(length) for length in declared.get("shardLengths", [])]
    if not isinstance(name, str) or not isinstance(template, str) or not name or "/" in name:
        raise Malformed("a split's name or filepathTemplate is not text")
    if len(lengths) > _MAX_SHARDS or any(not 0 <= length < 2**48 for length in lengths):
        raise Malformed(f"split {name}: its shardLengths are not numbers of records")
    shards = []
    for number, length in enumerate(lengths):
        file = shard_name(template, dataset, name, file_format, number, len(lengths))
        if "/" in file or "\0" in file or file in ("", ".", ".."):
            raise Malformed(f"split {name}: its files would be called {file!r}")
        shards.append((directory / file, length))
    return Split(name=name, shards=tuple(shards))


def shard_name(template: str, dataset: str, split: str, file_format: str, number: int, of: int) -> str:
    words = {
        "DATASET": dataset,
        "SPLIT": split,
        "FILEFORMAT": file_format,
        "SHARD_INDEX": f"{number:05d}",
        "NUM_SHARDS": f"{of:05d}",
        "SHARD_X_OF_Y": f"{number:05d}-of-{of:05d}",
    }
    return re.sub(r"\{(\w+)\}", lambda match: words.get(match.group(1), match.group()), template)


def _spec(directory: Path) -> StepSpec | None:
    path = directory / SPEC_FILE
    if not path.exists():
        return None
    try:
        return StepSpec.from_json(_load(path)["spec"])
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError, OverflowError) as error:
        raise FormatError(f"{path}: holds no spec ({error}); remove the file to read the dataset without it") from None
