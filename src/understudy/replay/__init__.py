"""The experience store: segments of rows, the catalog that says what is in them, writers and readers."""

from understudy.replay.backup import backup
from understudy.replay.compaction import CompactionReport
from understudy.replay.limiter import Limiter
from understudy.replay.mixture import Mixture
from understudy.replay.prefetch import Prefetch
from understudy.replay.reader import Changes, Reader
from understudy.replay.records import EpisodeRecord
from understudy.replay.repair import RepairReport, repair
from understudy.replay.retention import Budget, Retention
from understudy.replay.sampler import BatchRecord, Sampler
from understudy.replay.selectors import OldestOnce, Prioritized, Uniform, UniformEpisodes
from understudy.replay.shapes import Sequences, Transitions
from understudy.replay.store import Store
from understudy.replay.summary import Summary, summarize
from understudy.replay.verify import VerifyReport, verify
from understudy.replay.view import DEMO, EVERYTHING, ONLINE, Clause, View
from understudy.replay.writer import Writer

__all__ = [
    "DEMO",
    "EVERYTHING",
    "ONLINE",
    "BatchRecord",
    "Budget",
    "Changes",
    "Clause",
    "CompactionReport",
    "EpisodeRecord",
    "Limiter",
    "Mixture",
    "OldestOnce",
    "Prefetch",
    "Prioritized",
    "Reader",
    "RepairReport",
    "Retention",
    "Sampler",
    "Sequences",
    "Store",
    "Summary",
    "Transitions",
    "Uniform",
    "UniformEpisodes",
    "VerifyReport",
    "View",
    "Writer",
    "backup",
    "repair",
    "summarize",
    "verify",
]
