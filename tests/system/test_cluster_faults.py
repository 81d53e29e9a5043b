"""Two minutes of benchmarks/cluster_faults.py: workers, a node and the driver of a real cluster are killed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("ray")
ROOT = Path(__file__).parents[2]


@pytest.mark.nightly  # tests/unit/cluster kills one of each role in every run
@pytest.mark.xdist_group("ray")
def test_nothing_is_lost_and_nothing_is_different() -> None:
    command = [sys.executable, "benchmarks/cluster_faults.py", "--nodes", "2", "--seconds", "60", "--every-s", "10"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    assert "lost 0, duplicated 0, groups not whole 0, not learned from 0; weights equal" in done.stdout
    assert "killed a node" in done.stdout
    assert "killed driver" in done.stdout
