"""What failed is tried once more under its own name, and a second failure counts."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

SOMETIMES = """
from pathlib import Path
import pytest

@pytest.mark.xdist_group("tests.sometimes")
@pytest.mark.parametrize("word", ["a@b", "c"])
def test_sometimes(word):
    flag = Path(__file__).with_name(word)
    there = flag.exists()
    flag.touch()
    assert there

def test_never():
    raise AssertionError
"""


@pytest.mark.parametrize(("which", "passes"), [("sometimes", True), ("never or c", False), ("test", True)])
def test_what_failed_is_tried_once_more(tmp_path: Path, which: str, passes: bool) -> None:
    (tmp_path / "test_it.py").write_text(SOMETIMES if which != "test" else "def test_it(): pass")
    (tmp_path / "pyproject.toml").write_text('[tool.pytest.ini_options]\nmarkers = ["slow: left out"]')
    run = [sys.executable, "-m", "pytest", "-q", "-n", "1", "--dist", "loadgroup", "-k", which, "test_it.py"]
    first = subprocess.run(run, cwd=tmp_path, capture_output=True, text=True, check=False)
    again = subprocess.run(
        [sys.executable, "-m", "tests.again"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        env={"PYTHONPATH": str(ROOT)},
    )
    if which == "test":
        assert first.returncode == 0
        assert again.returncode == 1
        assert "0 tests failed" in again.stdout
        return
    assert first.returncode == 1
    assert (again.returncode == 0) is passes, again.stdout
    assert "2 passed" in again.stdout if passes else "1 failed, 1 passed" in again.stdout
