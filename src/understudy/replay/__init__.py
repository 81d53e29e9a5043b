"""The experience store: segments of rows, the catalog that says what is in them, writers and readers."""

from understudy.replay.format.records import EpisodeRecord
from understudy.replay.maintain.backup import backup
from understudy.replay.maintain.compaction import CompactionReport, compact
from understudy.replay.maintain.episode_parts import EpisodePart, merge, origins, split, trim
from understudy.replay.maintain.repair import RepairReport, repair
from understudy.replay.maintain.summary import Summary, summarize
from understudy.replay.maintain.verify import VerifyReport, verify
from understudy.replay.read.batch_shapes import Sequences, Transitions
from understudy.replay.read.derived_frames import FrameCache
from understudy.replay.read.estimates import EpisodeEstimates, Estimates
from understudy.replay.read.reader import Changes, Reader
from understudy.replay.read.view import DEMO, EVERYTHING, ONLINE, Clause, View
from understudy.replay.sample.batch_source import BatchSource, EmptyError, ViewSampler
from understudy.replay.sample.mixture import Mixture
from understudy.replay.sample.prefetch import Prefetch
from understudy.replay.sample.rate_limiter import RateLimiter
from understudy.replay.sample.sampler import BatchRecord, Sampler
from understudy.replay.sample.selectors import Fifo, Prioritized, Uniform, UniformEpisodes
from understudy.replay.write.retention import Budget, Retention
from understudy.replay.write.store import Store
from understudy.replay.write.writer import Writer

__all__ = [
    "DEMO",
    "EVERYTHING",
    "ONLINE",
    "BatchRecord",
    "BatchSource",
    "Budget",
    "Changes",
    "Clause",
    "CompactionReport",
    "EmptyError",
    "EpisodeEstimates",
    "EpisodePart",
    "EpisodeRecord",
    "Estimates",
    "Fifo",
    "FrameCache",
    "Mixture",
    "Prefetch",
    "Prioritized",
    "RateLimiter",
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
    "ViewSampler",
    "Writer",
    "backup",
    "compact",
    "merge",
    "origins",
    "repair",
    "split",
    "summarize",
    "trim",
    "verify",
]
