"""The memory that `understudy plan` estimates, against torch's own trackers; in a process of its own, for the shim."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from tests.fake_cuda.build import problem

pytest.importorskip("transformers")
pytest.importorskip("peft")

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("options", "lines"),
    [
        (["--blocks", "1", "--ranks", "8", "--fine-tuning", "full"], 2),
        pytest.param(["--blocks", "2"], 12, marks=pytest.mark.nightly),
        pytest.param([], 12, marks=pytest.mark.nightly),  # all of OpenVLA 7B
    ],
)
def test_the_plan_is_what_torch_tracks(options: list[str], lines: int) -> None:
    """With LoRA and without, with checkpointing and without: learning, the step and acting differ by at most 3 %."""
    if (why := problem()) is not None:
        pytest.skip(why)
    command = [sys.executable, "-m", "benchmarks.plan_trackers", *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
    ratios = [float(found) for found in re.findall(r", (\d\.\d{3}) \|", done.stdout)]
    assert len(ratios) == 3 * lines
    assert ratios == pytest.approx([1.0] * len(ratios), abs=0.03)
