"""Fields: which topics become which fields of an Episode, with shapes and dtypes taken from the first messages."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from understudy.core import ArraySpec
from understudy.core.suggestion import did_you_mean
from understudy.formats.bags.bag import Bag, Message, Topic, find_topic, list_topics
from understudy.formats.bags.decode import Decoder, Node, NotNumbersError, make_decoder, numbers, walk
from understudy.formats.bags.images import compressed_image, raw_image
from understudy.formats.bags.options import ReadOptions, Reference
from understudy.formats.format import FormatError

RAW = "sensor_msgs/msg/Image"
COMPRESSED = ("sensor_msgs/msg/CompressedImage", "foxglove_msgs/msg/CompressedImage", "foxglove.CompressedImage")
JOINTS = "sensor_msgs/msg/JointState"
JOINT_FIELDS = ("position", "velocity", "effort")
# Parts of a camera's topic that say nothing of which camera it is.
_USUAL = ("compressed", "image", "image_raw", "image_color", "image_rect", "image_rect_raw", "image_rect_color")


@dataclass(frozen=True, kw_only=True)
class TopicField:
    path: str  # in the Episode: "observation/wrist"
    source: Reference
    leaf: ArraySpec
    names: tuple[str, ...] = ()  # of the numbers, such as the joints'
    how: str = "as it is"
    is_camera: bool = False


@dataclass(frozen=True, kw_only=True)
class Plan:
    fields: tuple[TopicField, ...]
    next_of: str | None  # the field whose next row is the action; None if the action is a field of its own
    left_out: Mapping[str, str]  # topic: why

    @property
    def topics(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(field.source.topic for field in self.fields))


class Value(NamedTuple):
    array: np.ndarray[Any, Any]
    names: tuple[str, ...] = ()
    how: str = "as it is"


def plan_fields(bag: Bag, options: ReadOptions) -> Plan:
    """The fields that the options ask for; without observations among them, all cameras and joints are."""
    if not any(topic.num_messages for topic in bag.topics.values()):
        raise FormatError(f"{bag.path}: holds no messages; the recording is empty")
    fields: list[TopicField] = []
    left_out: dict[str, str] = {}
    wanted = dict(options.fields)
    if not any(path.partition("/")[0] == "observation" for path in wanted):
        wanted |= _usual_fields(bag, {source.topic for source in options.actions.values()}, left_out)
    for path, source in {**wanted, **options.actions}.items():
        some = list(_fields_of(bag, path, source, options.floats))
        if not some and (path in options.fields or path in options.actions):
            raise FormatError(f"{bag.path}: {source}: its first message has no positions of joints; leave {path} out")
        if not some:
            left_out[source.topic] = "left out: its first message has no joints"
        fields += some
    if not any(field.path.partition("/")[0] == "observation" for field in fields):
        raise FormatError(
            f"{bag.path}: has no camera and no joints, so give observation/NAME=/topic:field; it has {list_topics(bag)}"
        )
    next_of = None if options.next_of is None else _next_of(bag, fields, options.next_of)
    if next_of is None and not options.actions:
        raise FormatError(
            f"{bag.path}: no topic is named as the action; give action=/topic:field, or action=next for the joints' "
            f"position in the next row; it has {list_topics(bag)}"
        )
    used = {field.source.topic for field in fields}
    for topic in bag.topics.values():
        if topic.name not in used and topic.name not in left_out:
            left_out[topic.name] = f"left out: {topic.type}, {topic.num_messages:,} messages"
    return Plan(fields=tuple(fields), next_of=next_of, left_out=left_out)


def read_value(decoder: Decoder, topic: Topic, field: str, node: Node) -> Value:
    """What a message gives to a field; a FormatError says what is wrong, without the topic."""
    if not field and topic.type in (RAW, *COMPRESSED):
        parts = {name: below.value for name, below in decoder.children(node).items()}
        if topic.type == RAW:
            return Value(raw_image(parts), how=f"{parts['encoding']}, decoded")
        if "data" not in parts:
            raise FormatError("an image has no data; fetch the file again")
        kind = str(parts.get("format", ""))
        return Value(compressed_image(parts["data"], kind), how=f"{kind or 'image'}, decoded")
    try:
        array, names = numbers(decoder, walk(decoder, node, field))
    except NotNumbersError as error:
        there = ", ".join(decoder.children(walk(decoder, node, field))) or ", ".join(decoder.children(node))
        raise FormatError(f"{field or 'the message'}: {error}; name a field of numbers, of {there}") from None
    how = f"{array.size} numbers" if names else "as it is"
    if topic.type == JOINTS and field in JOINT_FIELDS:
        name = decoder.children(node).get("name")
        given = tuple(str(below.value) for below in decoder.children(name).values()) if name is not None else ()
        if given and array.size not in (0, len(given)):
            raise FormatError(f"{field} has {array.size} numbers for {len(given)} joints; fetch the file again")
        names, how = given, f"of {array.size} joints"
    return Value(array, names, how)


def decoders_of(bag: Bag, topics: Collection[str]) -> dict[str, Decoder]:
    return {name: make_decoder(find_topic(bag, name), bag.path) for name in topics}


# --- the fields of a topic --------------------------------------------------------------------------------------------


def _usual_fields(bag: Bag, taken: Collection[str], left_out: dict[str, str]) -> dict[str, Reference]:
    """A field for each camera and each topic of joints; a raw camera goes before its compressed copy."""
    found: dict[str, Reference] = {}
    cameras: dict[tuple[str, ...], str] = {}
    for topic in sorted(bag.topics.values(), key=lambda topic: topic.type in COMPRESSED):
        if topic.name in taken or not topic.num_messages or topic.type not in (RAW, JOINTS, *COMPRESSED):
            continue
        parts = _telling_parts(topic)
        if topic.type != JOINTS:
            if parts in cameras:
                left_out[topic.name] = f"left out: {cameras[parts]} is the same camera"
                continue
            cameras[parts] = topic.name
        path = f"observation/{'_'.join(parts) or 'topic'}"
        while path in found:
            path += "_"
        found[path] = Reference(topic=topic.name)
    return dict(sorted(found.items()))


def _telling_parts(topic: Topic) -> tuple[str, ...]:
    """The parts of a topic that name a field: wrist for /wrist/image_raw/compressed."""
    parts = [part for part in topic.name.split("/") if part]
    if len(parts) > 1 and parts[0] == "observation":  # a file that Understudy wrote
        del parts[0]
    while topic.type != JOINTS and len(parts) > 1 and parts[-1] in _USUAL:
        parts.pop()
    return tuple(parts)


def _fields_of(bag: Bag, path: str, source: Reference, floats: str) -> Iterator[TopicField]:
    """The fields of one topic: one, or those of joints that are not empty, of which there may be none."""
    topic = find_topic(bag, source.topic)
    if not topic.num_messages:
        raise FormatError(f"{bag.path}: {topic.name} ({topic.type}) has no messages; leave it out")
    decoder = make_decoder(topic, bag.path)
    node = decoder.decode(_first(bag, topic.name).data)
    if topic.type == JOINTS and not source.field:
        names = JOINT_FIELDS[:1] if path.partition("/")[0] == "action" else JOINT_FIELDS
        below = decoder.children(node)
        try:
            full = {name: decoder.leaf(below[name]) for name in names if name in below}
        except NotNumbersError as error:
            raise FormatError(
                f"{bag.path}: {topic.name}: a field of the joints {error}; fetch the file again"
            ) from None
        for name in (name for name, array in full.items() if array is not None and array.size):
            here = path if path.partition("/")[0] == "action" else f"{path}/{name}"
            yield _field(bag, here, replace(source, field=name), topic, decoder, node, floats)
    else:
        yield _field(bag, path, source, topic, decoder, node, floats)


def _field(
    bag: Bag, path: str, source: Reference, topic: Topic, decoder: Decoder, node: Node, floats: str
) -> TopicField:
    try:
        value = read_value(decoder, topic, source.field, node)
    except FormatError as error:
        raise FormatError(f"{bag.path}: {source}: {error}") from None
    if value.array.size == 0:
        raise FormatError(f"{bag.path}: {source}: is empty in the first message; leave {path} out")
    rounded = floats == "float32" and value.array.dtype == np.float64
    return TopicField(
        path=path,
        source=source,
        leaf=ArraySpec(shape=value.array.shape, dtype="float32" if rounded else str(value.array.dtype)),
        names=value.names,
        how=f"{value.how}, rounded to float32" if rounded else value.how,
        is_camera=not source.field and topic.type in (RAW, *COMPRESSED),
    )


def _first(bag: Bag, topic: str) -> Message:
    for message in bag.messages([topic]):
        return message
    raise FormatError(f"{bag.path}: {topic}: its messages are missing, though it is listed; fetch the bag again")


def _next_of(bag: Bag, fields: Collection[TopicField], name: str) -> str:
    """The path of the field that action=next means."""
    joints = [
        field.path
        for field in fields
        if bag.topics[field.source.topic].type == JOINTS and field.source.field == "position"
    ]
    observed = [field.path for field in fields if field.path.partition("/")[0] == "observation"]
    if not name and len(joints) == 1:
        return joints[0]
    if not name:
        raise FormatError(
            f"{bag.path}: action=next means the position of the joints, and there are {', '.join(joints) or 'none'}; "
            f"name a field: action=next:{(joints or observed)[0]}"
        )
    if name not in observed:
        advice = did_you_mean(name, observed, f"there are {', '.join(observed)}")
        raise FormatError(f"{bag.path}: action=next:{name}: no such field; {advice}")
    return name
