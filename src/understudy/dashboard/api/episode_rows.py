"""Rows: some fields of some rows of an episode, checked, without reading the others; and pictures as JPEG.

A picture is read when somebody looks at it, and only then. What was made of one is kept, up to a number of bytes.
"""

from __future__ import annotations

import io
import struct
import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import numpy as np
from PIL import Image

from understudy.core import DamageError, StoreError
from understudy.dashboard.api.episode_queries import cameras_of
from understudy.dashboard.api.targets import Place
from understudy.replay import Reader
from understudy.replay.format.layout import checksum_of
from understudy.replay.format.segment import digests

Array = np.ndarray[Any, Any]

SHOWN = ("action", "proposal", "extras", "reward", "source", "policy_version", "has_proposal")
MAX_STEPS = 5000  # whose curves are shown
MAX_CURVES = 16  # of one field
MAX_FRAMES = 64  # in one answer
THUMB_PIXELS = 160  # the longer side
THUMB_QUALITY, FRAME_QUALITY = 78, 88
KEPT_BYTES = 48 * 2**20


def read_rows(reader: Reader, episode: int, paths: Sequence[str], first: int, count: int) -> dict[str, Array]:
    """Rows `first` to `first + count - 1`, as far as they are there; a DamageError if they are not what was written."""
    for attempt in (1, 2):
        spans = reader.catalog.spans(
            "episode = ? and first_index < ? and first_index + num_rows > ?",
            (episode, first + count, first),
            order="first_index",
        )
        pieces: dict[str, list[Array]] = {path: [] for path in paths}
        try:
            for span in spans:
                begin = max(first, int(span["first_index"]))
                stop = min(first + count, int(span["first_index"] + span["num_rows"]))
                row = int(span["first_row"]) + begin - int(span["first_index"])
                read = _read(reader, int(span["segment"]), episode, begin, row, stop - begin, paths)
                for path, piece in read.items():
                    pieces[path].append(piece)
            return {path: np.concatenate(found) if found else np.zeros(0) for path, found in pieces.items()}
        except DamageError:  # compaction may have moved them meanwhile; then the catalog says so
            if attempt == 2:
                raise
    raise AssertionError("unreachable")


def _read(
    reader: Reader, segment_id: int, episode: int, index: int, row: int, count: int, paths: Sequence[str]
) -> dict[str, Array]:
    segment = reader.segment(segment_id)
    small, good = segment.read_small(row, count)
    good &= (small["row/episode"] == episode) & (small["row/index"] == np.arange(count) + index)
    found = {}
    for path in paths:
        if path in segment.layout.large:
            found[path] = segment.read_column(path, row, count)
            good &= digests(found[path].reshape(count, -1)) == small[checksum_of(path)]
        else:
            found[path] = small[path]
    if not good.all():
        raise DamageError(
            f"{segment.path}: row {row + int(np.argmin(good))} (episode {episode}) is not what was written; "
            f"run `understudy verify`, then `understudy repair`"
        )
    return found


# ---- curves


def steps_of(place: Place, episode: int) -> dict[str, Any]:
    """The numbers of an episode, step by step: actions, proposals, rewards, extras, and who was in control."""
    with place.pictures().reader() as reader:
        record = reader.record(episode)
        columns = reader.spec(record.spec).columns
        names = [path for path, leaf in columns.items() if not leaf.ragged and path.split("/")[0] in SHOWN]
        cameras = {path: list(columns[path].fixed_shape[:2]) for path in cameras_of(reader.catalog, record.spec)}
        num_steps = min(record.num_steps, MAX_STEPS)
        found = read_rows(reader, episode, names, 0, num_steps)
    curves: dict[str, Any] = {}
    for path in names:
        if path.split("/")[0] in ("action", "extras", "reward"):
            flat = found[path].reshape(num_steps, -1)
            curves[path] = {"size": flat.shape[1], "values": [_numbers(line) for line in flat.T[:MAX_CURVES]]}
    has = found["has_proposal"]
    for path in list(curves):
        wanted = path.replace("action", "proposal", 1)
        if path.startswith("action") and has.any():
            flat = np.where(has[:, None], found[wanted].reshape(num_steps, -1).astype(np.float64), np.nan)
            curves[path]["proposal"] = [_numbers(line) for line in flat.T[:MAX_CURVES]]
    return {
        "num_steps": num_steps,
        "all_steps": record.num_steps,
        "num_rows": min(record.num_rows, MAX_STEPS + 1),
        "cameras": cameras,
        "curves": curves,
        "source": found["source"].tolist(),
        "policy_version": found["policy_version"].tolist(),
    }


def _numbers(line: Array) -> list[float | None]:
    """Rounded to what a curve can show; None where there is no number."""
    line = line.astype(np.float64)
    most = np.nanmax(np.abs(line), initial=0.0, where=np.isfinite(line))
    digits = 4 if most == 0 else int(np.clip(4 - np.floor(np.log10(most)), 0, 12))
    return [value if np.isfinite(value) else None for value in np.round(line, digits).tolist()]


# ---- pictures


class Pictures:
    """Pictures of the episodes of all places as JPEG."""

    def __init__(self, kept_bytes: int = KEPT_BYTES):
        self._lock = threading.Lock()
        self._kept: OrderedDict[Any, bytes] = OrderedDict()
        self._bytes, self._most = 0, kept_bytes

    def thumb(self, place: Place, episode: int, at: float, version: str) -> bytes:
        """A small picture of the first camera, at a share of the episode from 0 to 1."""
        key = (place.path, episode, round(at, 2), version)
        with self._lock:
            if key in self._kept:
                self._kept.move_to_end(key)
                return self._kept[key]
        with place.pictures().reader() as reader:
            record = reader.record(episode)
            cameras = cameras_of(reader.catalog, record.spec)
            if not cameras or not record.num_rows:
                raise StoreError(f"episode {episode} has no picture")
            row = min(int(at * record.num_rows), record.num_rows - 1)
            picture = read_rows(reader, episode, cameras[:1], row, 1)[cameras[0]]
        made = jpeg(picture[0], THUMB_QUALITY, THUMB_PIXELS)
        with self._lock:
            if key not in self._kept:
                self._kept[key] = made
                self._bytes += len(made)
            while self._bytes > self._most:
                self._bytes -= len(self._kept.popitem(last=False)[1])
        return made

    def frames(self, place: Place, episode: int, camera: str, first: int, count: int) -> bytes:
        """Pictures of a camera, one after the other, each behind its length (uint32, little endian)."""
        with place.pictures().reader() as reader:
            record = reader.record(episode)
            if camera not in cameras_of(reader.catalog, record.spec):
                raise StoreError(f"episode {episode} has no camera {camera!r}")
            count = max(0, min(count, MAX_FRAMES, record.num_rows - first))
            found = read_rows(reader, episode, [camera], max(first, 0), count)[camera]
        made = [jpeg(picture, FRAME_QUALITY) for picture in found]
        return b"".join(struct.pack("<I", len(picture)) + picture for picture in made)


def jpeg(picture: Array, quality: int, longest: int | None = None) -> bytes:
    """A picture [H, W, 1, 3 or 4] as JPEG, made smaller if it is longer than `longest`."""
    image = Image.fromarray(picture[..., 0] if picture.shape[-1] == 1 else picture[..., :3])
    if longest is not None:
        image.thumbnail((longest, longest), Image.Resampling.BILINEAR)
    out = io.BytesIO()
    image.save(out, "JPEG", quality=quality)
    return out.getvalue()
