"""Registry of formats: finds the format and path of a name such as "rlds:~/data/kitchen/1.0.0?split=train".

    FORMAT:PATH[?option=value&...]

Without FORMAT:, the files at the path show the format.

A reader of your own is a function, module:function:PATH (function_format.py).

Each format is a package here that defines `FORMAT`. It is imported on demand, because some formats need optional
libraries.
"""

from __future__ import annotations

import importlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import parse_qsl

from understudy.core.suggestion import did_you_mean
from understudy.formats.format import Format, FormatError
from understudy.formats.function_format import FunctionFormat
from understudy.processes.python_path import find_module

FORMATS: Mapping[str, str] = {  # with one line of help each
    "rlds": "RLDS, as TensorFlow Datasets keeps it (tfrecord or array_record).",
    "lerobot": "LeRobot datasets, v2.1 and v3.",
    "hil_serl": "HIL-SERL pickles of transitions, read without running them.",
    "robomimic": "robomimic and LIBERO demonstrations in HDF5.",
    "minari": "Minari datasets.",
    "mcap": "MCAP, for Foxglove and rosbag tools.",
    "rosbag2": "ROS 2 bags (.db3 or .mcap with metadata.yaml), read without ROS.",
}


SIGNS: Mapping[str, tuple[str, ...]] = {  # files by which a directory shows its format, or endings of a single file
    "lerobot": ("meta/info.json",),
    "minari": ("data/main_data.hdf5",),
    "rlds": ("features.json", "*/features.json"),
    "hil_serl": ("*.pkl", "buffer/*.pkl", "demo_buffer/*.pkl"),
    "rosbag2": ("metadata.yaml", "*.db3", "*.bag", "*/metadata.yaml"),
    "mcap": ("*.mcap",),
    "robomimic": ("*.hdf5", "*.h5"),
}


@dataclass(frozen=True, kw_only=True)
class DatasetPath:
    """The format, path and options of a name."""

    format: Format
    path: Path
    options: Mapping[str, str] = field(default_factory=dict)


def find_format(name: str) -> Format:
    """The format of a name; a FormatError says which package it needs, or which name is meant."""
    if name not in FORMATS:
        advice = did_you_mean(name, FORMATS, f"there are {', '.join(FORMATS)}, or module:function of your own file")
        raise FormatError(f"format {name!r}: is unknown; {advice}")
    try:
        found: Format = importlib.import_module(f"understudy.formats.{name}").FORMAT
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("understudy"):
            raise
        raise FormatError(f"{name}: needs {error.name}; run `pip install 'understudy-robotics[{name}]'`") from error
    return found


def parse_dataset_path(name: str) -> DatasetPath:
    """Parse FORMAT:PATH?option=value, or PATH?option=value if the files there show their format."""
    which, colon, rest = name.partition(":")
    if not colon or "?" in which:  # an option may hold a colon
        which, rest = _guessed(name), name
    if not rest:
        raise FormatError(f"{name!r}: expected FORMAT:PATH, such as {name}DIR")
    own = None
    if which not in FORMATS and ":" in rest and find_module(which):  # module:function:PATH
        function, _, rest = rest.partition(":")
        own = FunctionFormat(f"{which}:{function}")
    path, _, query = rest.partition("?")
    pairs = parse_qsl(query, keep_blank_values=True)
    if len(dict(pairs)) < len(pairs):
        raise FormatError(f"{name!r}: an option is given twice; give each once")
    return DatasetPath(format=own or find_format(which), path=Path(path).expanduser(), options=dict(pairs))


def guess_format(path: Path) -> str | None:
    """The format that the files at a path have by their names; None if they show none."""
    for name, signs in SIGNS.items():
        if any(path.match(sign) if path.is_file() else any(path.glob(sign)) for sign in signs):
            return name
    return None


def _guessed(name: str) -> str:
    path = Path(name.partition("?")[0]).expanduser()
    guess = guess_format(path)
    if guess is None:
        there = "" if path.exists() else "; there is no such file or directory"
        raise FormatError(
            f"{name!r}: expected FORMAT:PATH, such as rlds:{name or 'DIR'}{there}; formats: {', '.join(FORMATS)}"
        )
    return guess


def check_options(options: Mapping[str, str], allowed: Collection[str], name: str) -> None:
    """Refuse unknown options."""
    for option in options:
        if option not in allowed:
            advice = did_you_mean(option, allowed, f"it has {', '.join(sorted(allowed)) or 'none'}")
            raise FormatError(f"{name}: has no option {option!r}; {advice}")
