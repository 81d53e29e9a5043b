"""The format `mcap` (write only) and its options."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from understudy.core import EpisodeInfo, StepSpec
from understudy.formats.format import FormatError
from understudy.formats.mcap.writer import McapWriter, WriteOptions
from understudy.formats.options import number, one_of
from understudy.formats.registry import check_options


class McapFormat:
    """MCAP, for Foxglove and rosbag tools."""

    name = "mcap"
    cannot = (
        "It can be written for viewing, not read back.",
        "With images=jpeg, images are lossy (quality 90); images=png stores them exactly.",
        "Numbers are JSON: NaN and infinity become null.",
    )

    def read(self, path: Path, options: Mapping[str, str]) -> NoReturn:
        raise FormatError(
            "mcap: can be written for viewing, not read; write rlds, lerobot or robomimic, which can be read back. "
            "A robot's bag has topics and rates of its own: convert it to one of these formats first"
        )

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


FORMAT = McapFormat()
