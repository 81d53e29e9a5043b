"""The format `robomimic` and its options."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import cast

from understudy.core import KINDS, EpisodeInfo, Kind, Source, StepSpec
from understudy.formats.options import one_of
from understudy.formats.registry import check_options
from understudy.formats.robomimic.reader import ReadOptions, RobomimicReader
from understudy.formats.robomimic.writer import RobomimicWriter


class RobomimicFormat:
    """robomimic and LIBERO demonstrations in HDF5."""

    name = "robomimic"
    cannot = (
        "robomimic sees an action as one concatenated array and `dones` as terminated, and ignores text, attributes, "
        "sources, policy versions, proposals and extras, which are in groups called understudy.",
    )

    def read(self, path: Path, options: Mapping[str, str]) -> RobomimicReader:
        check_options(options, ("mask", "align", "last", "end", "extras", "kind", "source"), self.name)
        read = ReadOptions(
            mask=options.get("mask"),
            align=one_of(self.name, "align", options["align"], ("before", "after")) if "align" in options else None,
            last=one_of(self.name, "last", options["last"], ("repeat", "drop")) if "last" in options else None,
            end=one_of(self.name, "end", options.get("end", "last"), ("last", "first")),
            extras=one_of(self.name, "extras", options.get("extras", "all"), ("all", "none")),
            kind=cast(Kind, one_of(self.name, "kind", options.get("kind", "demonstration"), KINDS)),
            source=Source[one_of(self.name, "source", options.get("source", "human"), _SOURCES).upper()],
        )
        return RobomimicReader(path, read)

    def write(
        self, path: Path, spec: StepSpec, options: Mapping[str, str], infos: Sequence[EpisodeInfo] = ()
    ) -> RobomimicWriter:
        check_options(options, ("compression",), self.name)
        compression = one_of(self.name, "compression", options.get("compression", "none"), ("none", "gzip"))
        return RobomimicWriter(path, spec, compression=None if compression == "none" else compression)


_SOURCES = tuple(source.name.lower() for source in Source)

FORMAT = RobomimicFormat()
