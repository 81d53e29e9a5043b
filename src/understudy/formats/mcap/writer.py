"""McapWriter: writes Episodes as MCAP files for Foxglove.

    /observation/<camera>       foxglove.CompressedImage
    /observation/..., /action, /proposal, /extras/...        {"value": ...}
    /step                       reward, terminated, truncated, source, policy version
    metadata "understudy"       the key and the attributes of the episode
    metadata "understudy.spec"  the spec of all episodes, for reading them back

Messages are JSON with JSON schemas. A path that ends in .mcap is one file with all episodes in sequence; any
other is a directory with one file per episode.
"""

from __future__ import annotations

import json
import shutil
import uuid
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
from mcap.writer import CompressionType, Writer

from understudy.core import ArraySpec, Episode, Source, StepSpec, UnderstudyError
from understudy.core import tree as trees
from understudy.formats.atomic_dataset import publish_dataset
from understudy.formats.format import FormatError
from understudy.formats.mcap.messages import (
    EPISODE,
    IMAGE,
    IMAGE_SCHEMA,
    QUALITY,
    SPEC,
    STEP,
    STEP_SCHEMA,
    finite,
    image_message,
    is_camera,
    value_message,
    value_schema,
)

TIMES = ("extras/time", "extras/timestamp", "extras/time/tick")  # default fields with a step's time
USUAL_HZ = 10.0  # where an episode does not know its rate
GAP_NS = 10**9  # between episodes of one file
_COMPRESSION = {"zstd": CompressionType.ZSTD, "lz4": CompressionType.LZ4, "none": CompressionType.NONE}


@dataclass(frozen=True, kw_only=True)
class WriteOptions:
    hz: int | None = None  # steps per second, if no time is recorded; None: those of the label fps, or USUAL_HZ
    time: str | None = None  # field with a step's time: seconds if float, nanoseconds if integer
    images: str = "jpeg"  # or png
    compression: str = "zstd"


class McapWriter:
    """MCAP files that are being written."""

    def __init__(self, path: Path, spec: StepSpec, options: WriteOptions):
        if path.exists():
            raise FormatError(f"{path}: already exists; choose another path, or remove it")
        self._path, self._spec, self._options = path, spec, options
        self._time = _time_field(spec, options.time)
        path.parent.mkdir(parents=True, exist_ok=True)
        self._partial = path.parent / f".{path.name}.{uuid.uuid4().hex[:8]}.partial"
        self._partial.mkdir()
        self._one = path.suffix == ".mcap"
        self._recording: _Recording | None = None
        self._num_episodes = 0
        self._next_ns = 0
        self._not_finite: dict[str, None] = {}  # fields with such numbers

    @property
    def notes(self) -> tuple[str, ...]:
        cameras = {path: leaf for path, leaf in self._spec.columns.items() if _is_field(path) and is_camera(leaf)}
        stacks = [path for path, leaf in cameras.items() if len(leaf.shape) > 3]
        notes = []
        if cameras and self._options.images == "jpeg":
            notes.append(
                f"{', '.join(cameras)}: written as JPEG, quality {QUALITY}, which is lossy; "
                f"`mcap:{self._path}?images=png` is exact"
            )
        if stacks:
            notes.append(f"{', '.join(stacks)}: of stacked frames, only the newest is written")
        if self._not_finite:
            notes.append(f"{', '.join(self._not_finite)}: NaN and infinity are written as null, and read back as NaN")
        return tuple(notes)

    def add(self, key: str, episode: Episode) -> None:
        try:
            Episode.from_steps(self._spec, list(episode.steps()), episode.last_observation, episode.info)
        except UnderstudyError as error:
            raise FormatError(f"{key}: {error}; write each spec into a dataset of its own") from None
        if self._recording is None:
            name = "file" if self._one else f"episode_{self._num_episodes:06}.mcap"
            self._recording = _Recording(self._partial / name, self._spec, self._options)
        times = self._times(episode)
        for path, column in episode.columns().items():
            if isinstance(column, np.ndarray) and _is_field(path) and not np.isfinite(column).all():
                self._not_finite[path] = None
        self._recording.add(key, episode, times)
        self._num_episodes += 1
        if self._one:
            self._next_ns = times[-1] + GAP_NS
        else:
            self._end_file()

    def _times(self, episode: Episode) -> list[int]:
        """The time of each of the T+1 rows, in nanoseconds."""
        period_ns = round(10**9 / (self._options.hz or episode.info.fps or USUAL_HZ))
        if self._time is None:
            return [self._next_ns + row * period_ns for row in range(len(episode) + 1)]
        given = episode.columns()[self._time]
        if not np.isfinite(given).all() or (given < 0).any() or (given > 2**62).any():
            raise FormatError(f"{self._time}: expected times since 1970, got {given.min()} to {given.max()}")
        found = [round(time * 10**9) if isinstance(time, float) else int(time) for time in given.tolist()]
        if found[-1] > 2**62:
            raise FormatError(f"{self._time}: expected seconds since 1970, got {given.max()}")
        return [*found, found[-1] + period_ns]

    def _end_file(self) -> None:
        if self._recording is not None:
            self._recording.close()
            self._recording = None

    def close(self) -> None:
        try:
            self._end_file()
            if self._num_episodes == 0:
                raise FormatError(f"{self._path}: no episode was written, so there is nothing to show")
            publish_dataset(self._partial / "file" if self._one else self._partial, self._path)
            if self._one:
                self._partial.rmdir()
        except BaseException:
            self.abandon()
            raise

    def abandon(self) -> None:
        if self._recording is not None:
            self._recording.abandon()
            self._recording = None
        shutil.rmtree(self._partial, ignore_errors=True)


class _Recording:
    """One file."""

    def __init__(self, file: Path, spec: StepSpec, options: WriteOptions):
        self._file: IO[bytes] = file.open("wb")
        self._writer = Writer(self._file, compression=_COMPRESSION[options.compression], enable_data_crcs=True)
        self._writer.start(profile="", library="understudy")
        self._writer.add_metadata(SPEC, {"spec": spec.json_text})
        self._options = options
        self._schemas: dict[str, int] = {}
        self._channels: dict[str, int] = {}
        self._leaves = {path: leaf for path, leaf in spec.columns.items() if _is_field(path)}
        for path, leaf in self._leaves.items():
            if is_camera(leaf):
                self._register(path, IMAGE, IMAGE_SCHEMA)
            else:
                schema = value_schema(leaf)
                self._register(path, schema["title"], schema)
        self._register(STEP, STEP_SCHEMA["title"], STEP_SCHEMA)

    def _register(self, path: str, name: Any, schema: dict[str, Any]) -> None:
        if name not in self._schemas:
            text = json.dumps(schema).encode()
            self._schemas[name] = self._writer.register_schema(name=name, encoding="jsonschema", data=text)
        self._channels[path] = self._writer.register_channel(
            topic=f"/{path}", message_encoding="json", schema_id=self._schemas[name]
        )

    def add(self, key: str, episode: Episode, times: list[int]) -> None:
        about = {"key": key, "begin_ns": str(times[0]), "info": json.dumps(asdict(episode.info))}
        self._writer.add_metadata(EPISODE, about)
        columns = episode.columns()
        for row, time_ns in enumerate(times):
            is_step = row < len(episode)
            for path, leaf in self._leaves.items():
                part = path.partition(trees.SEPARATOR)[0]
                if part == "observation" or (is_step and (part != "proposal" or episode.has_proposal[row])):
                    self._write(path, time_ns, row, self._message(path, leaf, columns[path][row], time_ns))
            if is_step:
                self._write(STEP, time_ns, row, _step_message(episode, row))

    def _message(self, path: str, leaf: ArraySpec, value: Any, time_ns: int) -> bytes:
        if is_camera(leaf):
            return image_message(value, path.rpartition(trees.SEPARATOR)[2], self._options.images, time_ns)
        return value_message(value)

    def _write(self, path: str, time_ns: int, sequence: int, data: bytes) -> None:
        self._writer.add_message(
            channel_id=self._channels[path], log_time=time_ns, publish_time=time_ns, sequence=sequence, data=data
        )

    def close(self) -> None:
        with self._file:
            self._writer.finish()  # type: ignore[no-untyped-call]

    def abandon(self) -> None:
        self._file.close()


def _is_field(path: str) -> bool:
    return path.partition(trees.SEPARATOR)[0] in ("observation", "action", "proposal", "extras")


def _step_message(episode: Episode, row: int) -> bytes:
    message = {
        "index": row,
        "reward": finite(episode.reward[row]),
        "terminated": bool(episode.terminated[row]),
        "truncated": bool(episode.truncated[row]),
        "source": Source(int(episode.source[row])).name.lower(),
        "policy_version": int(episode.policy_version[row]),
    }
    return json.dumps(message, allow_nan=False).encode()


def _time_field(spec: StepSpec, name: str | None) -> str | None:
    """The column with the time of a step; None if there is none."""
    fits: Callable[[str], bool] = lambda path: path in spec.columns and _is_time(spec.columns[path])  # noqa: E731
    if name is not None and not fits(name):
        there = ", ".join(path for path in spec.columns if _is_field(path) and _is_time(spec.columns[path]))
        raise FormatError(
            f"mcap: expected time= the path of a single number, got {name!r}; there are {there or 'none'}"
        )
    return name or next((path for path in TIMES if fits(path)), None)


def _is_time(leaf: ArraySpec) -> bool:
    return leaf.shape == () and leaf.dtype in ("float64", "int64", "uint64")
