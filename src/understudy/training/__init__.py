"""Training: what puts worlds, people, policies and the store together."""

from understudy.training.data.record import RecordConfig, RecordReport, open_target, record
from understudy.training.data.run_episode import Rolled, run_episode

__all__ = ["RecordConfig", "RecordReport", "Rolled", "open_target", "record", "run_episode"]
