"""RLDS into a real Reverb server; set UNDERSTUDY_REVERB_PYTHON to a Python with dm-reverb and tf-agents.

`pip install 'tf-agents[reverb]==0.19.0' pytest xxhash apsw safetensors` in an environment of Python 3.11 makes one.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

PYTHON = os.environ.get("UNDERSTUDY_REVERB_PYTHON")
ROOT = Path(__file__).parents[3]


@pytest.mark.skipif(PYTHON is None, reason="UNDERSTUDY_REVERB_PYTHON names no Python with dm-reverb and tf-agents")
@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("reverb_process.py", "6 pairs of 10 steps pushed, sampled and equal"),
        (
            "tf_agents_process.py",
            "48 data sets, 458 trajectories and 324 pairs are equal; 10 wrong ones are refused by both",
        ),
    ],
)
def test_beside_the_real_packages(script: str, said: str) -> None:
    done = subprocess.run(
        [str(PYTHON), Path(__file__).with_name(script)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src"), "TF_CPP_MIN_LOG_LEVEL": "3"},
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    assert said in done.stdout
