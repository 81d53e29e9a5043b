"""File rotation: which file the next episode is written to. v3 fills files up to a size; v2.1 has one per episode."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.parquet as pq  # type: ignore[import-untyped]

from understudy.formats.lerobot.info import CHUNK_FILES, expand
from understudy.formats.lerobot.video import VideoWriter

DATA_FILE_BYTES = 100 * 2**20
VIDEO_FILE_BYTES = 200 * 2**20


@dataclass(frozen=True, kw_only=True)
class FileRotation:
    """A sequence of numbered files with a size limit."""

    root: Path
    template: str
    max_bytes: int  # 0 for a file per episode
    extra: Mapping[str, str]  # further values of the template

    def path(self, number: int) -> Path:
        values: dict[str, int | str] = {**self.extra, **self.file_indices(number)}
        values |= {"episode_chunk": number // CHUNK_FILES, "episode_index": number}
        return self.root / expand(self.template, values, self.root)

    def file_indices(self, number: int) -> dict[str, int]:
        return {"chunk_index": number // CHUNK_FILES, "file_index": number % CHUNK_FILES}


class TableFiles:
    """Parquet files of one schema; each call adds a row group."""

    def __init__(self, rotation: FileRotation, schema: Any, dictionary: Sequence[str] = ()) -> None:
        self._files, self._schema, self._dictionary = rotation, schema, list(dictionary)
        self._number = -1
        self._writer: Any = None
        self._file: Any = None

    def add(self, table: Any) -> dict[str, int]:
        """Write a table; returns the indices of its file."""
        if self._writer is None or self._file.tell() >= self._files.max_bytes:
            self.close()
            self._number += 1
            path = self._files.path(self._number)
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = pa.OSFile(str(path), "wb")
            self._writer = pq.ParquetWriter(
                self._file,
                self._schema,
                compression="zstd",
                use_dictionary=self._dictionary or False,
                write_page_checksum=True,
            )
        self._writer.write_table(table)
        return self._files.file_indices(self._number)

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._file.close()
            self._writer = None


class VideoFiles:
    """Video files of one camera; each call adds an episode."""

    def __init__(self, rotation: FileRotation, fps: int) -> None:
        self._files, self._fps = rotation, fps
        self._number = -1
        self._writer: VideoWriter | None = None

    def add(self, video: bytes, num_frames: int) -> dict[str, int | float]:
        """Write a video; returns the indices of its file, and its start and end time there."""
        if self._writer is None or self._writer.size_bytes + len(video) > self._files.max_bytes:
            self.close()
            self._number += 1
            self._writer = VideoWriter(self._files.path(self._number), self._fps)
        start = self._writer.num_frames
        self._writer.add(video, num_frames)
        return {
            **self._files.file_indices(self._number),
            "from_timestamp": start / self._fps,
            "to_timestamp": (start + num_frames) / self._fps,
        }

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None
