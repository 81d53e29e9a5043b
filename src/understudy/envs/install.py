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

from understudy.envs.registry import MARK, Known
from understudy.envs.world import WorldError

LOG = "setup.log"
SHOWN_LINES = 15  # of the log, when something fails


def missing_libraries(known: Known) -> list[str]:
    """Shared libraries of the system that the world needs and the loader does not find."""
    return [name for name in known.libraries if not has_library(name)]


def install(known: Known, say: Callable[[str], None]) -> None:
    """Make the virtual environment of a world anew; `say` is told each step. What is half made is never `ready`."""
    if not known.packages:
        raise WorldError(f"{known.name}: it needs no virtual environment; use it as {known.form}")
    lacking = missing_libraries(known)
    if lacking:
        raise WorldError(
            f"{known.name}: the system lacks {', '.join(lacking)}; "
            f"run `apt-get install -y {' '.join(known.debian)}` (as root), or your system's own way"
        )
    if known.place.exists():
        _remove(known.place)
    say(f"virtual environment in {known.place}")
    try:
        known.place.parent.mkdir(parents=True, exist_ok=True)
        venv.create(known.place, with_pip=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise WorldError(f"{known.place}: cannot be made ({error}); set UNDERSTUDY_HOME to another place") from error
    say(f"pip install {' '.join(known.packages)}")
    _pip(known, say)
    versions = subprocess.run(
        [str(known.python), "-m", "pip", "freeze"], capture_output=True, text=True, check=True
    ).stdout.split()
    mark = known.place / (MARK + ".new")
    mark.write_text(json.dumps({"packages": known.packages, "python": sys.version, "versions": versions}, indent=1))
    mark.rename(known.place / MARK)


def _pip(known: Known, say: Callable[[str], None]) -> None:
    command = [str(known.python), "-m", "pip", "install", "--disable-pip-version-check", "--no-input", *known.packages]
    log = known.place / LOG
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
        raise WorldError(f"{known.name}: pip failed; all of it is in {log}\n{tail}")


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
