"""Collection: episodes as promised, whatever crashes. Tickets of a plan, lived by a collector."""

from understudy.training.collection.block_rows import block_spec, to_batch, write
from understudy.training.collection.collector import Collector
from understudy.training.collection.groups import FilterConfig, Group
from understudy.training.collection.iteration import Collected, Report, collect_iteration
from understudy.training.collection.rollout import Rollout
from understudy.training.collection.serialization import pack, restore_collection, save_collection, unpack
from understudy.training.collection.ticket_plan import Plan, PlanConfig, PlannedTask, Ticket, shares

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
