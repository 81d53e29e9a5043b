"""ROS 2 bags: a directory with metadata.yaml and its files, each of which is a Bag too (.db3 by rosbags, or .mcap).

Files are read one by one, because the metadata need not agree with them: rosbags' reader of directories leaves out
the messages of topics whose quality of service is written differently in the two.
"""

from __future__ import annotations

import shutil
import tempfile
import weakref
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import apsw
import zstandard
from rosbags.interfaces import ConnectionExtRosbag2, MessageDefinitionFormat
from rosbags.rosbag2 import Reader, ReaderError
from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from understudy.formats.bags.bag import Bag, Message, Topic, add_topic, refusing, type_name
from understudy.formats.bags.mcap_file import McapFile
from understudy.formats.format import FormatError

METADATA = "metadata.yaml"
_ADVICE = "it is damaged or was cut off; `ros2 bag reindex` may repair it, or fetch it again"
_FORMATS = {MessageDefinitionFormat.MSG: "ros2msg", MessageDefinitionFormat.IDL: "ros2idl"}


class Db3File:
    """One .db3 file."""

    def __init__(self, path: Path):
        self.path = path
        self.topics: dict[str, Topic] = {}
        with _opened(path) as reader:
            for connection in reader.connections:
                assert isinstance(connection.ext, ConnectionExtRosbag2)
                found = Topic(
                    name=connection.topic,
                    type=type_name(connection.msgtype),
                    encoding=connection.ext.serialization_format,
                    definition=connection.msgdef.data,
                    definition_format=_FORMATS.get(connection.msgdef.format, ""),
                    num_messages=connection.msgcount,
                )
                add_topic(self.topics, found, path)

    def messages(self, topics: Collection[str]) -> Iterator[Message]:
        with _opened(self.path) as reader:
            chosen = [connection for connection in reader.connections if connection.topic in topics]
            for connection, log_time, data in reader.messages(chosen) if chosen else ():
                yield Message(connection.topic, log_time, bytes(data))


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
def _opened(path: Path) -> Iterator[Reader]:
    with refusing(path, _ADVICE, ReaderError, apsw.Error), Reader(path) as reader:
        yield reader


def _metadata(file: Path) -> Mapping[str, Any]:
    with refusing(file, _ADVICE, YAMLError):
        found = YAML(typ="safe").load(file.read_bytes())
        about = found["rosbag2_bagfile_information"]
        files, *texts = (about.get(name) for name in ("relative_file_paths", "compression_mode", "compression_format"))
        if not isinstance(files, list) or not files or not all(isinstance(name, str) for name in files):
            raise FormatError(f"{file}: lists no files (relative_file_paths); run `ros2 bag reindex`")
        if not all(text is None or isinstance(text, str) for text in texts):
            raise FormatError(f"{file}: expected texts for the compression, got {texts!r:.80}; run `ros2 bag reindex`")
        return dict(about)
