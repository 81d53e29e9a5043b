"""Format: how others keep episodes on disk, read as a stream of ours and written from one.

A format says what it cannot carry; what it can, it carries exactly. Reading holds one episode at a time, so a data set
may be larger than memory.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

from understudy.core import Episode, StepSpec, UnderstudyError

ORIGIN = "origin"  # the label of an imported episode that says where it came from


class FormatError(UnderstudyError, ValueError):
    """A file that is not what its format says, or an option that the format does not know."""


@dataclass(frozen=True, kw_only=True)
class Field:
    """A line of the mapping: which of their fields becomes which of ours, and how."""

    theirs: str  # "steps/observation/image"; "" if there is none
    ours: str  # "observation/image"; "" if it is left out
    how: str = ""  # "as it is", "JPEG, decoded", "1.0 where it is missing": for people


class DatasetReader(Protocol):
    """A data set that is open for reading. What can be known without reading its rows is known at once."""

    @property
    def spec(self) -> StepSpec: ...

    @property
    def mapping(self) -> tuple[Field, ...]: ...

    @property
    def num_episodes(self) -> int | None:
        """How many there are; None if only reading them all would tell."""
        ...

    def episodes(self, skip: Container[str] = ()) -> Iterator[tuple[str, Episode]]:
        """Each episode after its key, in the order of the files, except those whose keys are in `skip`.

        A key names the episode within this data set: equal for equal data wherever the directory is moved to.
        Damage raises FormatError, and what was given out before is whole.
        """
        ...

    def close(self) -> None: ...


@runtime_checkable
class NamedDataset(Protocol):
    """A source whose data set has a name of its own, wherever its files lie; others are known by their file's name."""

    @property
    def name(self) -> str: ...


class DatasetWriter(Protocol):
    """A data set that is being written. It is there, whole, once `close` has returned, and not before."""

    def add(self, key: str, episode: Episode) -> None: ...

    def close(self) -> None: ...

    def abandon(self) -> None:
        """Leave nothing behind."""
        ...


class Format(Protocol):
    """Both ways of one format. A way that does not exist raises FormatError and says what to use instead."""

    @property
    def name(self) -> str: ...

    @property
    def cannot(self) -> tuple[str, ...]:
        """What a file of this format cannot carry, a sentence each; also the bound of what it carries with loss."""
        ...

    def read(self, path: Path, options: Mapping[str, str]) -> DatasetReader: ...

    def write(self, path: Path, spec: StepSpec, options: Mapping[str, str]) -> DatasetWriter:
        """A new data set at `path`, which must not exist."""
        ...
