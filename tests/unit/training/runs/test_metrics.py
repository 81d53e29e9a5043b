"""Metrics: lines that a resumed run can take back, and sinks that hear the same numbers."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from understudy.core import UnderstudyError
from understudy.training.runs.metrics import MetricLog, open_sink, read_metrics, rewind


class Heard:
    def __init__(self) -> None:
        self.lines: list[tuple[str, int, dict[str, float]]] = []
        self.closed = False

    def write(self, kind: str, step: int, numbers: Mapping[str, float]) -> None:
        self.lines.append((kind, step, dict(numbers)))

    def close(self) -> None:
        self.closed = True


def test_lines_are_read_back_and_sinks_hear_the_numbers(tmp_path: Path) -> None:
    sink = Heard()
    log = MetricLog(tmp_path / "m", (sink,))
    log.write("train", step=3, update=6, loss=0.5, note="text", broken=float("nan"), good=True)
    log.write("evaluation", step=4, update=8, success=1.0)
    log.close()
    assert [line["kind"] for line in read_metrics(tmp_path / "m")] == ["train", "evaluation"]
    assert [line["success"] for line in read_metrics(tmp_path / "m", "evaluation")] == [1.0]
    assert sink.lines == [("train", 3, {"loss": 0.5, "good": 1.0}), ("evaluation", 4, {"success": 1.0})]
    assert sink.closed


def test_a_half_written_line_is_left_out(tmp_path: Path) -> None:
    log = MetricLog(tmp_path / "m")
    log.write("train", step=1, update=1)
    log.close()
    with (tmp_path / "m").open("ab") as file:
        file.write(b'{"kind": "tra')
    assert len(list(read_metrics(tmp_path / "m"))) == 1


def test_lines_behind_a_checkpoint_are_taken_back(tmp_path: Path) -> None:
    log = MetricLog(tmp_path / "m")
    log.write("train", step=1, update=1)
    position = log.position
    log.write("train", step=2, update=2)
    log.write("train", step=3, update=3)
    log.close()
    assert rewind(tmp_path / "m", position) == 2
    assert [line["step"] for line in read_metrics(tmp_path / "m")] == [1]
    with pytest.raises(UnderstudyError, match="the checkpoint needs 9999"):
        rewind(tmp_path / "m", 9999)
    (tmp_path / "m").unlink()
    with pytest.raises(UnderstudyError, match="is missing"):
        rewind(tmp_path / "m", position)
    assert rewind(tmp_path / "m", 0) == 0


def test_a_sink_that_is_not_installed_is_named(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    for name in ("tensorboard", "wandb"):
        try:
            __import__(name)
        except ImportError:
            with pytest.raises(UnderstudyError, match=f"run `pip install {name}`"):
                open_sink(name, tmp_path, {})  # type: ignore[arg-type]


@pytest.mark.parametrize("named", [{}, {"WANDB_PROJECT": "SimpleVLA", "WANDB_NAME": "libero10-grpo"}])
def test_weights_and_biases_hears_the_same_numbers(named: dict[str, str], tmp_path: Path) -> None:
    """The real client, offline: what it would send stands in a file, under the names that it was given."""
    tmp_path = tmp_path / "my-run"
    tmp_path.mkdir()
    pytest.importorskip("wandb")
    script = (
        "import sys; from pathlib import Path; from understudy.training.runs.metrics import MetricLog, open_sink\n"
        "place = Path(sys.argv[1]); log = MetricLog(place / 'm', (open_sink('wandb', place, {'seed': 7}),))\n"
        "log.write('train', step=3, update=6, loss=0.5); log.write('evaluation', step=4, update=8, success=1.0)\n"
        "log.close()\n"
    )
    environment = {name: value for name, value in os.environ.items() if not name.startswith("WANDB")} | named
    subprocess.run([sys.executable, "-c", script, tmp_path], env=environment, check=True, timeout=120)
    (file,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    held = file.read_bytes()
    assert all(name in held for name in (b"seed", b"train/loss", b"evaluation/success"))
    for name in named.values() or ("my-run",):
        assert name.encode() in held
    assert (b"SimpleVLA" in held) == bool(named)
