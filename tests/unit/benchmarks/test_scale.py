"""The study of scale runs, small: real servers, writers and a learner; it leaves its figures and would see a loss."""

from __future__ import annotations

import json
import os
import shutil
import time
from pathlib import Path

import numpy as np
import pytest
from benchmarks.scale import Study, main, measure
from benchmarks.scale_machine import Reading, Used, bare_disk_mb_s
from benchmarks.scale_roles import _pictures, compare, picture_of, state_of

from understudy.core import Step
from understudy.core.examples import robot_spec
from understudy.replay import Store

FIGURES = Path(__file__).parents[3] / "docs" / "benchmarks" / "scale.json"
STUDY = {
    "commit_steps": 5,
    "full_s": 0.4,
    "paced_s": 1.2,
    "alone_s": 0.6,
    "rate_hz": 20.0,
    "pace_steps_s": 50.0,
    "batch_size": 8,
    "batches_hz": 4.0,
    "size": 16,
}


def test_a_small_study_loses_nothing_and_leaves_its_figures(tmp_path: Path) -> None:
    out, work = tmp_path / "out", tmp_path / "work"
    work.mkdir()
    assert main(envs=(2,), shards=1, rounds=1, out=out, work=work, **STUDY) == 0  # type: ignore[arg-type]
    figures = json.loads((out / "benchmarks" / "scale.json").read_text())
    (point,) = figures["points"]
    assert point["envs"] == 2
    assert point["problems"] == []
    assert point["steps"] >= 2 * 3 * STUDY["commit_steps"]  # a chunk in each phase, at least
    for name in ("full_commits_ms", "paced_commits_ms", "paced_batches_ms", "alone_batches_ms"):
        assert 0 < point[name]["p50"] <= point[name]["p99"] <= point[name]["max"]
    assert figures["one_shard"] == []
    assert list(work.iterdir()) == []


@pytest.mark.nightly  # a study
@pytest.mark.parametrize("num_envs", [6, 12])
def test_environments_are_spread_over_the_shards_and_keep_the_pace_of_all_together(
    num_envs: int, tmp_path: Path
) -> None:
    found = measure(Study(shards=3, work=tmp_path, **STUDY), num_envs)  # type: ignore[arg-type]
    assert found.problems == []
    assert len(found.shard_steps) == 3
    assert sum(1 for rows in found.shard_steps if rows) >= 2
    assert sum(found.shard_steps) >= found.steps  # the last row of an episode is no step
    assert found.paced_hz == pytest.approx(50 / num_envs)


def test_the_pictures_are_those_of_the_published_figures(tmp_path: Path) -> None:
    (tmp_path / "benchmarks").mkdir()
    shutil.copy(FIGURES, tmp_path / "benchmarks")
    assert main(model_only=True, out=tmp_path) == 0
    for name in ("measured", "cluster"):
        assert (tmp_path / "images" / f"scale_{name}.svg").read_text().endswith("</svg>\n")
    figures = json.loads(FIGURES.read_text())
    assert all(point["problems"] == [] for point in figures["points"])


def write(store: Path, number: int, indices: range, *, shift: int = 0, size: int = 8) -> None:
    """Steps as environments write them; with `shift` the pictures are those of other steps."""
    seen = _pictures(size)

    def observe(index: int) -> dict[str, np.ndarray]:
        state = state_of(number, np.array([index]))[0]
        return {"wrist_1": seen[picture_of(number, index + shift)], "wrist_2": seen[0], "state": state}

    with Store.open(store) as opened:
        writer = opened.writer(f"{number}-{indices.start}", robot_spec(size))
        writer.begin()
        for index in indices:
            last = index == indices[-1]
            writer.append(
                Step(
                    observation=observe(index),
                    action=np.zeros(7, np.float32),
                    reward=0.0,
                    terminated=False,
                    truncated=last,
                )
            )
        writer.end(observe(indices.stop))


def test_the_check_sees_what_is_lost_there_twice_or_changed(tmp_path: Path) -> None:
    left, right = tmp_path / "left", tmp_path / "right"
    write(left, 0, range(10))
    write(right, 1, range(6))
    assert compare([left, right], {0: 10, 1: 6}, 8) == []
    assert compare([left, right], {0: 11, 1: 6}, 8) == ["env 0: 11 steps were appended, 10 are there"]
    write(right, 0, range(8, 10))  # on another shard once more
    assert compare([left, right], {0: 10, 1: 6}, 8) == ["env 0: 10 steps were appended, 12 are there"]
    write(right, 2, range(4), shift=1)
    (problem,) = compare([right], {0: 10, 1: 6, 2: 4}, 8)[:1]
    assert "of env 2 is not as it was appended" in problem


def test_the_machine_is_read(tmp_path: Path) -> None:
    before = Reading.take([os.getpid()], tmp_path)
    end = time.process_time() + 0.2
    while time.process_time() < end:
        sum(range(1000))
    after = Reading.take([os.getpid()], tmp_path)
    used = Used.between(before, after, {"servers": [os.getpid()]})
    assert used.cores["servers"] * used.seconds >= 0.1
    assert used.busiest_server_thread * used.seconds >= 0.1
    assert used.busiest_writer_thread == 0.0
    assert bare_disk_mb_s(tmp_path, num_threads=2, seconds=0.1) > 0
    assert list(tmp_path.iterdir()) == []
