"""The format `mcap` and its options: reads files of others by their topics, and what Understudy wrote exactly."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from understudy.core import EpisodeInfo, StepSpec
from understudy.formats.bags import BagReader
from understudy.formats.bags.mcap_file import McapFile
from understudy.formats.bags.options import parse_options
from understudy.formats.format import DatasetReader, FormatError
from understudy.formats.mcap.exact_reader import ExactReader, is_exact
from understudy.formats.mcap.writer import McapWriter, WriteOptions
from understudy.formats.natural_sort import natural
from understudy.formats.options import number, one_of
from understudy.formats.registry import check_options


class McapFormat:
    """MCAP, for Foxglove and rosbag tools."""

    name = "mcap"
    cannot = ()

    def read(self, path: Path, options: Mapping[str, str]) -> DatasetReader:
        read = parse_options(self.name, options)
        files = _files(path)
        if not options and is_exact(files[0]):
            return ExactReader(files)
        return BagReader(path, files, McapFile, read)

    def write(
        self, path: Path, spec: StepSpec, options: Mapping[str, str], infos: Sequence[EpisodeInfo] = ()
    ) -> McapWriter:
        check_options(options, ("hz", "time", "images", "compression"), self.name)
        write = WriteOptions(
            hz=number(self.name, "hz", options["hz"]) if "hz" in options else None,
            time=options.get("time"),
            images=one_of(self.name, "images", options.get("images", "jpeg"), ("jpeg", "png")),
            compression=one_of(self.name, "compression", options.get("compression", "zstd"), ("zstd", "lz4", "none")),
        )
        return McapWriter(path, spec, write)


def _files(path: Path) -> list[Path]:
    """The file at a path, or the files in a directory, each of which is a recording."""
    if path.is_file():
        return [path]
    if (path / "metadata.yaml").is_file():
        raise FormatError(f"{path}: is a ROS 2 bag, whose files belong together; read it as rosbag2:{path}")
    files = sorted(path.glob("*.mcap"), key=lambda file: natural(file.name))
    if not files:
        raise FormatError(f"{path}: expected an MCAP file, or a directory with such files; there is none")
    return files


FORMAT = McapFormat()
