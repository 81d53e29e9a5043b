"""Recordings of a small robot, written by the libraries that users have: rosbags (.db3 and .mcap bags) and mcap."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from PIL import Image
from rosbags.rosbag2 import CompressionFormat, CompressionMode, StoragePlugin, Writer
from rosbags.typesys import Stores, get_typestore

TYPES = get_typestore(Stores.ROS2_HUMBLE)
START = 1_700_000_000_123_456_789  # ns
JOINTS = ("shoulder", "elbow", "wrist")
WRIST, FRONT, STATE, LEADER = "/wrist/image_raw/compressed", "/front/image_raw", "/joint_states", "/leader/joint_states"


class Sent(NamedTuple):
    """One message: when it was recorded, and the time in its header."""

    topic: str
    log: int
    header: int
    message: Any
    value: Any  # what it is as an array, made without the code under test


@dataclass(frozen=True, kw_only=True)
class Recording:
    sent: Sequence[Sent]

    def of(self, topic: str) -> list[Sent]:
        return [sent for sent in self.sent if sent.topic == topic]

    def latest(self, topic: str, tick: int, clock: str = "log") -> Sent:
        """The latest message at or before a tick, found by looking at all of them."""
        best = None
        for sent in self.of(topic):
            time = getattr(sent, clock)
            if time <= tick and (best is None or time >= getattr(best, clock)):
                best = sent
        assert best is not None
        return best


def make(name: str, /, **fields: Any) -> Any:
    package, _, short = name.partition("/")
    return TYPES.types[f"{package}/msg/{short}"](**fields)


def header(time: int, frame: str = "base") -> Any:
    seconds, rest = divmod(time, 10**9)
    return make("std_msgs/Header", stamp=make("builtin_interfaces/Time", sec=seconds, nanosec=rest), frame_id=frame)


def pixels(rng: np.random.Generator, height: int, width: int, channels: int = 3) -> np.ndarray[Any, Any]:
    return rng.integers(0, 256, (height, width, channels)).astype(np.uint8)


def compressed(image: np.ndarray[Any, Any], time: int, encoding: str = "png") -> Any:
    out = io.BytesIO()
    Image.fromarray(image[..., 0] if image.shape[-1] == 1 else image).save(out, encoding)
    data = np.frombuffer(out.getvalue(), np.uint8)
    return make("sensor_msgs/CompressedImage", header=header(time), format=encoding, data=data)


def raw(
    data: np.ndarray[Any, Any], time: int, encoding: str, *, height: int, width: int, step: int, bigendian: int = 0
) -> Any:
    return make(
        "sensor_msgs/Image",
        header=header(time),
        height=height,
        width=width,
        encoding=encoding,
        is_bigendian=bigendian,
        step=step,
        data=data,
    )


def joints(position: Sequence[float], time: int, names: Sequence[str] = JOINTS, **others: Any) -> Any:
    return make(
        "sensor_msgs/JointState",
        header=header(time),
        name=list(names),
        position=np.asarray(position, np.float64),
        velocity=np.asarray(others.get("velocity", []), np.float64),
        effort=np.asarray(others.get("effort", []), np.float64),
    )


def robot(seconds: float = 1.0, seed: int = 0, start: int = START) -> Recording:
    """Two cameras (30 Hz PNG, 15 Hz bgr8), joints at 200 Hz and the leader's at 50 Hz; each header is a bit older."""
    rng = np.random.default_rng(seed)
    sent: list[Sent] = []

    def at(rate: int, offset: int, latency: int, topic: str, send: Callable[[int], tuple[Any, Any]]) -> None:
        for index in range(int(seconds * rate)):
            log = start + offset + index * 10**9 // rate + int(rng.integers(0, 1000))
            message, value = send(log - latency)
            sent.append(Sent(topic, log, log - latency, message, value))

    def wrist(time: int) -> tuple[Any, Any]:
        image = pixels(rng, 12, 16)
        return compressed(image, time), image

    def front(time: int) -> tuple[Any, Any]:
        image = pixels(rng, 10, 14)
        return raw(image[..., ::-1].ravel(), time, "bgr8", height=10, width=14, step=42), image

    def state(time: int) -> tuple[Any, Any]:
        position, velocity = rng.normal(size=3), rng.normal(size=3)
        return joints(position, time, velocity=velocity), (position, velocity)

    def leader(time: int) -> tuple[Any, Any]:
        position = rng.normal(size=3)
        return joints(position, time), position

    at(30, 1_000, 21_000_000, WRIST, wrist)
    at(15, 40_000_000, 33_000_000, FRONT, front)
    at(200, 77, 1_500_000, STATE, state)
    at(50, 2_000_000, 500_000, LEADER, leader)
    return Recording(sent=sorted(sent, key=lambda one: one.log))


def write_bag(
    path: Path,
    sent: Sequence[Sent],
    plugin: StoragePlugin = StoragePlugin.SQLITE3,
    compression: CompressionMode = CompressionMode.NONE,
) -> Path:
    """A ROS 2 bag: a directory with metadata.yaml and a .db3 or .mcap file."""
    writer = Writer(path, version=9, storage_plugin=plugin)
    writer.set_compression(compression, CompressionFormat.ZSTD)
    with writer:
        connections = {}
        for one in sent:
            name = one.message.__msgtype__
            if one.topic not in connections:
                connections[one.topic] = writer.add_connection(one.topic, name, typestore=TYPES)
            writer.write(connections[one.topic], one.log, TYPES.serialize_cdr(one.message, name))
    return path


def write_mcap(path: Path, sent: Sequence[Sent], **options: Any) -> Path:
    """One MCAP file as a robot's recorder writes it, by the mcap library."""
    from mcap.writer import Writer as McapWriter

    with path.open("wb") as file:
        writer = McapWriter(file, **options)
        writer.start(profile="ros2", library="test")
        schemas: dict[str, int] = {}
        channels: dict[str, int] = {}
        for one in sent:
            name = one.message.__msgtype__
            if name not in schemas:
                text = TYPES.generate_msgdef(name, ros_version=2)[0]
                schemas[name] = writer.register_schema(name=name, encoding="ros2msg", data=text.encode())
            if one.topic not in channels:
                channels[one.topic] = writer.register_channel(
                    topic=one.topic, message_encoding="cdr", schema_id=schemas[name]
                )
            data = bytes(TYPES.serialize_cdr(one.message, name))
            writer.add_message(channel_id=channels[one.topic], log_time=one.log, publish_time=one.log, data=data)
        writer.finish()
    return path
