"""ROS 2 bags: a directory with metadata.yaml and its files (.db3 of SQLite, or .mcap), each of which is a Bag too.

Files are read one by one, because the metadata need not agree with them: bags that ROS 2 wrote have other qualities of
service in the two.
"""

from __future__ import annotations

import shutil
import sqlite3
import tempfile
import weakref
from collections.abc import Collection, Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

import yaml  # type: ignore[import-untyped]
import zstandard

from understudy.formats.bags.bag import Bag, Message, Topic, add_topic, refusing, type_name
from understudy.formats.bags.mcap_file import McapFile
from understudy.formats.format import FormatError

METADATA = "metadata.yaml"
_ADVICE = "it is damaged or was cut off; `ros2 bag reindex` may repair it, or fetch it again"


class Db3File:
    """One .db3 file."""

    def __init__(self, path: Path):
        self.path = path
        self.topics: dict[str, Topic] = {}
        with _opened(path) as database:
            definitions = {}  # bags before ROS 2 Iron have none
            if database.execute("select 1 from sqlite_master where name = 'message_definitions'").fetchone():
                rows = database.execute(
                    "select topic_type, encoding, encoded_message_definition from message_definitions"
                )
                definitions = {name: (encoding, text) for name, encoding, text in rows}
            counts = dict(database.execute("select topic_id, count(*) from messages group by topic_id"))
            for number, name, kind, encoding in database.execute(
                "select id, name, type, serialization_format from topics order by id"
            ):
                definition_format, definition = definitions.get(kind, ("", ""))
                found = Topic(
                    name=str(name),
                    type=type_name(str(kind)),
                    encoding=str(encoding),
                    definition=str(definition),
                    definition_format=str(definition_format),
                    num_messages=counts.get(number, 0),
                )
                add_topic(self.topics, found, path)

    def messages(self, topics: Collection[str]) -> Iterator[Message]:
        marks = ", ".join("?" * len(topics))
        with _opened(self.path) as database:
            for name, log_time, data in database.execute(
                "select topics.name, messages.timestamp, messages.data from messages join topics "
                f"on topics.id = messages.topic_id where topics.name in ({marks}) order by messages.id",
                list(topics),
            ):
                if not isinstance(log_time, int) or not isinstance(data, bytes):
                    raise ValueError(f"a message of {name} has the time {log_time!r:.40}")
                yield Message(name, log_time, data)


class BagDirectory:
    """A directory with metadata.yaml, and the files that it lists, in their order."""

    def __init__(self, path: Path):
        self.path = path
        metadata = _metadata(path / METADATA)
        mode = metadata.get("compression_mode") or "none"
        self._compressed_messages = mode.lower() == "message"
        if mode.lower() != "none" and metadata.get("compression_format") != "zstd":
            raise FormatError(
                f"{path}: is compressed as {metadata.get('compression_format')!r:.40}, and only zstd is read; "
                f"convert it with `ros2 bag convert`"
            )
        files = [path / Path(name).name for name in metadata["relative_file_paths"]]
        for file in files:
            if not file.is_file():
                raise FormatError(f"{file}: is missing, though {METADATA} lists it; fetch the whole bag")
        if mode.lower() == "file":
            files = self._decompressed(files)
        self._bags: list[Bag] = [open_file(file) for file in files]
        self.topics: dict[str, Topic] = {}
        for bag in self._bags:
            for topic in bag.topics.values():
                add_topic(self.topics, topic, path)

    def messages(self, topics: Collection[str]) -> Iterator[Message]:
        for bag in self._bags:
            here = [name for name in topics if name in bag.topics]
            for message in bag.messages(here) if here else ():
                if not self._compressed_messages:
                    yield message
                    continue
                with refusing(bag.path, _ADVICE, zstandard.ZstdError):
                    data = zstandard.ZstdDecompressor().decompressobj().decompress(message.data)
                yield message._replace(data=data)

    def _decompressed(self, files: Collection[Path]) -> list[Path]:
        """The files without their compression, in a directory that is removed with this object."""
        folder = tempfile.mkdtemp(prefix="understudy-bag-")
        weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
        found = []
        for file in files:
            found.append(Path(folder) / file.stem)
            with refusing(file, _ADVICE, zstandard.ZstdError), file.open("rb") as source, found[-1].open("wb") as out:
                zstandard.ZstdDecompressor().copy_stream(source, out)
        return found


def open_bag(path: Path) -> Bag:
    """The bag at a path: a directory or a file."""
    return BagDirectory(path) if path.is_dir() else open_file(path)


def open_file(path: Path) -> Bag:
    if path.suffix not in (".db3", ".mcap"):
        raise FormatError(f"{path}: expected a .db3 or .mcap file; give the directory of a ROS 2 bag")
    return McapFile(path) if path.suffix == ".mcap" else Db3File(path)


@contextmanager
def _opened(path: Path) -> Iterator[sqlite3.Connection]:
    """The database, for reading; a log beside it, which a recorder that was killed leaves, is read too."""
    log = path.with_name(f"{path.name}-wal")
    only = "mode=ro" if log.is_file() and log.stat().st_size else "immutable=1"
    with (
        refusing(path, _ADVICE, sqlite3.Error),
        closing(sqlite3.connect(f"file:{quote(str(path))}?{only}", uri=True)) as database,
    ):
        yield database


def _metadata(file: Path) -> Mapping[str, Any]:
    with refusing(file, _ADVICE, yaml.YAMLError):
        found = yaml.safe_load(file.read_bytes())
        about = found["rosbag2_bagfile_information"]
        files, *texts = (about.get(name) for name in ("relative_file_paths", "compression_mode", "compression_format"))
        if not isinstance(files, list) or not files or not all(isinstance(name, str) for name in files):
            raise FormatError(f"{file}: lists no files (relative_file_paths); run `ros2 bag reindex`")
        if not all(text is None or isinstance(text, str) for text in texts):
            raise FormatError(f"{file}: expected texts for the compression, got {texts!r:.80}; run `ros2 bag reindex`")
        return dict(about)
