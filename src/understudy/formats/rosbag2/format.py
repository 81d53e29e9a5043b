"""The format `rosbag2` (read only); its options are those of docs/rosbag2.md."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from understudy.core import EpisodeInfo, StepSpec
from understudy.formats.bags import BagReader
from understudy.formats.bags.options import parse_options
from understudy.formats.bags.rosbag2_file import METADATA, open_bag
from understudy.formats.format import FormatError
from understudy.formats.natural_sort import natural


class Rosbag2Format:
    """ROS 2 bags."""

    name = "rosbag2"
    cannot = (
        "It can be read, not written; write mcap instead.",
        "A row has the latest message of each topic at or before its tick: messages in between are left out, and "
        "counted.",
        "Messages that are neither images nor numbers (point clouds, transforms by name, text) are left out.",
        "A bag has no rewards and no end of the task: rewards are 0, and an episode ends as truncated.",
    )

    def read(self, path: Path, options: Mapping[str, str]) -> BagReader:
        read = parse_options(self.name, options)
        return BagReader(path, find_bags(path), open_bag, read)

    def write(
        self, path: Path, spec: StepSpec, options: Mapping[str, str], infos: Sequence[EpisodeInfo] = ()
    ) -> NoReturn:
        raise FormatError("rosbag2: can be read, not written; write mcap, which rosbag tools read, or lerobot or rlds")


def find_bags(path: Path) -> list[Path]:
    """The bags at a path: a bag's directory, a single file, or a directory with several bags."""
    if path.name == METADATA:
        path = path.parent
    if path.suffix == ".bag":
        raise FormatError(
            f"{path}: is a bag of ROS 1; make a ROS 2 bag of it with `rosbags-convert --src {path} --dst DIR`"
        )
    if path.is_file() or (path / METADATA).is_file():
        return [path]
    if not path.exists():
        raise FormatError(f"{path}: is not there; give the directory of a ROS 2 bag")
    bags = sorted((below.parent for below in path.glob(f"*/{METADATA}")), key=lambda bag: natural(bag.name))
    if not bags:
        advice = "give the .db3 file itself, or run `ros2 bag reindex`" if any(path.glob("*.db3")) else "is it a bag?"
        raise FormatError(f"{path}: has no {METADATA}, which a ROS 2 bag has; {advice}")
    return bags


FORMAT = Rosbag2Format()
