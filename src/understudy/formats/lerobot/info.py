"""Info: the checked content of `meta/info.json` of a LeRobot dataset.

The file is not trusted. Its path templates are filled in by hand, because `str.format` would follow attributes and pad
to any width; the resulting paths must be below the dataset.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from understudy.core.episode import flat_names
from understudy.formats.format import FormatError

DATA_PATHS = {
    "3": "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet",
    "2.1": "data/chunk-{episode_chunk:03d}/episode_{episode_index:06d}.parquet",
}
VIDEO_PATHS = {
    "3": "videos/{video_key}/chunk-{chunk_index:03d}/file-{file_index:03d}.mp4",
    "2.1": "videos/chunk-{episode_chunk:03d}/{video_key}/episode_{episode_index:06d}.mp4",
}
CHUNK_FILES = 1000  # files per directory, unless info.json says otherwise

COUNTERS = ("timestamp", "frame_index", "episode_index", "index", "task_index")  # columns of every dataset
NUMBERS = (
    "bool",
    "uint8",
    "int8",
    "uint16",
    "int16",
    "uint32",
    "int32",
    "uint64",
    "int64",
    "float16",
    "float32",
    "float64",
)
CAMERAS = ("image", "video")

MOST_TEXT_BYTES = 256 * 2**20  # of a file of JSON
MOST_ELEMENTS = 2**26  # of one value
MOST_STEPS = 1_000_000  # of one episode
MOST_NAME = 1000  # characters of a robot's type, or of a number's name


@dataclass(frozen=True, kw_only=True)
class Feature:
    """A column, or a camera that is stored as video."""

    key: str  # "observation.images.top"
    dtype: str  # a number's, "string", "image" or "video"
    shape: tuple[int, ...]  # of a camera [height, width, channels], however info.json orders it
    names: Any = None  # of its numbers: a list, a dict of lists, or None

    @property
    def is_camera(self) -> bool:
        return self.dtype in CAMERAS


@dataclass(frozen=True, kw_only=True)
class Info:
    root: Path
    version: str  # "3" or "2.1"
    fps: float
    num_episodes: int
    chunk_files: int
    features: Mapping[str, Feature]  # without the counters
    data_path: str
    video_path: str
    robot_type: str | None = None


def read_info(root: Path) -> Info:
    if not root.is_dir():
        what = "is a file" if root.exists() else "is not there"
        raise FormatError(f"{root}: {what}; name the folder of a LeRobot dataset, which holds meta/info.json")
    path = root / "meta" / "info.json"
    if not path.is_file():
        raise FormatError(f"{root}: has no meta/info.json; name the folder of a LeRobot dataset")
    fields = read_json(path)
    if not isinstance(fields, dict):
        raise FormatError(f"{path}: expected a dict, got {type(fields).__name__}; fetch the dataset again")
    version = _version(path, fields.get("codebase_version"))
    fps = fields.get("fps")
    if not isinstance(fps, int | float) or isinstance(fps, bool) or not 1e-3 <= fps <= 1e6:
        raise FormatError(f"{path}: fps: expected a positive number, got {shown(fps)}; correct it")
    features = fields.get("features")
    if not isinstance(features, dict):
        raise FormatError(f"{path}: features: expected a dict, got {shown(features)}; fetch the dataset again")
    robot_type = fields.get("robot_type")
    parsed = {key: _feature(path, key, value) for key, value in features.items() if key not in COUNTERS}
    return Info(
        root=root,
        version=version,
        fps=float(fps),
        num_episodes=_count(path, fields, "total_episodes"),
        chunk_files=max(1, _count(path, {"chunks_size": CHUNK_FILES, **fields}, "chunks_size")),
        features=parsed,
        data_path=_template(path, fields, "data_path", DATA_PATHS[version]),
        video_path=_template(path, fields, "video_path", VIDEO_PATHS[version]),
        robot_type=robot_type if isinstance(robot_type, str) and len(robot_type) <= MOST_NAME else None,
    )


def read_json(path: Path) -> Any:
    """Read a JSON file that may be damaged."""
    return parse_json(read_text(path), path)


def read_text(path: Path) -> str:
    try:
        if path.stat().st_size > MOST_TEXT_BYTES:
            raise FormatError(f"{path}: expected at most {MOST_TEXT_BYTES} bytes of JSON; fetch the dataset again")
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise FormatError(f"{path}: cannot be read ({error}); fetch the dataset again") from None


def parse_json(text: str, where: object) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{where}: is not JSON ({error}); fetch the dataset again") from None


def shown(value: object) -> str:
    """A value of an untrusted file, short enough for an error message."""
    text = " ".join(ascii(value).split())
    return text if len(text) <= 60 else text[:57] + "..."


def expand(template: str, values: Mapping[str, int | str], where: object) -> PurePosixPath:
    """Fill in a path template; the result must be below the dataset."""

    def fill(match: re.Match[str]) -> str:
        name, digits = match["name"], match["digits"]
        if name not in values:
            raise FormatError(f"{where}: {template!r} uses {name!r}; it may use {', '.join(sorted(values))}")
        return str(values[name]) if digits is None else str(values[name]).zfill(int(digits))

    filled = _PLACEHOLDER.sub(fill, template)
    path = PurePosixPath(filled)
    if path.is_absolute() or not path.parts or ".." in path.parts or re.search(r"[\0{}\\]|^[A-Za-z]:", filled):
        raise FormatError(f"{where}: {shown(filled)} is not a path below the dataset; correct its template")
    return path


_PLACEHOLDER = re.compile(r"\{(?P<name>[a-z_]+)(?::0(?P<digits>[1-9])d)?\}")


def _version(path: Path, given: object) -> str:
    match = re.fullmatch(r"v?(\d+)\.(\d+)(?:\.\d+)?", given) if isinstance(given, str) else None
    if match and match[1] == "3":
        return "3"
    if match and match[1] == "2":  # 2.0 stores statistics elsewhere, which are not read here
        return "2.1"
    raise FormatError(f"{path}: codebase_version: expected v2.1 or v3.0, got {shown(given)}; convert it with lerobot")


def _count(path: Path, fields: Mapping[str, Any], name: str) -> int:
    value = fields.get(name)
    if type(value) is not int or not 0 <= value < 2**31:
        raise FormatError(f"{path}: {name}: expected a count, got {shown(value)}; fetch the dataset again")
    return value


def _template(path: Path, fields: Mapping[str, Any], name: str, usual: str) -> str:
    value = fields.get(name)
    if value is None:
        return usual
    if not isinstance(value, str) or len(value) > 1000:
        raise FormatError(f"{path}: {name}: expected a path, got {shown(value)}; fetch the dataset again")
    return value


def _feature(path: Path, key: str, fields: Any) -> Feature:
    where = f"{path}: features: {shown(key)}"
    if "/" in key or not key:
        raise FormatError(f"{where}: expected a name without '/'; rename it")
    if not isinstance(fields, dict):
        raise FormatError(f"{where}: expected a dict with dtype and shape, got {shown(fields)}; correct it")
    dtype, shape = fields.get("dtype"), fields.get("shape")
    if dtype not in (*NUMBERS, *CAMERAS, "string"):
        raise FormatError(f"{where}: dtype {shown(dtype)} is unknown; use a numeric dtype, string, image or video")
    if not isinstance(shape, list) or not all(type(size) is int and 0 < size < 2**31 for size in shape):
        raise FormatError(f"{where}: shape: expected a list of sizes, got {shown(shape)}; correct it")
    if math.prod(shape) > MOST_ELEMENTS or len(shape) > 5:
        raise FormatError(f"{where}: shape {shown(shape)} is implausibly large; correct it")
    sizes = tuple(shape)
    if dtype in CAMERAS:
        if len(sizes) != 3:
            raise FormatError(f"{where}: shape: expected height, width and channels, got {shape}; correct it")
        few = (1, 3, 4)
        if sizes[2] not in few and sizes[0] in few:
            sizes = (sizes[1], sizes[2], sizes[0])
        if sizes[2] not in ((3,) if dtype == "video" else few):
            raise FormatError(
                f"{where}: shape {shape} does not have 3 channels; depth videos are not read, leave it out"
            )
    return Feature(key=key, dtype=dtype, shape=sizes, names=None if dtype in CAMERAS else _names(fields, sizes))


def _names(fields: Mapping[str, Any], shape: tuple[int, ...]) -> Any:
    """The names of a feature's numbers as info.json has them, if there is one for each; else None."""
    given = fields.get("names")
    flat = flat_names(given)
    if len(flat) != math.prod(shape) or len(flat) > MOST_NAME or any(len(name) > MOST_NAME for name in flat):
        return None
    return given
