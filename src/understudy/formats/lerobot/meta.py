"""MetaWriter: writes LeRobot's `meta` directory (info.json, tasks, statistics, episodes) for v3 and v2.1."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.parquet as pq  # type: ignore[import-untyped]

from understudy.formats.lerobot import stats
from understudy.formats.lerobot.file_rotation import DATA_FILE_BYTES, VIDEO_FILE_BYTES
from understudy.formats.lerobot.info import CHUNK_FILES, COUNTERS, DATA_PATHS, VIDEO_PATHS, Feature
from understudy.formats.lerobot.video import CODECS, Codec

FLUSH_EPISODES = 100


class MetaWriter:
    """Keeps the tasks in memory; episodes and their statistics are written continuously."""

    def __init__(
        self,
        root: Path,
        version: str,
        fps: int,
        features: Sequence[Feature],
        codec: Codec | None,
        robot_type: str | None = None,
    ) -> None:
        self._meta = root / "meta"
        self._meta.mkdir()
        self._version, self._fps, self._features, self._codec = version, fps, features, codec
        self._robot_type = robot_type
        self.kept: set[str] = set()  # features with frames as a store had them: H.264
        self._merged = stats.MergedStats()
        self._tasks: dict[str, int] = {}
        self._rows: list[dict[str, Any]] = []
        self._table: Any = None
        self._lines: list[IO[str]] = []
        if version == "2.1":
            names = ("episodes.jsonl", "episodes_stats.jsonl")
            self._lines = [(self._meta / name).open("w", encoding="utf-8") for name in names]
        self.num_episodes = 0

    def task(self, text: str) -> int:
        """The index of a task; a new task gets the next one."""
        return self._tasks.setdefault(text, len(self._tasks))

    def add(
        self,
        length: int,
        task: int,
        first_frame: int,
        data_file: Mapping[str, int],
        videos: Mapping[str, Mapping[str, int | float]],
        found: Mapping[str, stats.Stats],
    ) -> None:
        """Add an episode: the files of its rows and videos, and its statistics."""
        number, lists = self.num_episodes, stats.as_lists(found)
        row: dict[str, Any] = {"episode_index": number, "tasks": [list(self._tasks)[task]], "length": length}
        if self._lines:
            _line(self._lines[0], row)
            _line(self._lines[1], {"episode_index": number, "stats": lists})
        else:
            row |= {f"data/{name}": value for name, value in data_file.items()}
            row |= {"dataset_from_index": first_frame, "dataset_to_index": first_frame + length}
            row |= {f"videos/{key}/{name}": value for key, video in videos.items() for name, value in video.items()}
            row |= {f"stats/{key}/{name}": value for key, of in lists.items() for name, value in of.items()}
            row |= {"meta/episodes/chunk_index": 0, "meta/episodes/file_index": 0}
            self._rows.append(row)
            if len(self._rows) >= FLUSH_EPISODES:
                self._flush()
        self._merged.add(found)
        self.num_episodes += 1

    def close(self, num_frames: int) -> None:
        self._flush()
        self.abandon()
        if self._lines:
            with (self._meta / "tasks.jsonl").open("w", encoding="utf-8") as file:
                for text, number in self._tasks.items():
                    _line(file, {"task_index": number, "task": text})
        else:
            _write_tasks(self._meta / "tasks.parquet", self._tasks)
            _write_json(self._meta / "stats.json", stats.as_lists(self._merged.result()))
        _write_json(self._meta / "info.json", self._info(num_frames))

    def abandon(self) -> None:
        for file in self._lines:
            file.close()
        if self._table is not None:
            self._table.close()
            self._table = None

    def _flush(self) -> None:
        if not self._rows:
            return
        table = pa.Table.from_pylist(self._rows)
        if self._table is None:
            path = self._meta / "episodes" / "chunk-000" / "file-000.parquet"
            path.parent.mkdir(parents=True)
            self._table = pq.ParquetWriter(path, table.schema, compression="zstd", write_page_checksum=True)
        self._table.write_table(table.cast(self._table.schema))
        self._rows = []

    def _info(self, num_frames: int) -> dict[str, Any]:
        videos = [feature for feature in self._features if feature.dtype == "video"]
        fields: dict[str, Any] = {
            "codebase_version": f"v{self._version}" if self._version == "2.1" else "v3.0",
            "robot_type": self._robot_type,
            "total_episodes": self.num_episodes,
            "total_frames": num_frames,
            "total_tasks": len(self._tasks),
            "chunks_size": CHUNK_FILES,
            "fps": self._fps,
            "splits": {"train": f"0:{self.num_episodes}"},
            "data_path": DATA_PATHS[self._version],
            "video_path": VIDEO_PATHS[self._version] if videos else None,
            "features": {feature.key: self._feature(feature) for feature in self._features}
            | {name: _counter(name) for name in COUNTERS},
        }
        if self._version == "2.1":
            num_chunks = -(-self.num_episodes // CHUNK_FILES)
            fields |= {"total_videos": self.num_episodes * len(videos), "total_chunks": num_chunks}
        else:
            fields |= {
                "data_files_size_in_mb": DATA_FILE_BYTES // 2**20,
                "video_files_size_in_mb": VIDEO_FILE_BYTES // 2**20,
            }
        return fields

    def _feature(self, feature: Feature) -> dict[str, Any]:
        names = ["height", "width", "channels"] if feature.is_camera else feature.names
        fields: dict[str, Any] = {"dtype": feature.dtype, "shape": list(feature.shape), "names": names}
        codec = CODECS["h264"] if feature.key in self.kept else self._codec
        if feature.dtype == "video" and codec is not None:
            height, width, channels = feature.shape
            fields["info"] = {
                "video.height": height,
                "video.width": width,
                "video.channels": channels,
                "video.fps": self._fps,
                "video.codec": _FAMILY[codec.encoder],
                "video.pix_fmt": codec.pixels,
                "video.is_depth_map": False,
                "has_audio": False,
            }
        return fields


_FAMILY = {"libsvtav1": "av1", "libx264": "h264", "libx264rgb": "h264"}


def _counter(name: str) -> dict[str, Any]:
    return {"dtype": "float32" if name == "timestamp" else "int64", "shape": [1], "names": None}


def _line(file: IO[str], value: Any) -> None:
    file.write(json.dumps(value, ensure_ascii=False) + "\n")


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=4, ensure_ascii=False) + "\n", encoding="utf-8")


def _write_tasks(path: Path, tasks: Mapping[str, int]) -> None:
    """Write the table of tasks; LeRobot expects the text as pandas index."""
    number = {"name": "task_index", "field_name": "task_index", "pandas_type": "int64", "numpy_type": "int64"}
    text = {"name": "task", "field_name": "task", "pandas_type": "unicode", "numpy_type": "object"}
    for column in (number, text):
        column["metadata"] = None  # type: ignore[assignment]
    about = {"index_columns": ["task"], "column_indexes": [], "columns": [number, text], "pandas_version": "2.0.0"}
    table = pa.table({"task_index": pa.array(tasks.values(), pa.int64()), "task": pa.array(tasks, pa.string())})
    table = table.replace_schema_metadata({"pandas": json.dumps(about)})
    pq.write_table(table, path, write_page_checksum=True)
