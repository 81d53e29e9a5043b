"""LeRobotReader: reads a LeRobot dataset, one episode at a time.

LeRobot stores T frames: T observations and T actions, but not the observation after the last action. Datasets that
Understudy wrote have it in the sidecar. For foreign datasets, the option `last` says what the last frame is:

    step           a step like the others: all T actions are kept, and the last observation is repeated
    observation    the last observation: its action and reward are left out

By default it is a step if the task terminated there, because no value is computed after termination, and an observation
otherwise, because a value would be computed from an observation that was never made. The label `last_observation` of
each episode says which one was used.
"""

from __future__ import annotations

import json
from collections.abc import Container, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from understudy.codecs import EncodedColumn, FrameError, join_frames, measured
from understudy.core import H264, NO_VERSION, Episode, EpisodeInfo, Source, StepSpec
from understudy.core import tree as trees
from understudy.core.episode import FPS, NAMES, ROBOT_TYPE
from understudy.formats.format import Field, FormatError
from understudy.formats.lerobot.image import decode_image
from understudy.formats.lerobot.index import Entry, read_index, read_tasks
from understudy.formats.lerobot.info import Feature, Info, read_info
from understudy.formats.lerobot.packets import PacketReader, PacketsDifferError, keepable
from understudy.formats.lerobot.plan import Plan, mapping_of, plan_reading
from understudy.formats.lerobot.sidecar import KeptFrames, SidecarReader, is_observation, read_contents
from understudy.formats.lerobot.tables import Array, Rows, dense, images, refusing, texts, whole_numbers
from understudy.formats.lerobot.video import VideoReader
from understudy.formats.options import one_of
from understudy.formats.registry import check_options

OPTIONS = {
    "last": ("auto", "step", "observation"),
    "source": ("human", "script", "policy", "random"),
    "rest": ("use", "ignore"),
}


class LeRobotReader:
    """Reads one dataset; `last`, `source` and `rest` are the options of docs/lerobot.md."""

    def __init__(self, root: Path, options: Mapping[str, str]) -> None:
        check_options(options, OPTIONS, "lerobot")
        self._last, self._default_source, rest = (
            one_of("lerobot", name, options.get(name, allowed[0]), allowed) for name, allowed in OPTIONS.items()
        )
        self._info = read_info(root)
        self._entries = read_index(self._info)
        self._tasks = read_tasks(self._info)
        self._contents = None if rest == "ignore" else read_contents(self._info)
        if self._contents is not None:
            columns = self._contents.columns
            lines = mapping_of(columns, self._contents.paths)
            self._plan = Plan(spec=self._contents.spec, columns=columns, special={}, mapping=lines)
        else:
            several = any(entry.num_tasks > 1 for entry in self._entries)
            self._plan = plan_reading(self._info, several_tasks=several)
        self._open: dict[str, Rows | VideoReader | PacketReader] = {}  # the last file of each kind
        self._kept: dict[str, EncodedColumn] = {}  # of the last episode, if Understudy wrote it
        self._encoded: dict[str, H264] | None = None  # when somebody has asked
        self._notes: list[str] = []
        self._sidecar: SidecarReader | None = None
        self._last_entry: Entry | None = None
        self._last_times_s: Array = np.zeros(0)
        self._last_is_step = False  # of the last episode: its last frame is a step, and the last observation repeats it
        self._dataset_labels = _dataset_labels(self._info, self._plan.columns)

    @property
    def spec(self) -> StepSpec:
        return self._plan.spec

    @property
    def mapping(self) -> tuple[Field, ...]:
        return self._plan.mapping

    @property
    def num_episodes(self) -> int | None:
        return len(self._entries)

    @property
    def encoded(self) -> Mapping[str, H264]:
        """The cameras whose videos have frames that a store can keep as they are."""
        if self._encoded is None:
            self._encoded = dict(self._contents.codecs) if self._contents is not None else self._keepable()
        return self._encoded

    def _keepable(self) -> dict[str, H264]:
        found = {}
        for path, feature in self._plan.columns.items():
            if feature.dtype == "video" and is_observation(path):
                names = dict.fromkeys(entry.videos[feature.key][0] for entry in self._entries)
                try:
                    found[path] = keepable([self._info.root / name for name in names], feature.shape, self._info.fps)
                except PacketsDifferError as why:
                    self._notes.append(f"{path}: {why}, so its frames cannot be kept as they are")
        return found

    @property
    def notes(self) -> tuple[str, ...]:
        """Why videos are not in `encoded`, once somebody has asked for it."""
        return tuple(self._notes)

    def encoded_frames(self, key: str) -> Mapping[str, EncodedColumn]:
        """The T+1 frames of each field of `encoded`, of the episode that was yielded last."""
        assert self._last_entry is not None
        assert key == _key(self._last_entry)
        if self._contents is not None:
            return self._kept
        return {path: self._foreign_frames(path, codec, self._last_entry) for path, codec in self.encoded.items()}

    def episodes(self, skip: Container[str] = ()) -> Iterator[tuple[str, Episode]]:
        for entry in self._entries:
            key = _key(entry)
            if key not in skip:
                episode = self._episode(entry)
                self._last_entry = entry
                yield key, episode

    def close(self) -> None:
        for file in self._open.values():
            file.close()
        self._open = {}
        if self._sidecar is not None:
            self._sidecar.close()
            self._sidecar = None

    # --- one episode ---------------------------------------------------------------------------------------------

    def _episode(self, entry: Entry) -> Episode:
        table, times_s = self._table(entry)
        self._last_times_s = times_s
        where = f"{self._info.root / entry.data}: episode {entry.number}"
        columns: dict[str, Any] = {}
        kept = {} if self._contents is None else self._contents.codecs
        for path, feature in self._plan.columns.items():
            if path not in kept:
                columns[path] = self._column(path, feature, entry, table, times_s, where)
        if self._contents is not None:
            return self._understudy_episode(entry, columns, times_s)
        return self._foreign_episode(entry, columns, table, where)

    def _table(self, entry: Entry) -> tuple[Any, Array]:
        """The rows of an episode, checked to be its own, and their times in seconds."""
        path = self._info.root / entry.data
        rows = self._file("table", path, lambda: Rows(path, self._widths()))
        assert isinstance(rows, Rows)
        table = rows.take(entry.row, entry.length)
        with refusing(path):
            numbers = whole_numbers(table["episode_index"], f"{path}: episode_index")
            frames = whole_numbers(table["frame_index"], f"{path}: frame_index")
            times_s = dense(table["timestamp"], (), "float64", f"{path}: timestamp")
        if (numbers != entry.number).any() or (frames != np.arange(entry.length)).any():
            raise FormatError(f"{path}: rows of episode {entry.number} are not in the listed rows; fetch it again")
        if not np.isfinite(times_s).all():
            raise FormatError(f"{path}: timestamp: expected times, got {times_s.min()}; fetch the dataset again")
        return table, times_s

    def _widths(self) -> dict[str, int]:
        """Number of elements per value of each column that is read."""
        widths = dict.fromkeys(("episode_index", "frame_index", "timestamp", "task_index"), 1)
        for feature in (*self._plan.columns.values(), *self._plan.special.values()):
            if feature.dtype != "video":
                single = feature.dtype in ("string", "image")
                widths[feature.key] = 1 if single else int(np.prod(feature.shape))
        return widths

    def _column(self, path: str, feature: Feature, entry: Entry, table: Any, times_s: Array, where: str) -> Any:
        """T values; an observation has one more row for the last one."""
        if feature.dtype == "string":
            with refusing(self._info.root / entry.data):
                return texts(table[feature.key], f"{where}: {feature.key}")
        num_rows = entry.length + is_observation(path)
        if feature.dtype == "video":
            video_path, start_s = self._info.root / entry.videos[feature.key][0], entry.videos[feature.key][1]
            out = np.empty((num_rows, *feature.shape), np.uint8)
            video = self._file(feature.key, video_path, lambda: VideoReader(video_path, feature.shape, self._info.fps))
            assert isinstance(video, VideoReader)
            video.take(start_s + times_s, out[: entry.length])
            return out
        with refusing(self._info.root / entry.data):
            if feature.dtype == "image":
                out = np.empty((num_rows, *feature.shape), np.uint8)
                for index, data in enumerate(images(table[feature.key], f"{where}: {feature.key}")):
                    out[index] = decode_image(data, feature.shape, f"{where}: {feature.key}")
                return out
            found = dense(table[feature.key], feature.shape, feature.dtype, f"{where}: {feature.key}")
        if num_rows > entry.length:
            found = np.concatenate([found, found[-1:]])
        return found

    def _file(self, kind: str, path: Path, make: Any) -> Rows | VideoReader | PacketReader:
        """The file of this kind; opens it if the last one was another."""
        name = f"{kind}:{path}"
        if name not in self._open:
            for other in [other for other in self._open if other.partition(":")[0] == kind]:
                self._open.pop(other).close()
            self._open[name] = make()
        return self._open[name]

    def _gops(self, path: str, entry: Entry, times_s: Array) -> list[list[bytes]]:
        """The encoded frames of a camera."""
        feature = self._plan.columns[path]
        video_path, start_s = self._info.root / entry.videos[feature.key][0], entry.videos[feature.key][1]
        kind = f"{feature.key} packets"
        reader = self._file(kind, video_path, lambda: PacketReader(video_path, feature.shape, self._info.fps))
        assert isinstance(reader, PacketReader)
        return reader.take(start_s + times_s)

    def _kept_frames(self, path: str, frames: KeptFrames, entry: Entry, times_s: Array) -> EncodedColumn:
        """The frames of a camera as the store had them; the last observation is in the sidecar."""
        where = f"{self._info.root}: episode {entry.number}: {path}"
        try:
            gops = self._gops(path, entry, times_s)
        except PacketsDifferError:
            gops = []
        numbers = [number for gop in gops for number in range(len(gop))]
        last = frames.frame_numbers[-1]
        if numbers != frames.frame_numbers[:-1] or last not in (0, numbers[-1] + 1):
            raise FormatError(f"{where}: its video was changed after Understudy wrote it; read it with ?rest=ignore")
        packets = [packet for gop in gops for packet in gop]
        return EncodedColumn([*packets, frames.last], frames.frame_numbers, frames.checksums)

    def _foreign_frames(self, path: str, codec: H264, entry: Entry) -> EncodedColumn:
        """The frames of a camera with their checksums; the last one twice if the last observation repeats it."""
        gops = self._gops(path, entry, self._last_times_s)
        if self._last_is_step:
            gops.append([join_frames(codec, gops[-1])])
        leaf = self.spec.columns[path]
        try:
            return measured(codec, leaf.fixed_shape, leaf.numpy_dtype, gops)
        except FrameError as error:
            name = self._info.root / entry.videos[self._plan.columns[path].key][0]
            raise FormatError(f"{name}: episode {entry.number}: {error}; use --codec raw") from None

    def _understudy_episode(self, entry: Entry, columns: dict[str, Any], times_s: Array) -> Episode:
        assert self._contents is not None
        if self._sidecar is None:
            self._sidecar = SidecarReader(self._info.root, self._contents, len(self._entries))
        rest, info = self._sidecar.take(entry.number, entry.length)
        self._kept = {path: self._kept_frames(path, rest.pop(path), entry, times_s) for path in self._contents.codecs}
        for path, encoded in self._kept.items():
            leaf = self.spec.columns[path]
            try:
                rest[path] = encoded.pixels(self._contents.codecs[path], leaf.fixed_shape, leaf.numpy_dtype)
            except FrameError as error:
                raise FormatError(
                    f"{self._info.root}: episode {entry.number}: {path}: {error}; fetch the dataset again, or read it "
                    f"with ?rest=ignore"
                ) from None
        for path, leaf in self.spec.columns.items():
            if path in columns:
                column = columns[path]
                if leaf.dtype == "str":
                    column = [*column, *rest.get(path, ())]
                else:
                    column = column.reshape(len(column), *leaf.fixed_shape)
                    if is_observation(path):
                        column[-1] = rest[path][0]
                    if self._plan.columns[path].dtype == "video" and leaf.bounded:
                        column = np.clip(column, *leaf.limits).astype(np.uint8)  # lossy video may exceed the bounds
                rest[path] = column
        parts: dict[str, Any] = {name: trees.unflatten(trees.below(rest, name)) for name in _TREES}
        episode = Episode(
            **parts,
            **{name: rest[name] for name in _FLAGS},
            info=info,
        )
        _check(self.spec, episode, f"{self._info.root}: episode {entry.number}")
        return episode

    def _foreign_episode(self, entry: Entry, columns: dict[str, Any], table: Any, where: str) -> Episode:
        flags = {}
        with refusing(self._info.root / entry.data):
            for what, feature in self._plan.special.items():
                if what != "reward":
                    flags[what] = dense(table[feature.key], (), feature.dtype, f"{where}: {feature.key}") != 0
            task = int(whole_numbers(table["task_index"], f"{where}: task_index")[0])
        success = bool(flags["success"][-1]) if "success" in flags else None
        terminated = _terminated(flags, success)
        last = self._last if self._last != "auto" else "step" if terminated else "observation"
        if entry.length == 1:
            last = "step"
        self._last_is_step = last == "step"
        num = entry.length - (last == "observation")
        terminated = terminated and last == "step"
        final = np.arange(num) == num - 1
        steps = {path: column[: num + is_observation(path)] for path, column in columns.items()}
        if last == "step":
            for path in steps:
                if is_observation(path):
                    steps[path] = _repeated(columns[path], entry.length)
        source, kind = self._sources(flags.get("intervention"), num)
        instruction = self._tasks.get(task)
        labels = {**self._dataset_labels, "last_observation": _LAST[last]}
        episode = Episode(
            **{name: trees.unflatten(trees.below(steps, name)) for name in ("observation", "action", "extras")},
            reward=self._reward(table, entry, where)[:num],
            terminated=final & terminated,
            truncated=final & (not terminated),
            source=source,
            policy_version=np.full(num, NO_VERSION, np.int64),
            proposal=trees.map_leaves(lambda leaf: _zeros(leaf, num), self.spec.action.tree),
            has_proposal=np.zeros(num, bool),
            info=EpisodeInfo(task=instruction, instruction=instruction, success=success, kind=kind, labels=labels),
        )
        _check(self.spec, episode, where)
        return episode

    def _reward(self, table: Any, entry: Entry, where: str) -> Array:
        feature, leaf = self._plan.special.get("reward"), self.spec.reward
        if feature is None:
            return np.zeros((entry.length, *leaf.fixed_shape), leaf.dtype)
        with refusing(self._info.root / entry.data):
            found = dense(table[feature.key], feature.shape, feature.dtype, f"{where}: {feature.key}")
        return found.astype(leaf.dtype).reshape(entry.length, *leaf.fixed_shape)

    def _sources(self, intervention: Array | None, num: int) -> tuple[Array, Any]:
        """The source of each step, and the kind of the episode."""
        if intervention is None:
            kind = "demonstration" if self._default_source in ("human", "script") else "practice"
            return np.full(num, Source[self._default_source.upper()], np.uint8), kind
        human = intervention[:num]
        return np.where(human, Source.HUMAN, Source.POLICY).astype(
            np.uint8
        ), "correction" if human.any() else "practice"


def _key(entry: Entry) -> str:
    return f"episode_{entry.number:06d}"


def _dataset_labels(info: Info, columns: Mapping[str, Feature]) -> dict[str, str]:
    """What the whole dataset says, for the labels of each of its episodes; the export writes it back."""
    names = {path: feature.names for path, feature in columns.items() if feature.names is not None}
    labels = {FPS: f"{info.fps:g}"}
    if info.robot_type is not None:
        labels[ROBOT_TYPE] = info.robot_type
    if names:
        labels[NAMES] = json.dumps(names, ensure_ascii=False)
    return labels


_TREES = ("observation", "action", "proposal", "extras")
_FLAGS = ("reward", "terminated", "truncated", "source", "policy_version", "has_proposal")
_LAST = {"step": "repeats the last frame", "observation": "is the last frame"}


def _terminated(flags: Mapping[str, Array], success: bool | None) -> bool:
    """Whether the task terminated with the last frame, according to the dataset."""
    if "terminated" in flags:
        return bool(flags["terminated"][-1])
    if "episode_end" in flags:
        return bool(flags["episode_end"][-1]) and not ("truncated" in flags and bool(flags["truncated"][-1]))
    return bool(success)


def _repeated(column: Any, length: int) -> Any:
    if isinstance(column, list):
        return [*column, column[-1]]
    column[length] = column[length - 1]
    return column


def _zeros(leaf: Any, num: int) -> Any:
    return [""] * num if leaf.dtype == "str" else np.zeros((num, *leaf.fixed_shape), leaf.dtype)


def _check(spec: StepSpec, episode: Episode, where: str) -> None:
    """Refuse an episode that could not have been recorded step by step."""

    def refuse(what: str) -> None:
        raise FormatError(f"{where}: {what}; fetch the dataset again")

    if (episode.terminated | episode.truncated)[:-1].any():
        refuse("it continues after its end")
    if (episode.source > max(Source)).any():
        refuse(f"source: expected up to {max(Source)}, got {episode.source.max()}")
    if not np.isfinite(episode.reward).all():
        refuse("reward: expected finite numbers")
    columns = episode.columns()
    for path, leaf in spec.columns.items():
        if path.partition("/")[0] == "proposal":
            blank = np.flatnonzero(~episode.has_proposal).tolist()
            if not all(trees.equal_leaf(columns[path][index], leaf.zero()) for index in blank):
                refuse(f"{path}: expected zeros where there is no proposal")
            values = [columns[path][index] for index in np.flatnonzero(episode.has_proposal).tolist()]
        else:
            values = columns[path] if isinstance(columns.get(path), list) else [columns.get(path)]
        if leaf.bounded and not all(_within(leaf, value) for value in values):
            refuse(f"{path}: a value is outside of its bounds")


def _within(leaf: Any, value: Any) -> bool:
    low, high = leaf.limits
    return bool(((value >= low) & (value <= high)).all())
