"""The format `hil_serl` and its options."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import cast

from understudy.core import KINDS, EpisodeInfo, Kind, Source, StepSpec
from understudy.formats.hil_serl.files import find_files
from understudy.formats.hil_serl.reader import HilSerlReader, ReadOptions
from understudy.formats.hil_serl.writer import HilSerlWriter
from understudy.formats.options import number, one_of
from understudy.formats.registry import check_options


class HilSerlFormat:
    """HIL-SERL's pickles of transitions."""

    name = "hil_serl"
    cannot = (
        "HIL-SERL ignores attributes, policy versions, proposals and extras except grasp_penalty, which are in "
        "infos/understudy; its files store every frame twice.",
    )

    def read(self, path: Path, options: Mapping[str, str]) -> HilSerlReader:
        check_options(options, ("kind", "source", "floats", "stack", "max_steps"), self.name)
        kind, source = options.get("kind"), options.get("source")
        read = ReadOptions(
            kind=None if kind is None else cast(Kind, one_of(self.name, "kind", kind, KINDS)),
            source=None if source is None else Source[one_of(self.name, "source", source, _SOURCES).upper()],
            floats=one_of(self.name, "floats", options.get("floats", "float32"), ("float32", "keep")),
            stack=one_of(self.name, "stack", options.get("stack", "keep"), ("keep", "last")),
            max_steps=number(self.name, "max_steps", options["max_steps"]) if "max_steps" in options else None,
        )
        return HilSerlReader(find_files(path), read)

    def write(
        self, path: Path, spec: StepSpec, options: Mapping[str, str], infos: Sequence[EpisodeInfo] = ()
    ) -> HilSerlWriter:
        check_options(options, ("stack", "steps_per_file"), self.name)
        return HilSerlWriter(
            path,
            spec,
            steps_per_file=number(self.name, "steps_per_file", options.get("steps_per_file", "1000")),
            stack=one_of(self.name, "stack", options.get("stack", "keep"), ("keep", "add")),
        )


_SOURCES = tuple(source.name.lower() for source in Source)

FORMAT = HilSerlFormat()
