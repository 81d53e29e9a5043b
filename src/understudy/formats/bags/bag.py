"""Bag: one recording, with its topics and its messages as they are in the file.

A bag keeps no file open between two calls. `refusing` turns what the libraries raise for a damaged file into a
FormatError that names the file.
"""

from __future__ import annotations

import struct
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple, Protocol

from understudy.core.suggestion import did_you_mean
from understudy.formats.format import FormatError

# What the libraries raise for damaged files, beside exceptions of their own.
_DAMAGE = (
    OSError,
    ValueError,
    LookupError,
    TypeError,
    AttributeError,
    AssertionError,
    ArithmeticError,
    EOFError,
    RuntimeError,
    MemoryError,
    struct.error,
)


@dataclass(frozen=True, kw_only=True)
class Topic:
    """A topic of a bag. `definition` is the text of its message type, in `definition_format`; "" if it has none."""

    name: str  # "/joint_states"
    type: str  # "sensor_msgs/msg/JointState"
    encoding: str  # of the messages: "cdr", "json"
    definition: str = ""
    definition_format: str = ""  # "ros2msg", "ros2idl", "jsonschema"
    num_messages: int = 0


class Message(NamedTuple):
    topic: str
    log_time: int  # nanoseconds since 1970, when it was recorded
    data: bytes


class Bag(Protocol):
    @property
    def path(self) -> Path: ...

    @property
    def topics(self) -> Mapping[str, Topic]: ...

    def messages(self, topics: Collection[str]) -> Iterator[Message]:
        """The messages of some topics in the order of the file, which is the same each time."""
        ...


def add_topic(topics: dict[str, Topic], found: Topic, path: Path) -> None:
    """Add a topic, or the messages of another publisher to one that is there."""
    other = topics.get(found.name)
    if other is not None:
        if (other.type, other.encoding) != (found.type, found.encoding):
            raise FormatError(
                f"{path}: the messages of {found.name} have the types {other.type} ({other.encoding}) and {found.type} "
                f"({found.encoding}); record each in a topic of its own"
            )
        found = replace(found, num_messages=found.num_messages + other.num_messages)
    topics[found.name] = found


def find_topic(bag: Bag, name: str) -> Topic:
    """The topic of a name; a FormatError lists the topics and says which is meant."""
    if name in bag.topics:
        return bag.topics[name]
    advice = did_you_mean(name, bag.topics, "choose another.")
    raise FormatError(f"{bag.path}: has no topic {name}; {advice} It has {list_topics(bag)}")


def list_topics(bag: Bag) -> str:
    """The topics with their types and numbers of messages, for an error."""
    return ", ".join(f"{topic.name} ({topic.type}, {topic.num_messages:,} messages)" for topic in bag.topics.values())


def type_name(name: str) -> str:
    """The name of a message type as ROS 2 writes it: package/msg/Type."""
    package, slash, rest = name.partition("/")
    return f"{package}/msg/{rest}" if slash and "/" not in rest else name


@contextmanager
def refusing(path: Path, advice: str, *own: type[Exception]) -> Iterator[None]:
    """Raise a FormatError for what a library raises; `own` are the library's exceptions."""
    caught: tuple[type[Exception], ...] = (*_DAMAGE, *own)
    try:
        yield
    except FormatError:
        raise
    except caught as error:
        found = ": ".join([type(error).__name__, *filter(None, [" ".join(str(error).split())])])
        raise FormatError(f"{path}: cannot be read ({found:.300}); {advice}") from None
