"""The format `rlds` and its options."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from understudy.core import EpisodeInfo, Source, StepSpec
from understudy.formats.options import number, one_of
from understudy.formats.registry import check_options
from understudy.formats.rlds.dataset import FILE_FORMATS
from understudy.formats.rlds.reader import ReadOptions, RldsReader
from understudy.formats.rlds.rows import RldsEpisodes
from understudy.formats.rlds.writer import RldsWriter, WriteOptions

_IMAGES = ("png", "jpeg", "bytes")
_LAST = ("observation", "step")
_SOURCES = tuple(source.name.lower() for source in Source)


class RldsFormat:
    """RLDS as TensorFlow Datasets stores it."""

    name = "rlds"
    cannot = (
        "Other programs see the last row's action and reward as zeros, and ignore sources, policy versions, "
        "proposals and attributes, which are in fields called understudy.",
    )

    def read(self, path: Path, options: Mapping[str, str]) -> RldsReader:
        check_options(options, ("split", "last", "source", "workers"), self.name)
        read = ReadOptions(
            split=options.get("split"),
            last=one_of(self.name, "last", options.get("last", "observation"), _LAST),
            source=Source[one_of(self.name, "source", options.get("source", "policy"), _SOURCES).upper()],
            workers=number(self.name, "workers", options.get("workers", "1")),
        )
        return RldsReader(RldsEpisodes(path, read.split, read.workers), read)

    def write(
        self, path: Path, spec: StepSpec, options: Mapping[str, str], infos: Sequence[EpisodeInfo] = ()
    ) -> RldsWriter:
        check_options(options, ("file_format", "images", "shard_mb"), self.name)
        return RldsWriter(
            path,
            spec,
            WriteOptions(
                file_format=one_of(self.name, "file_format", options.get("file_format", "tfrecord"), FILE_FORMATS),
                images=one_of(self.name, "images", options.get("images", "png"), _IMAGES),
                shard_mb=number(self.name, "shard_mb", options.get("shard_mb", "512")),
            ),
        )


FORMAT = RldsFormat()
