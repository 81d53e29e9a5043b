"""Summary: what a store holds, in numbers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from understudy.core import SensorCounts, StepSpec
from understudy.core.times import LATE_STEPS, SENSORS, counts_of
from understudy.durable.lock import lock_is_held
from understudy.replay.format.catalog import Catalog
from understudy.replay.format.paths import LOCK_FILE, segment_files
from understudy.replay.format.records import EpisodeTotals, WriterRecord
from understudy.replay.read.reader import Reader


@dataclass(frozen=True, kw_only=True)
class Summary:
    """A store as of one commit."""

    path: Path
    store_id: str
    commit: int
    being_written: bool
    totals: tuple[EpisodeTotals, ...]  # by kind, deleted episodes separately
    num_purged: int
    num_segments: int
    num_rows: int  # in segments, with those that are dead
    num_dead_rows: int  # of deleted episodes, or left by a repair: compaction removes them
    disk_bytes: int
    writers: tuple[WriterRecord, ...]
    specs: tuple[StepSpec, ...]
    num_orphans: int  # segment files that the catalog does not list
    sensors: Mapping[str, SensorCounts]  # by field, over the episodes that are not deleted and have counted
    num_late_steps: int  # steps of these that took longer than the period of their control rate


def summarize(path: str | Path) -> Summary:
    """Count a store, also while another process writes to it."""
    with Reader(path) as reader:
        catalog = reader.catalog
        with catalog.transaction(write=False):
            segments = catalog.segments()
            live = sum(catalog.live_rows().values())
            num_rows = sum(segment.num_rows for segment in segments)
            known = {segment.id for segment in segments}
            there = segment_files(reader.path)
            sensors, num_late_steps = _timing(catalog)
            return Summary(
                path=reader.path,
                store_id=catalog.store_id,
                commit=catalog.last_commit(),
                being_written=lock_is_held(reader.path / LOCK_FILE),
                totals=tuple(catalog.episode_totals()),
                num_purged=len(catalog.episode_ids("purged")),
                num_segments=len(segments),
                num_rows=num_rows,
                num_dead_rows=num_rows - live,
                disk_bytes=sum(file.stat().st_blocks * 512 for file in [*there, *reader.path.glob("catalog.*")]),
                writers=tuple(catalog.writers()),
                specs=tuple(catalog.spec(spec_id) for spec_id in catalog.spec_ids()),
                num_orphans=sum(int(file.stem) not in known for file in there),
                sensors=sensors,
                num_late_steps=num_late_steps,
            )


def _timing(catalog: Catalog) -> tuple[dict[str, SensorCounts], int]:
    """The sums of what the labels of episodes say of dropped and late samples, and of late steps."""
    sensors: dict[str, SensorCounts] = {}
    counted = " or ".join(f"json_extract(labels, '$.{label}') is not null" for label in (SENSORS, LATE_STEPS))
    num_late_steps = 0
    for record in catalog.episodes(f"deleted is null and ({counted})"):
        for path, counts in counts_of(record.info.labels).items():
            sensors[path] = sensors.get(path, SensorCounts()) + counts
        late = record.info.labels.get(LATE_STEPS, "0")
        num_late_steps += int(late) if late.isdecimal() else 0
    return sensors, num_late_steps
