"""McapFile: one MCAP file as a Bag, read by the mcap library."""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, cast

from mcap.exceptions import McapError
from mcap.reader import SeekingReader
from mcap.records import Channel, Schema
from mcap.records import Message as McapMessage
from mcap.stream_reader import StreamReader
from zstandard import ZstdError

from understudy.formats.bags.bag import Message, Topic, add_topic, refusing, type_name
from understudy.formats.format import FormatError

_ADVICE = "it is damaged or was cut off; `mcap recover` may save what is there, or fetch it again"


class McapFile:
    def __init__(self, path: Path):
        self.path = path
        channels: dict[int, Channel] = {}
        schemas: dict[int, Schema] = {}
        with _opened(path) as file:
            summary = SeekingReader(file, validate_crcs=True, record_size_limit=file.size).get_summary()
            if summary is not None and summary.statistics is not None:
                channels, schemas = summary.channels, summary.schemas
                counts = Counter(summary.statistics.channel_message_counts)
            else:
                counts = Counter()
                reader = SeekingReader(file, validate_crcs=True, record_size_limit=file.size)
                for schema, channel, _ in reader.iter_messages(log_time_order=False):
                    channels[channel.id] = channel
                    counts[channel.id] += 1
                    if schema is not None:
                        schemas[schema.id] = schema
            self.topics: dict[str, Topic] = {}
            for channel in channels.values():
                schema = schemas.get(channel.schema_id)
                add_topic(self.topics, _topic(channel, schema, counts[channel.id]), path)

    def messages(self, topics: Collection[str]) -> Iterator[Message]:
        with _opened(self.path) as file:
            reader = SeekingReader(file, validate_crcs=True, record_size_limit=file.size)
            for _, channel, message in reader.iter_messages(topics=list(topics), log_time_order=False):
                yield Message(channel.topic, message.log_time, message.data)


def _topic(channel: Channel, schema: Schema | None, num_messages: int) -> Topic:
    name = schema.name if schema is not None else "unknown"
    return Topic(
        name=channel.topic,
        type=type_name(name) if channel.message_encoding == "cdr" else name,
        encoding=channel.message_encoding,
        definition=schema.data.decode() if schema is not None and schema.encoding in _TEXTS else "",
        definition_format=schema.encoding if schema is not None else "",
        num_messages=num_messages,
    )


_TEXTS = ("ros2msg", "ros2idl", "omgidl", "jsonschema")


def read_metadata(path: Path, name: str) -> list[dict[str, str]]:
    """The metadata records of this name, in the order of the file."""
    with _opened(path) as file:
        reader = SeekingReader(file, validate_crcs=True, record_size_limit=file.size)
        return [record.metadata for record in reader.iter_metadata() if record.name == name]


def read_records(path: Path) -> Iterator[tuple[str, int, bytes]]:
    """Topic, sequence number and data of all messages, in the order of the file; all checksums are checked."""
    with _opened(path) as file:
        channels: dict[int, str] = {}
        reader = StreamReader(cast(IO[bytes], file), validate_crcs=True, record_size_limit=file.size)
        for record in reader.records:
            if isinstance(record, Channel):
                channels[record.id] = record.topic
            elif isinstance(record, McapMessage):
                yield channels[record.channel_id], record.sequence, record.data


class _File(io.BufferedReader):
    """A file that is never asked for more than it has, because the library believes the lengths in the file."""

    size: int

    def read(self, size: int | None = -1, /) -> bytes:
        rest = max(self.size - self.tell(), 0)
        return super().read(rest if size is None or size < 0 else min(size, rest))


@contextmanager
def _opened(path: Path) -> Iterator[_File]:
    with refusing(path, _ADVICE, McapError, ZstdError), _File(io.FileIO(path)) as file:
        file.size = path.stat().st_size
        if file.size == 0:
            raise FormatError(f"{path}: is empty; the recording did not write anything")
        yield file
