"""`understudy run-script`: a script of another project, unedited."""

from __future__ import annotations

import contextlib
import logging
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType
from typing import Annotated, Literal

import tyro

from understudy.core import UnderstudyError

SHELL_PROJECTS = ("simplevla-rl", "ript-vla")


def command(
    project: Annotated[Literal["hil-serl", "rlinf", "tf-agents", "simplevla-rl", "ript-vla"], tyro.conf.Positional],
    script: Annotated[Path, tyro.conf.Positional],
    arguments: Annotated[tuple[str, ...], tyro.conf.Positional] = (),
    *,
    store: Path | None = None,
) -> int:
    """Run a script of another project unedited, with what Understudy has in place of its parts.

    Modules that are replaced: `agentlace.trainer`, `agentlace.data.data_store` and the data package of `serl_launcher`
    (hil-serl), the replay buffer of RLinf (rlinf), `rlds_to_reverb` (tf-agents). All others are those that you have
    installed. A shell script of simplevla-rl or ript-vla that starts `verl.trainer.main_ppo` or
    `train_ript_openvla_oft.py` starts `understudy train` with the same options instead, and prints that command.
    docs/moving.md says what is better then, and what is different.

    Args:
        project: Project whose modules the script imports, or whose training it starts.
        script: Python file to run, or for simplevla-rl and ript-vla a shell script.
        arguments: Arguments of the script; everything after the script is passed to it.
        store: Directory that keeps the buffers that the script makes without a path; by default they are temporary.
    """
    from understudy.compat.original_modules import original_modules
    from understudy.compat.temporary_store import keeping_buffers

    if not script.is_file():
        kind = "shell script" if project in SHELL_PROJECTS else "Python file"
        raise UnderstudyError(f"{script}: expected a {kind}, got none; check the path")
    if project in SHELL_PROJECTS:
        if store is not None:
            raise UnderstudyError(f"store: a script of {project} makes no buffers, got {store}; leave it out")
        return _run_shell_script(project, script, arguments)
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


def _run_shell_script(project: str, script: Path, arguments: tuple[str, ...]) -> int:
    """Run a shell script. Where its `python` or `torchrun` would start a training of theirs, they start one of ours."""
    from understudy.compat.launch.programs import write_programs

    with tempfile.TemporaryDirectory() as folder:
        write_programs(Path(folder), project, "understudy.cli.tools.run_script_shim")
        env = {**os.environ, "PATH": os.pathsep.join([folder, os.environ.get("PATH", os.defpath)])}
        return _wait_for_all(["bash", str(script), *arguments], env)


def _wait_for_all(command: list[str], env: Mapping[str, str]) -> int:
    """Run a command, and hand signals on to all that it has started; after one, wait until all of it has ended.

    It has a process group of its own, so that a signal reaches the training behind the shell, and reaches it once. The
    shell ends at once, while the training saves: a pipe that both have inherited is closed when the last one ends.
    """
    read_end, write_end = os.pipe()
    signalled = False
    with subprocess.Popen(command, env=env, process_group=0, pass_fds=[write_end]) as process:
        os.close(write_end)

        def hand_on(number: int, _: FrameType | None) -> None:
            nonlocal signalled
            signalled = True
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, number)

        before = {number: signal.signal(number, hand_on) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            code = process.wait()
            if signalled:
                os.read(read_end, 1)
        finally:
            os.close(read_end)
            for number, handler in before.items():
                signal.signal(number, handler)
    return code if code >= 0 else 128 - code


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
