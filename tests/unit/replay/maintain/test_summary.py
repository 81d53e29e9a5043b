"""Summary: a store in numbers."""

from pathlib import Path

from understudy.core.examples import small_spec
from understudy.replay import Store, compact, summarize
from understudy.replay.format.paths import segment_path


def test_counts_and_who_writes(path: Path) -> None:
    with Store.open(path) as store:
        store.delete([1])
        store.set_success([2], None)
        segment_path(path, 9).write_bytes(b"left by a crash")
        summary = summarize(path)
        assert summary.being_written
        assert [(t.kind, t.deleted, t.episodes, t.steps, t.successes, t.success_known) for t in summary.totals] == [
            ("practice", False, 3, 15, 2, 2),
            ("practice", True, 1, 5, 1, 1),
        ]
        assert (summary.num_rows, summary.num_dead_rows, summary.num_segments, summary.num_orphans) == (24, 6, 1, 1)
        assert (summary.commit, summary.specs) == (store.last_commit, (small_spec(),))
        assert [writer.name for writer in summary.writers] == ["w"]
        assert summary.disk_bytes > 0
        compact(store, min_dead=0.0)
    summary = summarize(path)
    assert not summary.being_written
    assert (summary.num_rows, summary.num_dead_rows, summary.num_purged, summary.num_orphans) == (18, 0, 1, 0)
