"""Decoders of messages: ROS 2's CDR by the rosbags library, without ROS; and JSON.

A decoded message is a Node: a value and, for CDR, what its definition says of its type. Both kinds have `children`
(the fields below) and `leaf` (the numbers, where there are no fields below).
"""

from __future__ import annotations

import json
import keyword
import re
from collections.abc import Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from understudy.core import UnderstudyError
from understudy.core.suggestion import did_you_mean
from understudy.formats.bags.bag import Topic, refusing
from understudy.formats.format import FormatError

Array = np.ndarray[Any, Any]
MOST_ELEMENTS = 100_000  # of an array of messages or texts whose length is in its definition


class Node(NamedTuple):
    value: Any
    type: Any = None  # of CDR: the field's descriptor in rosbags


class NotNumbersError(UnderstudyError, ValueError):
    """A field is text, or a list of different things."""


class Decoder(Protocol):
    def decode(self, data: bytes) -> Node: ...

    def children(self, node: Node) -> Mapping[str, Node]:
        """The fields of a message, or the elements of a list by their numbers; none of a number or a text."""
        ...

    def leaf(self, node: Node) -> Array | None:
        """The numbers of a field; None if it has fields below."""
        ...


def make_decoder(topic: Topic, path: Path) -> Decoder:
    """The decoder of a topic's messages; a FormatError says why there is none."""
    if topic.encoding == "json":
        return JsonDecoder(topic, path)
    if topic.encoding == "cdr":
        return CdrDecoder(topic, path)
    raise FormatError(
        f"{path}: {topic.name}: its messages ({topic.type}) are {topic.encoding or 'of no named encoding'}, and only "
        f"cdr (ROS 2) and json are read; convert them, or leave the topic out"
    )


def walk(decoder: Decoder, node: Node, path: str) -> Node:
    """The field of a dotted path such as pose.position.x; elements of lists are counted from 0."""
    done = ""
    for name in path.split(".") if path else ():
        below = decoder.children(node)
        if name not in below:
            there = did_you_mean(name, below, f"it has {', '.join(list(below)[:20]) or 'none'}")
            raise FormatError(f"{done or 'the message'} has no field {name!r}; {there}")
        node, done = below[name], f"{done}.{name}" if done else name
    return node


def numbers(decoder: Decoder, node: Node) -> tuple[Array, tuple[str, ...]]:
    """The numbers of a field, and their names if it has fields below; a message's header is left out."""
    leaf = decoder.leaf(node)
    if leaf is not None:
        return leaf, ()
    arrays, names = [], []
    for name, array in _leaves(decoder, node, ""):
        arrays.append(array.ravel())
        names += [f"{name}.{index}" for index in range(array.size)] if array.ndim else [name]
    if not arrays:
        raise NotNumbersError("holds no numbers")
    return np.concatenate(arrays), tuple(names)


def _leaves(decoder: Decoder, node: Node, path: str) -> Iterator[tuple[str, Array]]:
    for name, below in decoder.children(node).items():
        full = f"{path}.{name}" if path else name
        if full == "header":
            continue
        try:
            leaf = decoder.leaf(below)
        except NotNumbersError as error:
            raise NotNumbersError(f"{full} {error}") from None
        if leaf is not None:
            yield full, leaf
        else:
            yield from _leaves(decoder, below, full)


def stamp_ns(decoder: Decoder, node: Node) -> int | None:
    """The time in the message's header (or its timestamp) in nanoseconds since 1970; None if it has none."""
    fields = decoder.children(node)
    stamp = decoder.children(fields["header"]).get("stamp") if "header" in fields else fields.get("timestamp")
    parts = decoder.children(stamp) if stamp is not None else {}
    rest = parts.get("nanosec", parts.get("nsec"))
    if "sec" not in parts or rest is None:
        return None
    try:
        return int(parts["sec"].value) * 10**9 + int(rest.value)
    except (TypeError, ValueError):
        return None


class JsonDecoder:
    """Messages in JSON: numbers are float64, null is NaN."""

    def __init__(self, topic: Topic, path: Path):
        self._where = f"{path}: {topic.name}"

    def decode(self, data: bytes) -> Node:
        try:
            return Node(json.loads(data))
        except (ValueError, RecursionError) as error:
            raise FormatError(f"{self._where}: a message is not JSON ({error!s:.200}); fetch the file again") from None

    def children(self, node: Node) -> Mapping[str, Node]:
        if isinstance(node.value, dict):
            return {name: Node(value) for name, value in node.value.items()}
        if isinstance(node.value, list):
            return {str(index): Node(value) for index, value in enumerate(node.value)}
        return {}

    def leaf(self, node: Node) -> Array | None:
        value = node.value
        if isinstance(value, bool):
            return np.asarray(value)
        if value is None or isinstance(value, int | float):
            return _float64(value)
        if isinstance(value, str):
            raise NotNumbersError("is text")
        if isinstance(value, list):
            try:
                array = np.asarray(value)
            except ValueError:
                return None
            if array.dtype.kind == "b" and array.size:
                return array
            if array.dtype.kind in "iufO" and not any(isinstance(x, dict | str) for x in array.flat):
                return _float64(value)
        return None


def _float64(value: Any) -> Array:
    try:
        return np.asarray(value, np.float64)
    except (TypeError, ValueError, OverflowError):
        raise NotNumbersError("is a list of different things") from None


class CdrDecoder:
    """Messages of ROS 2, by the definition in the file, or by that of ROS 2 Humble where the file has none."""

    def __init__(self, topic: Topic, path: Path):
        try:
            from rosbags.interfaces import Nodetype
            from rosbags.serde import SerdeError
            from rosbags.typesys import TypesysError
        except ModuleNotFoundError as error:
            raise FormatError(
                f"{path}: messages of ROS 2 need {error.name}; run `pip install 'understudy-robotics[rosbag2]'`"
            ) from None
        self._topic, self._path, self._error = topic, path, SerdeError
        self._kinds = Nodetype
        with refusing(path, f"the definition of {topic.type} is damaged", TypesysError, SerdeError):
            self._store = _typestore(topic.type, topic.definition, topic.definition_format)
        if self._store is None:
            raise FormatError(
                f"{path}: {topic.name}: its message type {topic.type} is unknown: the bag has no definition of it, and "
                f"it is no type of ROS 2 itself; record the bag as MCAP, which keeps definitions, or leave it out"
            )

    def decode(self, data: bytes) -> Node:
        with refusing(self._path, f"a message of {self._topic.name} is damaged", self._error):
            message = self._store.deserialize_cdr(data, self._topic.type)
        return Node(message, (self._kinds.NAME, self._topic.type))

    def children(self, node: Node) -> Mapping[str, Node]:
        kind, detail = node.type
        if kind == self._kinds.NAME:
            fields = self._store.fielddefs[detail][1]
            return {name: Node(getattr(node.value, _attribute(name)), below) for name, below in fields}
        if kind in (self._kinds.ARRAY, self._kinds.SEQUENCE):
            return {str(index): Node(value, detail[0]) for index, value in enumerate(node.value)}
        return {}

    def leaf(self, node: Node) -> Array | None:
        kind, detail = node.type
        if kind in (self._kinds.ARRAY, self._kinds.SEQUENCE):
            kind, detail = detail[0]
        if kind == self._kinds.NAME:
            return None
        dtype = _DTYPES.get(detail[0])
        if dtype is None:
            raise NotNumbersError("is text" if "string" in detail[0] else f"is {detail[0]}")
        return np.asarray(node.value, dtype)


_DTYPES = {
    name: name for name in ("bool", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64")
} | {
    "byte": "uint8",
    "char": "uint8",
    "float32": "float32",
    "float64": "float64",
}


def _attribute(name: str) -> str:
    """The attribute of a decoded message; Python's own words have an underscore behind them."""
    return f"{name}_" if keyword.iskeyword(name) else name


@lru_cache(maxsize=64)  # a definition takes longer to compile than a thousand messages to decode
def _typestore(type: str, definition: str, definition_format: str) -> Any:
    """The types of a definition in rosbags, ready to decode; None if there is none of this name."""
    from rosbags.typesys import Stores, get_typestore

    store = get_typestore(Stores.EMPTY if definition else Stores.ROS2_HUMBLE)
    if definition:
        types = _parsed(type, definition, definition_format)
        _check_names(types)
        store.register(types)
    if type not in store.fielddefs:
        return None
    store.get_msgdef(type)
    return store


def _parsed(type: str, definition: str, definition_format: str) -> Any:
    from rosbags.typesys import get_types_from_idl, get_types_from_msg

    if definition_format == "ros2msg":
        return get_types_from_msg(definition, type)
    found: dict[str, Any] = {}
    for part in definition.split("=" * 80 + "\n"):
        text = part.partition("\n")[2] if part.startswith("IDL: ") else part
        if text.strip():
            found |= get_types_from_idl(text)
    return found


def _check_names(types: Mapping[str, Any]) -> None:
    """Refuse definitions that are not plain: rosbags makes Python code of them, and a file may come from anyone."""
    for name, (constants, fields) in types.items():
        words = [name, *(constant[0] for constant in constants), *(field[0] for field in fields)]
        for word in words:
            if not re.fullmatch(r"[A-Za-z][A-Za-z0-9_]*(/[A-Za-z][A-Za-z0-9_]*)*", word):
                raise ValueError(f"{word!r:.80} is no name of a message or a field")
        for field, (_, detail) in fields:
            many = isinstance(detail[0], tuple) and detail[1] > MOST_ELEMENTS  # of an array or a bounded sequence
            if many and detail[0][1][0] not in _DTYPES:
                raise ValueError(f"{field} has {detail[1]:,} elements")
