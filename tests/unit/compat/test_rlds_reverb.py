"""RLDS into a real Reverb server; set UNDERSTUDY_REVERB_PYTHON to a Python with dm-reverb and tf-agents."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

PYTHON = os.environ.get("UNDERSTUDY_REVERB_PYTHON")
ROOT = Path(__file__).parents[3]


@pytest.mark.skipif(PYTHON is None, reason="UNDERSTUDY_REVERB_PYTHON names no Python with dm-reverb and tf-agents")
def test_a_real_server_gives_back_the_pairs_of_the_data() -> None:
    done = subprocess.run(
        [str(PYTHON), Path(__file__).with_name("reverb_process.py")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src"), "TF_CPP_MIN_LOG_LEVEL": "3"},
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    assert "6 pairs of 10 steps pushed, sampled and equal" in done.stdout
