"""LeRobotWriter: writes T frames per episode in LeRobot's files, and everything else in sidecar files.

The dataset is written to a temporary directory beside its path and renamed when it is complete.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import tempfile
from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import av.error
import numpy as np
import pyarrow as pa  # type: ignore[import-untyped]

from understudy.codecs import EncodedColumn
from understudy.codecs.nal import split_units
from understudy.core import H264, Codec, Episode, EpisodeInfo, Source, StepSpec
from understudy.core.episode import FPS, MEASURED_FPS, NAMES, ROBOT_TYPE, flat_names, given_names
from understudy.formats.atomic_dataset import publish_dataset
from understudy.formats.format import FormatError
from understudy.formats.lerobot import stats
from understudy.formats.lerobot.file_rotation import (
    DATA_FILE_BYTES,
    VIDEO_FILE_BYTES,
    FileRotation,
    TableFiles,
    VideoFiles,
)
from understudy.formats.lerobot.image import encode_image
from understudy.formats.lerobot.info import COUNTERS, DATA_PATHS, MOST_STEPS, VIDEO_PATHS, Feature
from understudy.formats.lerobot.meta import MetaWriter
from understudy.formats.lerobot.packets import mux, packets_of, playable
from understudy.formats.lerobot.plan import plan_writing
from understudy.formats.lerobot.sidecar import SidecarWriter, contents_of
from understudy.formats.lerobot.tables import Array
from understudy.formats.lerobot.video import CODECS, MOST_MEAN_ERROR, encode, mean_error
from understudy.formats.options import number, one_of
from understudy.formats.registry import check_options

OPTIONS = ("version", "video", "fps")
MOST_FPS = 1000
SUCCESS = "next.success"
FLAGS = ("next.done", "next.truncated", SUCCESS, "intervention")
KEEP = "keep"  # frames that the store has as H.264 are written as they are
USUAL_VIDEO = "av1"  # of other frames
USUAL_FPS = "10"  # where no episode knows its rate


class LeRobotWriter:
    """Writes one dataset; `version`, `video` and `fps` are the options of docs/lerobot.md."""

    def __init__(
        self, path: Path, spec: StepSpec, options: Mapping[str, str], infos: Sequence[EpisodeInfo] = ()
    ) -> None:
        check_options(options, OPTIONS, "lerobot")
        version = one_of("lerobot", "version", options.get("version", "3"), ("3", "2.1"))
        video = one_of("lerobot", "video", options.get("video", KEEP), (KEEP, *CODECS, "png"))
        fps = number("lerobot", "fps", options["fps"] if "fps" in options else _frame_rate(infos))
        self._assumes_fps = "fps" not in options and not any(FPS in info.labels for info in infos)
        if fps > MOST_FPS:
            raise FormatError(f"lerobot: expected fps= a number up to {MOST_FPS}, got {fps}")
        if path.exists():
            raise FormatError(f"{path}: already exists; choose another name, or remove it")
        self._path, self._spec, self._fps = path, spec, fps
        self._keeps, self._video = video == KEEP, USUAL_VIDEO if video == KEEP else video
        names = given_names({NAMES: _agreed(infos, NAMES) or "{}"})
        self._columns = {
            path: replace(feature, names=_fitting(names.get(path), feature))
            for path, feature in plan_writing(spec, "image" if video == "png" else "video").items()
        }
        self._flags = tuple(
            key for key in FLAGS if key != SUCCESS or not infos or any(info.success is not None for info in infos)
        )
        with self._writing():
            path.parent.mkdir(parents=True, exist_ok=True)
            self._root = Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.parent))
        self._mean_error: dict[str, float] = {}
        self._kept: dict[str, H264] = {}  # field of the Episode: how its frames are encoded
        self._num_again: dict[str, int] = {}  # by field: frames that had to be encoded again
        self._num_unknown = 0  # episodes
        self._num_frames = 0
        file_per_episode = version == "2.1"
        self._features = [*self._columns.values(), *(Feature(key=key, dtype="bool", shape=(1,)) for key in self._flags)]
        self._schema = _schema(self._features)
        rotation = FileRotation(
            root=self._root,
            template=DATA_PATHS[version],
            max_bytes=0 if file_per_episode else DATA_FILE_BYTES,
            extra={},
        )
        texts = [feature.key for feature in self._features if feature.dtype == "string"]
        self._table = TableFiles(rotation, self._schema, texts)
        self._videos = {
            feature.key: VideoFiles(
                FileRotation(
                    root=self._root,
                    template=VIDEO_PATHS[version],
                    extra={"video_key": feature.key},
                    max_bytes=0 if file_per_episode else VIDEO_FILE_BYTES,
                ),
                self._fps,
            )
            for feature in self._features
            if feature.dtype == "video"
        }
        self._meta = MetaWriter(
            self._root, version, self._fps, self._features, CODECS.get(self._video), _agreed(infos, ROBOT_TYPE)
        )
        self._sidecar = SidecarWriter(self._root, contents_of(spec, self._columns))

    def keep(self, codecs: Mapping[str, Codec]) -> Container[str]:
        """Write the H.264 frames of these fields as they are, with `video=keep`."""
        videos = {path: feature.key for path, feature in self._columns.items() if feature.dtype == "video"}
        for path, codec in codecs.items():
            if self._keeps and isinstance(codec, H264) and path in videos:
                self._kept[path] = codec
                self._meta.kept.add(videos[path])
        self._sidecar.keep(self._kept)
        return tuple(self._kept)

    @property
    def notes(self) -> tuple[str, ...]:
        """What was changed although it should have been kept, what was assumed, and what LeRobot has no column for."""
        assumed = (
            f"no episode says its rate, so {USUAL_FPS} frames per second are written; give the true one with ?fps="
        )
        errors = {path: self._mean_error.get(feature.key, 0.0) for path, feature in self._columns.items()}
        lossy = [path for path, error in errors.items() if error]
        fields = [path for path in self._spec.columns if path.split("/")[0] in ("observation", "action", "extras")]
        beside = [path for path in fields if path not in self._columns]
        notes = [assumed] * self._assumes_fps
        if lossy:
            notes.append(
                f"{', '.join(lossy)}: written as {self._video} video, which is lossy (mean error of an episode up to "
                f"{max(errors.values()):.1f} of 255); `lerobot:{self._path}?video=lossless` is exact"
            )
        notes += [
            f"{path}: {count:,} frames were encoded again: their GOPs were cut when an episode was trimmed or split"
            for path, count in self._num_again.items()
        ]
        if beside:
            notes.append(
                f"{', '.join(beside)}: only Understudy reads this, because LeRobot has no column for ragged fields, "
                f"empty fields and uint64"
            )
        if self._num_unknown and SUCCESS in self._flags:
            notes.append(f"{SUCCESS}: false in {self._num_unknown:,} episodes of which it is not known")
        return tuple(notes)

    def add(self, key: str, episode: Episode) -> None:
        self.add_encoded(key, episode, {})

    def add_encoded(self, key: str, episode: Episode, encoded: Mapping[str, EncodedColumn]) -> None:
        with self._writing():
            self._add(key, episode, encoded)

    def _add(self, key: str, episode: Episode, encoded: Mapping[str, EncodedColumn]) -> None:
        if len(episode) > MOST_STEPS:
            raise FormatError(f"{key}: expected up to {MOST_STEPS} steps, got {len(episode)}; split it")
        internal = episode.columns()
        index, length = self._meta.num_episodes, len(episode)
        values = {feature.key: internal[path][:length] for path, feature in self._columns.items()}
        values |= {key: column for key, column in _flags(episode).items() if key in self._flags}
        found: dict[str, dict[str, Any]] = {}
        for feature in self._features:
            if feature.is_camera:
                found[feature.key] = stats.of_camera(values[feature.key])
            elif feature.dtype != "string":
                found[feature.key] = stats.of_numbers(values[feature.key].reshape(length, *feature.shape))
        kept = {path: self._playable(path, encoded[path], internal[path]) for path in self._kept}
        packets = {self._columns[path].key: column.packets[:length] for path, column in kept.items()}
        videos = {}
        for name in self._videos:
            frames = values.pop(name)
            videos[name] = (
                self._add_packets(name, packets[name], index)
                if name in packets
                else self._add_video(name, frames, index)
            )
        task = self._meta.task(episode.info.instruction or episode.info.task or "")
        counters: dict[str, Array] = {
            "timestamp": (np.arange(length) / self._fps).astype(np.float32),
            "frame_index": np.arange(length),
            "episode_index": np.full(length, index),
            "index": self._num_frames + np.arange(length),
            "task_index": np.full(length, task),
        }
        found |= {name: stats.of_numbers(column.reshape(length, 1)) for name, column in counters.items()}
        columns = {f.key: _arrow(f, values[f.key]) for f in self._features if f.dtype != "video"}
        data_file = self._table.add(pa.table({**columns, **counters}).cast(self._schema))
        self._sidecar.add(index, episode, kept)
        self._meta.add(length, task, self._num_frames, data_file, videos, found)
        self._num_frames += length
        self._num_unknown += episode.info.success is None

    def close(self) -> None:
        with self._writing():
            self._table.close()
            for video in self._videos.values():
                video.close()
            self._meta.close(self._num_frames)
            self._sidecar.close({"video": KEEP if self._kept else self._video, "mean_error": self._mean_error})
            self._root.chmod(0o777 & ~_umask())
            publish_dataset(self._root, self._path)

    def abandon(self) -> None:
        self._table.close()
        for video in self._videos.values():
            video.close()
        self._meta.abandon()
        self._sidecar.abandon()
        shutil.rmtree(self._root, ignore_errors=True)

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise FormatError(
                f"{self._path}: cannot be written ({error.strerror or error}); free some space, or choose another path"
            ) from None

    def _playable(self, path: str, column: EncodedColumn, frames: Array) -> EncodedColumn:
        found, num_again = playable(column, self._kept[path], frames)
        if num_again:
            self._num_again[path] = self._num_again.get(path, 0) + num_again
        return found

    def _add_packets(self, key: str, packets: list[bytes], index: int) -> dict[str, int | float]:
        """Write frames as they are, and refuse them if the file has others."""
        try:
            video = mux(packets, self._fps)
            same = packets_of(video) == [split_units(packet) for packet in packets]
        except (av.error.FFmpegError, ValueError) as reason:
            raise FormatError(f"{key}: episode {index} cannot be written as it is ({reason}); use ?video=av1") from None
        if not same:
            raise FormatError(f"{key}: episode {index}: MP4 does not hold its frames as they are; use ?video=av1")
        return self._videos[key].add(video, len(packets))

    def _add_video(self, key: str, frames: Any, index: int) -> dict[str, int | float]:
        """Encode a video, decode it again, and refuse it if its error is too large."""
        codec = CODECS[self._video]
        if min(frames.shape[1:3]) < codec.least:
            raise FormatError(
                f"{key}: {self._video} needs {codec.least} x {codec.least} pixels, got {frames.shape[1]} x "
                f"{frames.shape[2]}; use ?video=png"
            )
        try:
            video = encode(frames, codec, self._fps)
            error = mean_error(video, frames)
        except (av.error.FFmpegError, ValueError) as reason:
            raise FormatError(
                f"{key}: {self._video} cannot hold {frames.shape[1]} x {frames.shape[2]} pixels ({reason}); "
                f"use ?video=png"
            ) from None
        if error > (0.0 if codec.exact else MOST_MEAN_ERROR):
            raise FormatError(
                f"{key}: {self._video} changes the pixels of episode {index} by {error:.1f} of 255 in the mean, more "
                f"than {MOST_MEAN_ERROR:g}; use ?video=lossless or ?video=png"
            )
        self._mean_error[key] = max(error, self._mean_error.get(key, 0.0))
        return self._videos[key].add(video, len(frames))


def _agreed(infos: Sequence[EpisodeInfo], label: str) -> str | None:
    """The value of a label, if all episodes that have it agree."""
    values = {info.labels[label] for info in infos if label in info.labels}
    return values.pop() if len(values) == 1 else None


def _frame_rate(infos: Sequence[EpisodeInfo]) -> str:
    """The rate that the episodes were recorded at, as their labels say."""
    rates = sorted({info.labels[FPS] for info in infos if FPS in info.labels})
    if len(rates) > 1:
        raise FormatError(
            f"lerobot: the episodes have different frame rates ({', '.join(rates[:5])}), and a dataset has one; choose "
            f"with --where \"json_extract(labels, '$.fps') = '{rates[0]}'\", or give one to all with ?fps="
        )
    measured = sorted({info.labels[MEASURED_FPS] for info in infos if MEASURED_FPS in info.labels})
    if measured and not rates:
        raise FormatError(
            f"lerobot: the rate of the episodes was only measured ({', '.join(measured[:5])} rows per second); give "
            f"the frame rate with ?fps={max(round(float(measured[0])), 1)}"
        )
    if rates and not rates[0].isdigit():
        raise FormatError(f"lerobot: the episodes have {rates[0]} frames per second; give a whole number with ?fps=")
    return rates[0] if rates else USUAL_FPS


def _fitting(names: Any, feature: Feature) -> Any:
    """The names of a feature's numbers, if there is one for each."""
    return names if not feature.is_camera and len(flat_names(names)) == math.prod(feature.shape) else None


def _flags(episode: Episode) -> dict[str, Any]:
    """The flags that LeRobot's users expect; the exact ones are in the sidecar."""
    final = np.arange(len(episode)) == len(episode) - 1
    return {
        "next.done": episode.terminated | episode.truncated,
        "next.truncated": episode.truncated & ~episode.terminated,
        SUCCESS: final & bool(episode.info.success),
        "intervention": episode.source == Source.HUMAN,
    }


def _schema(features: list[Feature]) -> Any:
    """The table's schema, with the metadata that LeRobot's reader needs for images and arrays."""
    counters = [Feature(key=key, dtype="float32" if key == "timestamp" else "int64", shape=(1,)) for key in COUNTERS]
    columns = [feature for feature in (*features, *counters) if feature.dtype != "video"]
    about = {"info": {"features": {feature.key: _hugging_face(feature) for feature in columns}}}
    return pa.schema([(f.key, _type(f)) for f in columns], metadata={"huggingface": json.dumps(about)})


def _hugging_face(feature: Feature) -> dict[str, Any]:
    """The column type of Hugging Face `datasets`; without it, LeRobot v2.1 reads images as dicts."""
    if feature.dtype == "image":
        return {"_type": "Image"}
    value = {"dtype": feature.dtype, "_type": "Value"}
    if feature.shape == (1,):
        return value
    if len(feature.shape) == 1:
        return {"feature": value, "length": feature.shape[0], "_type": "Sequence"}
    return {"shape": list(feature.shape), "dtype": feature.dtype, "_type": f"Array{len(feature.shape)}D"}


def _type(feature: Feature) -> Any:
    if feature.dtype == "image":
        return pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    if feature.dtype == "string":
        return pa.string()
    kind = pa.from_numpy_dtype(np.dtype(feature.dtype))
    if feature.shape == (1,):
        return kind
    if len(feature.shape) == 1:
        return pa.list_(kind, feature.shape[0])
    for _ in feature.shape:
        kind = pa.list_(kind)
    return kind


def _arrow(feature: Feature, column: Any) -> Any:
    if feature.dtype == "image":
        return pa.array([{"bytes": encode_image(pixels), "path": None} for pixels in column], _type(feature))
    if feature.dtype == "string":
        return pa.array(column, pa.string())
    array = pa.array(np.ascontiguousarray(column).reshape(-1))
    if feature.shape == (1,):
        return array
    if len(feature.shape) == 1:
        return pa.FixedSizeListArray.from_arrays(array, feature.shape[0])
    for size in reversed(feature.shape):
        offsets = pa.array(np.arange(0, len(array) + 1, size, dtype=np.int32))
        array = pa.ListArray.from_arrays(offsets, array)
    return array


def _umask() -> int:
    """The umask of this process; `mkdtemp` ignores it and creates private directories."""
    mask = os.umask(0)
    os.umask(mask)
    return mask
