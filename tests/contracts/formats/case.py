"""What the contract of formats needs to know of each; `case_<name>.py` beside this file says it for one format.

CASES = [Case(format="robomimic", file="demos.hdf5", carried=without_proposals)]
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from understudy.core import Episode, StepSpec
from understudy.formats import FORMATS, DatasetReader, DatasetWriter, FormatError, find_format


def all_of_it(spec: StepSpec, episode: Episode) -> tuple[StepSpec, Episode] | None:
    return spec, episode


@dataclass(frozen=True, kw_only=True)
class Case:
    """One way to write a format."""

    format: str
    options: Mapping[str, str] = field(default_factory=dict)  # of `write`
    read_options: Mapping[str, str] = field(default_factory=dict)
    file: str = "data"  # what the data set is called: a directory, or a file with its ending
    carried: Callable[[StepSpec, Episode], tuple[StepSpec, Episode] | None] = all_of_it
    """The spec and the episode that come back of what is written; None if the format says that it cannot."""
    same: Callable[[Episode, Episode], bool] = Episode.equals  # (wanted, got); for lossy fields, within the bound

    def write(self, folder: Path, spec: StepSpec) -> DatasetWriter:
        return find_format(self.format).write(folder / self.file, spec, self.options)

    def read(self, folder: Path) -> DatasetReader:
        return find_format(self.format).read(folder / self.file, self.read_options)

    def __str__(self) -> str:
        return "-".join([self.format, *(f"{name}={value}" for name, value in self.options.items())])


def all_cases() -> list[Case]:
    """Those of every format whose file is there and whose libraries are installed."""
    found: list[Case] = []
    for name in FORMATS:
        if importlib.util.find_spec(f"tests.contracts.formats.case_{name}") is not None:
            try:
                find_format(name)
            except (ImportError, FormatError):
                continue
            found += importlib.import_module(f"tests.contracts.formats.case_{name}").CASES
    return found
