"""The format `minari` (read only) and its options."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn, cast

from understudy.core import KINDS, EpisodeInfo, Kind, Source, StepSpec
from understudy.formats.format import FormatError
from understudy.formats.minari.reader import MinariReader, ReadOptions
from understudy.formats.options import one_of
from understudy.formats.registry import check_options


class MinariFormat:
    """Minari datasets."""

    name = "minari"
    cannot = (
        "It can be read, not written.",
        "Rewards are rounded to float32.",
        "The info of a reset is left out; that of each step becomes extras of the step.",
        "Datasets in Minari's Arrow format are refused; Minari can convert them to HDF5.",
    )

    def read(self, path: Path, options: Mapping[str, str]) -> MinariReader:
        check_options(options, ("bounds", "infos", "kind", "source"), self.name)
        read = ReadOptions(
            bounds=one_of(self.name, "bounds", options.get("bounds", "action"), ("action", "none")),
            infos=one_of(self.name, "infos", options.get("infos", "all"), ("all", "none")),
            kind=cast(Kind, one_of(self.name, "kind", options.get("kind", "demonstration"), KINDS)),
            source=Source[one_of(self.name, "source", options.get("source", "policy"), _SOURCES).upper()],
        )
        return MinariReader(path, read)

    def write(
        self, path: Path, spec: StepSpec, options: Mapping[str, str], infos: Sequence[EpisodeInfo] = ()
    ) -> NoReturn:
        raise FormatError("minari: can be read, not written; write robomimic, rlds or lerobot instead")


_SOURCES = tuple(source.name.lower() for source in Source)

FORMAT = MinariFormat()
