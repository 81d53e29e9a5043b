"""Episode rows: reads and checks some fields of some rows of an episode, and encodes camera images as JPEG.

An image is read only when a page asks for it. Thumbnails are cached, up to a number of bytes.
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

from understudy.core import DamageError, StoreError, ages
from understudy.core import tree as trees
from understudy.core.times import MONOTONIC, TIME
from understudy.dashboard.api.episode_queries import cameras_of
from understudy.dashboard.api.targets import Target
from understudy.replay import Reader
from understudy.replay.format.layout import checksum_of
from understudy.replay.format.segment import digests
from understudy.replay.read.encoded_rows import read_encoded_rows

Array = np.ndarray[Any, Any]

CURVE_FIELDS = ("action", "proposal", "extras", "reward", "source", "policy_version", "has_proposal")
CLOCK_FIELDS = (f"extras/{TIME}/", f"extras/{MONOTONIC}/")  # shown as ages
MAX_STEPS = 5000  # of an episode, in curves
MAX_CURVES = 16  # of one field
MAX_FRAMES = 64  # in one response
THUMBNAIL_PIXELS = 160  # the longer side
THUMBNAIL_QUALITY, FRAME_QUALITY = 78, 88
CACHE_BYTES = 48 * 2**20


def read_rows(reader: Reader, episode: int, paths: Sequence[str], first: int, count: int) -> dict[str, Array]:
    """The existing rows from `first` to `first + count - 1`; a DamageError if one is not what was written."""
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
        except DamageError:  # compaction may have moved them; the catalog then has their new position
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
        elif path not in segment.layout.spec.encoded:
            found[path] = small[path]
    if not good.all():
        raise DamageError(
            f"{segment.path}: row {row + int(np.argmin(good))} (episode {episode}) is not what was written; "
            f"run `understudy verify`, then `understudy repair`"
        )
    for path in segment.layout.spec.encoded.keys() & set(paths):
        found[path] = read_encoded_rows(segment, path, row, count)
    return found


# ---- curves


def steps_of(target: Target, episode: int) -> dict[str, Any]:
    """The numbers of each step: action, the policy's proposal, reward, extras, and the source of the action."""
    with target.images().reader() as reader:
        record = reader.record(episode)
        columns = reader.spec(record.spec).columns
        names = [path for path, leaf in columns.items() if not leaf.ragged and path.split("/")[0] in CURVE_FIELDS]
        cameras = {path: list(columns[path].fixed_shape[:2]) for path in cameras_of(reader.catalog, record.spec)}
        num_steps = min(record.num_steps, MAX_STEPS)
        found = read_rows(reader, episode, names, 0, num_steps)
    curves: dict[str, Any] = {}
    for path in names:
        if path.split("/")[0] in ("action", "extras", "reward") and not path.startswith(CLOCK_FIELDS):
            flat = found[path].reshape(num_steps, -1)
            curves[path] = {"size": flat.shape[1], "values": [_numbers(line) for line in flat.T[:MAX_CURVES]]}
    for path, age_ns in _ages(found).items():
        name = f"extras/age of {path.removeprefix('observation/')} in ms"
        curves[name] = {"size": 1, "values": [_numbers(age_ns / 1e6)]}
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
        "names": {path: list(names) for path, names in record.info.names.items()},
        "curves": curves,
        "source": found["source"].tolist(),
        "policy_version": found["policy_version"].tolist(),
    }


def _ages(found: dict[str, Array]) -> dict[str, Array]:
    """How old each field with a time was in each step, by the clock that does not jump if there is one."""
    extras = trees.unflatten(trees.below(found, "extras"))
    return ages(extras, MONOTONIC) or ages(extras, TIME)


def _numbers(line: Array) -> list[float | None]:
    """Rounded for a curve; None for NaN and infinity."""
    line = line.astype(np.float64)
    most = np.nanmax(np.abs(line), initial=0.0, where=np.isfinite(line))
    digits = 4 if most == 0 else int(np.clip(4 - np.floor(np.log10(most)), 0, 12))
    return [value if np.isfinite(value) else None for value in np.round(line, digits).tolist()]


# ---- images


class EpisodeImages:
    """Camera images of the episodes of all targets, as JPEG."""

    def __init__(self, cache_bytes: int = CACHE_BYTES):
        self._lock = threading.Lock()
        self._cache: OrderedDict[Any, bytes] = OrderedDict()
        self._bytes, self._max_bytes = 0, cache_bytes

    def thumbnail(self, target: Target, episode: int, at: float, version: str) -> bytes:
        """A small image of the first camera; `at` is the position in the episode, from 0 to 1."""
        key = (target.path, episode, round(at, 2), version)
        with self._lock:
            if key in self._cache:
                self._cache.move_to_end(key)
                return self._cache[key]
        with target.images().reader() as reader:
            record = reader.record(episode)
            cameras = cameras_of(reader.catalog, record.spec)
            if not cameras or not record.num_rows:
                raise StoreError(f"episode {episode} has no image")
            row = min(int(at * record.num_rows), record.num_rows - 1)
            image = read_rows(reader, episode, cameras[:1], row, 1)[cameras[0]]
        made = jpeg(image[0], THUMBNAIL_QUALITY, THUMBNAIL_PIXELS)
        with self._lock:
            if key not in self._cache:
                self._cache[key] = made
                self._bytes += len(made)
            while self._bytes > self._max_bytes:
                self._bytes -= len(self._cache.popitem(last=False)[1])
        return made

    def frames(self, target: Target, episode: int, camera: str, first: int, count: int) -> bytes:
        """Images of a camera, each after its length in bytes (uint32, little endian)."""
        with target.images().reader() as reader:
            record = reader.record(episode)
            if camera not in cameras_of(reader.catalog, record.spec):
                raise StoreError(f"episode {episode} has no camera {camera!r}")
            count = max(0, min(count, MAX_FRAMES, record.num_rows - first))
            found = read_rows(reader, episode, [camera], max(first, 0), count)[camera]
        made = [jpeg(image, FRAME_QUALITY) for image in found]
        return b"".join(struct.pack("<I", len(image)) + image for image in made)


def jpeg(image: Array, quality: int, longest: int | None = None) -> bytes:
    """An image [H, W, C] with C = 1, 3 or 4 as JPEG, scaled down if its longer side is above `longest` pixels."""
    encoded = Image.fromarray(image[..., 0] if image.shape[-1] == 1 else image[..., :3])
    if longest is not None:
        encoded.thumbnail((longest, longest), Image.Resampling.BILINEAR)
    out = io.BytesIO()
    encoded.save(out, "JPEG", quality=quality)
    return out.getvalue()
