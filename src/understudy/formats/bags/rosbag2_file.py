"""Rosbag2: a ROS 2 bag (a directory with metadata.yaml, or one .db3 file) as a Bag, read by the rosbags library."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

import apsw
from rosbags.interfaces import MessageDefinitionFormat
from rosbags.rosbag2 import Reader, ReaderError
from ruamel.yaml.error import YAMLError

from understudy.formats.bags.bag import Message, Topic, add_topic, refusing, type_name

_ADVICE = "it is damaged or was cut off; `ros2 bag reindex` may repair it, or fetch it again"
_FORMATS = {MessageDefinitionFormat.MSG: "ros2msg", MessageDefinitionFormat.IDL: "ros2idl"}


class Rosbag2:
    def __init__(self, path: Path):
        self.path = path
        self.topics: dict[str, Topic] = {}
        with _opened(path) as reader:
            for connection in reader.connections:
                found = Topic(
                    name=connection.topic,
                    type=type_name(connection.msgtype),
                    encoding="cdr",
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


@contextmanager
def _opened(path: Path) -> Iterator[Reader]:
    with refusing(path, _ADVICE, ReaderError, apsw.Error, YAMLError), Reader(path) as reader:
        yield reader
