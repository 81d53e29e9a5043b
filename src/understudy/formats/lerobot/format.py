"""The format `lerobot`, and what it cannot store."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from understudy.core import EpisodeInfo, StepSpec
from understudy.formats.format import DatasetReader, DatasetWriter, Format
from understudy.formats.lerobot.reader import LeRobotReader
from understudy.formats.lerobot.video import MOST_MEAN_ERROR
from understudy.formats.lerobot.writer import LeRobotWriter


class LeRobot:
    name = "lerobot"
    cannot = (
        f"Frames that the store has as H.264 are written as they are. Other video is lossy unless ?video=lossless or "
        f"?video=png. The mean error of a camera over an episode is checked "
        f"when it is written; more than {MOST_MEAN_ERROR:g} of 255 is refused.",
        "Ragged fields, empty fields and uint64 have no column in LeRobot: only Understudy reads them.",
        "LeRobot has no last observation, attributes, source, policy version or proposal: they are in meta/understudy, "
        "which LeRobot ignores and its tools drop when they change a dataset.",
        "A column next.success has no unknown: where the success of only some episodes is known, that of the others is "
        "written as false. If it is known of none, there is no such column.",
        "Datasets of others have no last observation: ?last= says what their last frame is.",
        "Timestamps are the frame index divided by the frame rate; the real time of a step is not stored.",
    )

    def read(self, path: Path, options: Mapping[str, str]) -> DatasetReader:
        return LeRobotReader(path, options)

    def write(
        self, path: Path, spec: StepSpec, options: Mapping[str, str], infos: Sequence[EpisodeInfo] = ()
    ) -> DatasetWriter:
        return LeRobotWriter(path, spec, options, infos)


FORMAT: Format = LeRobot()
