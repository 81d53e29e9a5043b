"""The format `lerobot`, and what it cannot store."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from understudy.core import EpisodeInfo, StepSpec
from understudy.formats.format import DatasetReader, DatasetWriter, Format
from understudy.formats.lerobot.reader import LeRobotReader
from understudy.formats.lerobot.writer import LeRobotWriter


class LeRobot:
    name = "lerobot"
    cannot = (
        "LeRobot has no last observation, attributes, source, policy version or proposal: they are in meta/understudy, "
        "which LeRobot ignores and its tools drop when they change a dataset.",
        "Timestamps are the frame index divided by the frame rate; the real time of a step is not stored.",
    )

    def read(self, path: Path, options: Mapping[str, str]) -> DatasetReader:
        return LeRobotReader(path, options)

    def write(
        self, path: Path, spec: StepSpec, options: Mapping[str, str], infos: Sequence[EpisodeInfo] = ()
    ) -> DatasetWriter:
        return LeRobotWriter(path, spec, options, infos)


FORMAT: Format = LeRobot()
