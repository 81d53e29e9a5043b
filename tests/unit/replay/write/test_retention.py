"""Retention: each kind of episode has a budget of its own."""

from pathlib import Path

import pytest

from understudy.core import (
    EpisodeInfo,
    StoreError,
)
from understudy.core.examples import random_steps, small_spec
from understudy.replay import Budget, Reader, Retention, Store


def test_retention_has_a_budget_for_each_kind(tmp_path: Path) -> None:
    spec = small_spec()
    with Store.open(tmp_path / "store") as store, Reader(tmp_path / "store") as reader:
        writer = store.writer("w", spec)
        for kind, human in (("demonstration", True), ("practice", False), ("practice", True)):
            for n in range(5):
                steps, last = random_steps(spec, 10, n, human=human)
                writer.begin(EpisodeInfo(kind=kind))
                for step in steps:
                    writer.append(step)
                writer.end(last)

        def kept() -> dict[str, int]:
            kinds = [record.info.kind for record in reader.episodes()]
            return {kind: kinds.count(kind) for kind in kinds}

        assert kept() == {"demonstration": 5, "practice": 5, "correction": 5}
        assert store.over_budget(Retention()) == []
        assert store.retain(Retention(correction=Budget(max_steps=20))) == 3
        assert kept() == {"demonstration": 5, "practice": 5, "correction": 2}
        size = reader.record(6).num_bytes
        assert store.retain(Retention(practice=Budget(max_bytes=4 * size))) == 1
        assert kept() == {"demonstration": 5, "practice": 4, "correction": 2}
        assert [r.id for r in reader.episodes("kind = 'practice' and deleted is null")] == [7, 8, 9, 10]  # the newest
        assert store.retain(Retention(demonstration=Budget(max_steps=0))) == 5
        with pytest.raises(StoreError, match="max_steps: expected None or a number from 0, got -1"):
            Budget(max_steps=-1)
