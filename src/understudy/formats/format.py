"""Format: reads another project's dataset as a stream of Episodes, and writes Episodes in that format.

A format lists what it cannot store, and a writer what it stored with loss; everything else is stored exactly. Reading
holds one episode in memory at a time, so a dataset may be larger than memory.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

from understudy.codecs import EncodedColumn
from understudy.core import Codec, Episode, EpisodeInfo, StepSpec, UnderstudyError

ORIGIN = "origin"  # label of an imported episode: the dataset and the episode that it came from


class FormatError(UnderstudyError, ValueError):
    """A file does not follow its format, or an option is unknown to the format."""


@dataclass(frozen=True, kw_only=True)
class Field:
    """One line of the mapping: which field of the dataset becomes which field of an Episode, and how."""

    external: str  # field of the dataset: "steps/observation/image"; "" if there is none
    internal: str  # field of the Episode: "observation/image"; "" if it is left out
    how: str = ""  # shown to the user: "as it is", "JPEG, decoded"


class DatasetReader(Protocol):
    """A dataset that is open for reading. Its spec and mapping are known without reading its rows."""

    @property
    def spec(self) -> StepSpec: ...

    @property
    def mapping(self) -> tuple[Field, ...]: ...

    @property
    def num_episodes(self) -> int | None:
        """Number of episodes; None if only reading all of them would tell."""
        ...

    def episodes(self, skip: Container[str] = ()) -> Iterator[tuple[str, Episode]]:
        """Yield the key and the episode in file order, except for the keys in `skip`.

        A key identifies the episode within this dataset, also after the directory was moved. Damage raises FormatError;
        the episodes that were yielded before are complete.
        """
        ...

    def close(self) -> None: ...


@runtime_checkable
class NamedDataset(Protocol):
    """A reader of a dataset that has a name in its files; other datasets are named after their file."""

    @property
    def name(self) -> str: ...


@runtime_checkable
class NotedDataset(Protocol):
    """A reader or writer that says what it left out or changed, for the user."""

    @property
    def notes(self) -> tuple[str, ...]:
        """One sentence each, of the episodes that were read or written until now."""
        ...


@runtime_checkable
class EncodedDataset(Protocol):
    """A reader of a dataset with camera frames that a store can keep as they are encoded."""

    @property
    def encoded(self) -> Mapping[str, Codec]:
        """The fields with such frames. `notes` then says of other videos why they are not among them."""
        ...

    def encoded_frames(self, key: str) -> Mapping[str, EncodedColumn]:
        """The frames of these fields in an episode, in the order in which `episodes` yields them."""
        ...


class DatasetWriter(Protocol):
    """A dataset that is being written. It appears at its path, complete, when `close` returns, and not before."""

    def add(self, key: str, episode: Episode) -> None: ...

    def close(self) -> None: ...

    def abandon(self) -> None:
        """Remove everything that was written."""
        ...


@runtime_checkable
class EncodedDatasetWriter(Protocol):
    """A writer that can take camera frames as a store has them encoded."""

    def keep(self, codecs: Mapping[str, Codec]) -> Container[str]:
        """Before the first episode: the fields that all episodes have encoded. Returns those that it will take so."""
        ...

    def add_encoded(self, key: str, episode: Episode, encoded: Mapping[str, EncodedColumn]) -> None:
        """As `add`, with the frames of the fields that `keep` returned; the episode has them decoded, too."""
        ...


class Format(Protocol):
    """Reader and writer of one format. A missing one raises FormatError and says what to use instead."""

    @property
    def name(self) -> str: ...

    @property
    def cannot(self) -> tuple[str, ...]:
        """What no dataset of this format has, whatever the store and the options, one sentence each; an export prints
        them. What depends on these is in the `notes` of the writer."""
        ...

    def read(self, path: Path, options: Mapping[str, str]) -> DatasetReader: ...

    def write(
        self, path: Path, spec: StepSpec, options: Mapping[str, str], infos: Sequence[EpisodeInfo] = ()
    ) -> DatasetWriter:
        """Create a dataset at `path`, which must not exist. `infos` are the attributes of the episodes that will be
        added, for formats that write facts about all of them; without them the format takes its defaults."""
        ...
