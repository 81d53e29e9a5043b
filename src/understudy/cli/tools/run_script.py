"""`understudy run-script`: a script of another project, unedited, over a store."""

from __future__ import annotations

import logging
import runpy
import sys
import traceback
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Annotated, Literal

import tyro

from understudy.core import UnderstudyError


def command(
    project: Annotated[Literal["hil-serl", "rlinf", "tf-agents"], tyro.conf.Positional],
    script: Annotated[Path, tyro.conf.Positional],
    arguments: Annotated[tuple[str, ...], tyro.conf.Positional] = (),
    *,
    store: Path | None = None,
) -> int:
    """Run a script of another project unedited: its imports of buffers and trainers get those of Understudy.

    Modules that are replaced: `agentlace.trainer`, `agentlace.data.data_store` and the data package of `serl_launcher`
    (hil-serl), the replay buffer of RLinf (rlinf), `rlds_to_reverb` (tf-agents). All others are those that you have
    installed. docs/moving.md says what is better then, and what is different.

    Args:
        project: Project whose modules the script imports.
        script: Python file to run.
        arguments: Arguments of the script; everything after the script is passed to it.
        store: Directory that keeps the buffers that the script makes without a path; by default they are temporary.
    """
    from understudy.compat.original_modules import original_modules
    from understudy.compat.temporary_store import keeping_buffers

    if not script.is_file():
        raise UnderstudyError(f"{script}: expected a Python file, got none; check the path")
    with ExitStack() as stack:
        stack.enter_context(_compat_log())
        stack.enter_context(original_modules(project))
        if store is not None:
            stack.enter_context(keeping_buffers(store))
        stack.enter_context(_as_main_program(script, arguments))
        try:
            runpy.run_path(str(script), run_name="__main__")
        except Exception as error:  # noqa: BLE001  # whatever the script raises
            _print_traceback(error, script)
            return 1
    return 0


def _print_traceback(error: Exception, script: Path) -> None:
    """The traceback that Python would print of the script alone."""
    calls = error.__traceback__
    while calls is not None and calls.tb_frame.f_code.co_filename != str(script):
        calls = calls.tb_next
    traceback.print_exception(type(error), error, calls or error.__traceback__)


@contextmanager
def _as_main_program(script: Path, arguments: tuple[str, ...]) -> Iterator[None]:
    """What Python gives a script: its arguments, and the modules beside it."""
    before = sys.argv, list(sys.path)
    sys.argv = [str(script), *arguments]
    sys.path.insert(0, str(script.resolve().parent))
    try:
        yield
    finally:
        sys.argv, sys.path[:] = before


@contextmanager
def _compat_log() -> Iterator[None]:
    """Show which options of the script change nothing here, and why."""
    log, handler = logging.getLogger("understudy.compat"), logging.StreamHandler()
    handler.setFormatter(logging.Formatter("understudy: %(message)s"))
    before = log.level
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    try:
        yield
    finally:
        log.removeHandler(handler)
        log.setLevel(before)
