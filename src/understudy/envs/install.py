"""Install: a virtual environment for a simulator, whole or not at all."""

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
from understudy.envs.registry import MARK, WorldEntry
from understudy.envs.world import WorldError

LOG = "setup.log"
SHOWN_LINES = 15  # of the log, when something fails


def missing_libraries(entry: WorldEntry) -> list[str]:
    """Shared libraries of the system that the world needs and the loader does not find."""
    return [name for name in entry.libraries if not has_library(name)]


def install(entry: WorldEntry, say: Callable[[str], None]) -> None:
    """Make the virtual environment of a world anew; `say` is told each step. What is half made is never `ready`."""
    if not entry.packages:
        raise WorldError(f"{entry.name}: it needs no virtual environment; use it as {entry.form}")
    lacking = missing_libraries(entry)
    if lacking:
        raise WorldError(
            f"{entry.name}: the system lacks {', '.join(lacking)}; "
            f"run `apt-get install -y {' '.join(entry.debian)}` (as root), or your system's own way"
        )
    if entry.venv.exists():
        _remove(entry.venv)
    say(f"virtual environment in {entry.venv}")
    try:
        entry.venv.parent.mkdir(parents=True, exist_ok=True)
        venv.create(entry.venv, with_pip=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise WorldError(f"{entry.venv}: cannot be made ({error}); set UNDERSTUDY_HOME to another directory") from error
    say(f"pip install {' '.join(entry.packages)}")
    _pip(entry, say)
    versions = subprocess.run(
        [str(entry.python), "-m", "pip", "freeze"], capture_output=True, text=True, check=True
    ).stdout.split()
    content = {"packages": entry.packages, "python": sys.version, "versions": versions}
    files.write_durably(entry.venv / MARK, json.dumps(content, indent=1).encode())


def _pip(entry: WorldEntry, say: Callable[[str], None]) -> None:
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
                say(line.strip())
    if running.returncode != 0:
        tail = "\n".join(log.read_text(errors="replace").splitlines()[-SHOWN_LINES:])
        raise WorldError(f"{entry.name}: pip failed; all of it is in {log}\n{tail}")


def has_library(library: str) -> bool:
    """Whether a shared library is here, with all that it needs."""
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True


def _remove(place: Path) -> None:
    """Take an old virtual environment away; anything else stays, since it is not ours to remove."""
    if not (place / "pyvenv.cfg").is_file():
        raise WorldError(f"{place}: expected a virtual environment or nothing, got something else; move it away")
    (place / MARK).unlink(missing_ok=True)
    shutil.rmtree(place)
