"""Training: what puts worlds, people, policies and the store together."""

from understudy.training.record import RecordConfig, RecordReport, open_target, record
from understudy.training.rollout import Rolled, run_episode

__all__ = ["RecordConfig", "RecordReport", "Rolled", "open_target", "record", "run_episode"]
