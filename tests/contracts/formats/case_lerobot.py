"""The contract's cases of LeRobot: AV1 refuses the noise that canonical cameras see; what is exact takes all of it."""

from __future__ import annotations

from tests.contracts.formats.case import Case

from understudy.core import Episode, StepSpec
from understudy.formats.lerobot.plan import is_camera


def without_cameras(spec: StepSpec, episode: Episode) -> tuple[StepSpec, Episode] | None:
    if any(is_camera(path, leaf) for path, leaf in spec.observation.leaves("observation")):
        return None
    return spec, episode


CASES = [
    Case(format="lerobot", carried=without_cameras),
    Case(format="lerobot", options={"video": "lossless"}),
    Case(format="lerobot", options={"video": "png", "version": "2.1"}),
]
