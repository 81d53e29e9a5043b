"""A metrics file is followed as it grows, is taken back and grows again, in bounded memory."""

import json
import math
from pathlib import Path

import pytest

from understudy.dashboard.api import curves
from understudy.dashboard.api.curves import Bins, MetricsFollower
from understudy.training.runs.metrics import MetricLog, rewind


def test_lines_are_taken_in_as_they_come(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    follower = MetricsFollower(path)
    assert follower.follow()["curves"] == {}  # it is not there yet
    log = MetricLog(path)
    log.write("train", step=10, update=20, loss=0.5, name="x")
    assert follower.follow()["curves"]["train"] == {"step": [10], "update": [20], "values": {"loss": [0.5]}}
    with path.open("ab") as file:
        file.write(b'{"kind": "train", "step": 20, "upd')
    assert follower.follow()["curves"]["train"]["step"] == [10]
    with path.open("ab") as file:
        file.write(b'ate": 40, "loss": 0.25}\n')
    found = follower.follow()
    assert found["curves"]["train"]["values"]["loss"] == [0.5, 0.25]
    assert found["last"]["train"] == {"kind": "train", "step": 20, "update": 40, "loss": 0.25}
    log.close()


@pytest.mark.parametrize("num_after", [0, 1, 3, 10])
def test_a_run_that_is_resumed_takes_lines_back_and_goes_on(num_after: int, tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    log = MetricLog(path)
    for step in (1, 2):
        log.write("train", step=step, update=step, loss=float(step))
    position = log.position
    for step in (3, 4, 5):
        log.write("train", step=step, update=step, loss=100.0)
    log.close()
    follower = MetricsFollower(path)
    assert follower.follow()["curves"]["train"]["step"] == [1, 2, 3, 4, 5]
    rewind(path, position)
    log = MetricLog(path)
    for step in range(3, 3 + num_after):  # as many lines as before, or more: the file need not be shorter
        log.write("train", step=step, update=step, loss=200.0)
    log.close()
    found = follower.follow()["curves"]["train"]
    assert found["step"] == list(range(1, 3 + num_after))
    assert found["values"]["loss"] == [1.0, 2.0, *[200.0] * num_after]


def test_a_file_that_is_replaced_or_gone_is_begun_anew(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"kind": "train", "step": 1, "update": 1}\n')
    follower = MetricsFollower(path)
    assert follower.follow()["curves"]["train"]["step"] == [1]
    path.unlink()
    assert follower.follow()["curves"] == {}
    path.write_text('{"kind": "train", "step": 9, "update": 1}\n')
    assert follower.follow()["curves"]["train"]["step"] == [9]


def test_damaged_lines_are_left_out_and_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(curves, "MAX_LINE_BYTES", 1000)
    monkeypatch.setattr(curves, "BLOCK_BYTES", 300)
    path = tmp_path / "metrics.jsonl"
    good = json.dumps({"kind": "train", "step": 5, "update": 5, "loss": math.nan, "q": 2})
    path.write_bytes(b'[1]\n{"kind": "train"}\n\xff\xfe\n' + b'"' + b"x" * 5000 + b'"\n' + good.encode() + b"\n")
    found = MetricsFollower(path).follow()
    assert found["num_damaged"] == 4
    assert found["curves"]["train"] == {"step": [5], "update": [5], "values": {"q": [2.0]}}


def test_evaluations_are_counted_by_task(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    episode_results = [{"task": "a", "success": True}, {"task": "a", "success": False}, {"task": "b", "success": True}]
    log = MetricLog(path)
    log.write(
        "evaluation", step=1, update=1, success=2 / 3, episode_results=episode_results, fingerprint={"code": "abc"}
    )
    log.close()
    (found,) = MetricsFollower(path).follow()["evaluations"]
    assert found["tasks"] == {"a": [1, 2], "b": [1, 1]}
    assert found["fingerprint"] == {"code": "abc"}
    assert "episode_results" not in found


def test_bins_stay_few_and_their_means_are_exact() -> None:
    bins = Bins(most=8)
    for step in range(1, 101):
        bins.add(step, 2 * step, {"x": float(step)} if step % 2 else {"x": float(step), "y": 1.0})
    found = bins.to_json()
    assert 4 <= len(found["step"]) <= 8
    assert found["step"][-1] == 100
    before = 0
    for step, mean in zip(found["step"], found["values"]["x"], strict=True):
        assert mean == pytest.approx(sum(range(before + 1, step + 1)) / (step - before))
        before = step
    assert set(found["values"]["y"]) == {1.0}
