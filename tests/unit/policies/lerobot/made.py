"""Small random policies of lerobot for tests, where UNDERSTUDY_LEROBOT_PYTHON names a Python that has lerobot."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from understudy.core import ArraySpec, Spec, StepSpec
from understudy.policies.lerobot.config import PYTHON_VARIABLE, LeRobotConfig
from understudy.policies.lerobot.policy import LeRobotPolicy

HERE = Path(__file__).parent
PYTHON = os.environ.get(PYTHON_VARIABLE)
needs_lerobot = pytest.mark.skipif(PYTHON is None, reason=f"{PYTHON_VARIABLE} names no Python with lerobot")

KINDS = ("act", "diffusion", "diffusion_ddim", "smolvla", "pi0", "pi05")
WITH_WORDS = ("smolvla", "pi0", "pi05")
SPEC = StepSpec(  # that of the toy world
    observation=Spec(
        {
            "front": ArraySpec(shape=(64, 64, 3), dtype="uint8"),
            "wrist": ArraySpec(shape=(64, 64, 3), dtype="uint8"),
            "state": ArraySpec(shape=(20,), dtype="float32"),
        }
    ),
    action=Spec(ArraySpec(shape=(4,), dtype="float32", low=-1.0, high=1.0)),
)
SAID = ["pick the red block", "push", "pick the red block"]


def observations(num: int) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    seen: dict[str, Any] = {name: rng.integers(0, 256, (num, 64, 64, 3), np.uint8) for name in ("front", "wrist")}
    return {**seen, "state": rng.normal(size=(num, 20)).astype(np.float32)}


def run(script: str, *arguments: object) -> None:
    """Run a script of this directory with lerobot's interpreter."""
    quiet = {**os.environ, "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(HERE)}
    command = [str(PYTHON), str(HERE / script), *map(str, arguments)]
    done = subprocess.run(command, env=quiet, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]


def make_policies(directory: Path) -> Path:
    """The directories KIND of all kinds, and `python`: an interpreter in which pi0 and pi0.5 are small."""
    run("make_policies.py", directory, *KINDS)
    python = directory / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH={HERE / "small_pi"}:{HERE} exec {PYTHON} "$@"\n')
    python.chmod(0o755)
    return directory


def opened(directory: Path, kind: str, **options: Any) -> LeRobotPolicy:
    is_pi = kind.startswith("pi")
    given: dict[str, Any] = {"python": str(directory / "python") if is_pi else PYTHON}
    if is_pi:
        given["tokenizer"] = str(directory / "vlm")
    return LeRobotPolicy(directory / kind, SPEC, LeRobotConfig(**{**given, **options}))
