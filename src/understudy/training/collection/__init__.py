"""Collection: runs the episodes that a plan asks for, whatever crashes, and filters their groups."""

from understudy.training.collection.block_rows import block_spec, to_batch, write_rollouts
from understudy.training.collection.collector import Collector
from understudy.training.collection.group_filter import FilterConfig
from understudy.training.collection.groups import Group
from understudy.training.collection.iteration import CollectedIteration, IterationReport, collect_iteration
from understudy.training.collection.rollout import Rollout
from understudy.training.collection.serialization import (
    deserialize_rollouts,
    restore_collection,
    save_collection,
    serialize_rollouts,
)
from understudy.training.collection.task_start_plan import Plan, PlanConfig, PlannedTask, Ticket, shares

__all__ = [
    "CollectedIteration",
    "Collector",
    "FilterConfig",
    "Group",
    "IterationReport",
    "Plan",
    "PlanConfig",
    "PlannedTask",
    "Rollout",
    "Ticket",
    "block_spec",
    "collect_iteration",
    "deserialize_rollouts",
    "restore_collection",
    "save_collection",
    "serialize_rollouts",
    "shares",
    "to_batch",
    "write_rollouts",
]
