"""The shim, compiled, and a way to run a script under it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent


@pytest.fixture(scope="session")
def shim(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The library to preload."""
    if sys.platform != "linux":
        pytest.skip("the shim interposes the calls of Linux's libc")
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("there is no C compiler (cc) to make the shim with")
    shim = tmp_path_factory.mktemp("shim") / "shim.so"
    warnings = ("-Wall", "-Wextra", "-Werror")
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", *warnings, "-o", shim, HERE / "shim.c", "-ldl"], check=True)
    return shim


@pytest.fixture(scope="session")
def run_child(shim: Path) -> Callable[..., list[dict[str, Any]]]:
    """Runs a script of this directory with the shim loaded and returns the JSON lines it prints."""

    def run(script: str, *arguments: str | Path) -> list[dict[str, Any]]:
        done = subprocess.run(
            [sys.executable, HERE / script, *arguments],
            env={**os.environ, "LD_PRELOAD": str(shim)},
            stdout=subprocess.PIPE,
            check=True,
        )
        return [json.loads(line) for line in done.stdout.splitlines()]

    return run
