"""Collection: episodes as promised, whatever crashes. Tickets of a plan, lived by a collector."""

from understudy.training.collection.collector import Collector
from understudy.training.collection.groups import FilterConfig, Group
from understudy.training.collection.iteration import Collected, Report, collect_iteration
from understudy.training.collection.packed import pack, restore_collection, save_collection, unpack
from understudy.training.collection.plan import Plan, PlanConfig, PlannedTask, Ticket, shares
from understudy.training.collection.rollout import Rollout
from understudy.training.collection.rows import block_spec, to_batch, write

__all__ = [
    "Collected",
    "Collector",
    "FilterConfig",
    "Group",
    "Plan",
    "PlanConfig",
    "PlannedTask",
    "Report",
    "Rollout",
    "Ticket",
    "block_spec",
    "collect_iteration",
    "pack",
    "restore_collection",
    "save_collection",
    "shares",
    "to_batch",
    "unpack",
    "write",
]
