"""FORMAT: both ways of LeRobot's format, and what it cannot carry."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from understudy.core import StepSpec
from understudy.formats.format import DatasetReader, DatasetWriter, Format
from understudy.formats.lerobot.reader import LeRobotReader
from understudy.formats.lerobot.video import MOST_MEAN_ERROR
from understudy.formats.lerobot.writer import LeRobotWriter


class LeRobot:
    name = "lerobot"
    cannot = (
        f"Video is lossy unless ?video=lossless or ?video=png: over an episode, the pixels of a camera differ by up to "
        f"{MOST_MEAN_ERROR:g} of 255 in the mean, which is checked as it is written; more is refused.",
        "Ragged fields, empty fields and uint64 have no column in LeRobot: its users do not see them, Understudy does.",
        "LeRobot has no last observation, attributes, source, policy version or proposal: they are in meta/understudy, "
        "which LeRobot passes over and its tools drop when they change a data set.",
        "Data sets of others have no last observation: ?last= says what their last frame is.",
        "Timestamps are the frame's number over ?fps=; when a step was really taken is not kept.",
    )

    def read(self, path: Path, options: Mapping[str, str]) -> DatasetReader:
        return LeRobotReader(path, options)

    def write(self, path: Path, spec: StepSpec, options: Mapping[str, str]) -> DatasetWriter:
        return LeRobotWriter(path, spec, options)


FORMAT: Format = LeRobot()
