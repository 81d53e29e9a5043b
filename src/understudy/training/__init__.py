"""Training: puts worlds, teleoperation, policies and the store together."""

from understudy.training.data.record import RecordConfig, RecordReport, open_target, record
from understudy.training.data.run_episode import EpisodeResult, run_episode

__all__ = ["EpisodeResult", "RecordConfig", "RecordReport", "open_target", "record", "run_episode"]
