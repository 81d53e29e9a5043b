"""Installs a simulator into a virtual environment of its own; an interrupted install is never used."""

from __future__ import annotations

import ctypes
import json
import shutil
import subprocess
import sys
import venv
from collections.abc import Callable
from pathlib import Path

from understudy.durable import files
from understudy.envs.registry import INSTALLED_FILE, WorldEntry
from understudy.envs.world import WorldError

LOG = "setup.log"
SHOWN_LINES = 15  # of the log, when something fails


def missing_libraries(entry: WorldEntry) -> list[str]:
    """Shared libraries that the world needs and that cannot be loaded."""
    return [name for name in entry.libraries if not has_library(name)]


def install(entry: WorldEntry, report: Callable[[str], None]) -> None:
    """Recreate the virtual environment of a world; `report` is called with each step."""
    if not entry.packages:
        raise WorldError(f"{entry.name}: needs no virtual environment; use it as {entry.form}")
    if sys.version_info[:2] > entry.newest_python:
        this, newest = (".".join(map(str, version)) for version in (sys.version_info[:2], entry.newest_python))
        raise WorldError(
            f"{entry.name}: {', '.join(entry.packages)} have no wheels for Python {this}; "
            f"run `understudy env setup {entry.name}` in an environment with Python {newest} or older"
        )
    lacking = missing_libraries(entry)
    if lacking:
        raise WorldError(
            f"{entry.name}: the system lacks {', '.join(lacking)}; "
            f"run `apt-get install -y {' '.join(entry.debian)}` (as root), or your system's package manager"
        )
    if entry.venv.exists():
        _remove(entry.venv)
    report(f"virtual environment in {entry.venv}")
    try:
        entry.venv.parent.mkdir(parents=True, exist_ok=True)
        venv.create(entry.venv, with_pip=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise WorldError(
            f"{entry.venv}: cannot be created ({error}); set UNDERSTUDY_HOME to another directory"
        ) from error
    report(f"pip install {' '.join(entry.packages)}")
    _pip(entry, report)
    versions = subprocess.run(
        [str(entry.python), "-m", "pip", "freeze"], capture_output=True, text=True, check=True
    ).stdout.split()
    content = {"packages": entry.packages, "python": sys.version, "versions": versions}
    files.write_durably(entry.venv / INSTALLED_FILE, json.dumps(content, indent=1).encode())


def _pip(entry: WorldEntry, report: Callable[[str], None]) -> None:
    command = [str(entry.python), "-m", "pip", "install", "--disable-pip-version-check", "--no-input", *entry.packages]
    log = entry.venv / LOG
    with (
        log.open("w") as kept,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as running,
    ):
        assert running.stdout is not None
        for line in running.stdout:
            kept.write(line)
            if line.startswith(("Collecting ", "Installing collected", "Building wheel")):
                report(line.strip())
    if running.returncode != 0:
        tail = "\n".join(log.read_text(errors="replace").splitlines()[-SHOWN_LINES:])
        raise WorldError(f"{entry.name}: pip failed; the whole output is in {log}\n{tail}")


def has_library(library: str) -> bool:
    """Whether a shared library and its dependencies can be loaded."""
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True


def _remove(directory: Path) -> None:
    """Remove an old virtual environment; refuses to remove anything else."""
    if not (directory / "pyvenv.cfg").is_file():
        raise WorldError(f"{directory}: expected a virtual environment or nothing, got something else; move it")
    (directory / INSTALLED_FILE).unlink(missing_ok=True)
    shutil.rmtree(directory)
