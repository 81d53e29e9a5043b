"""What the crash test writes: any other row is told apart, though video is stored with losses."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from understudy.core import EpisodeInfo
from understudy.replay import Reader, Store
from understudy.selftest.contents import Contents


def test_a_row_equals_itself_alone(tmp_path: Path) -> None:
    pytest.importorskip("av")
    contents = Contents(encoded=True)
    with Store.open(tmp_path / "store") as store:
        writer = store.writer("w", contents.spec)
        writer.begin(EpisodeInfo(seed=7))
        for index in range(9):
            writer.append(contents.step(7, index, last=index == 8))
        writer.end(contents.observation(7, 9))
    with Reader(tmp_path / "store") as reader:
        (record,) = reader.episodes()
        _, columns = reader.rows(record.id)
    videos = [contents.observation(7, index)["video"] for index in range(10)]
    assert not np.array_equal(columns["observation/video"][3], videos[3])  # losses
    for row in range(10):
        assert contents.row_equals(columns, row, 7, last=row == 9)
        same = [contents.leaf_equals("observation/video", video, columns["observation/video"][row]) for video in videos]
        assert same == [index == row for index in range(10)]
    for path in ("camera", "video", "depth"):
        changed = columns[f"observation/{path}"].copy()
        changed[4] = changed[5]
        assert not contents.row_equals({**columns, f"observation/{path}": changed}, 4, 7, last=False)


def test_cameras_are_encoded_only_if_asked_for() -> None:
    assert not Contents().spec.encoded
    assert sorted(Contents().observation(1, 2)) == ["camera", "note"]
