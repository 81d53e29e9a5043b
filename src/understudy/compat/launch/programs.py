"""The program that trains, among all that a shell script starts.

A script calls `python` and `torchrun`. `write_programs` makes a folder with programs of these names that goes first in
the PATH of the script: the call that starts a training of the original starts ours instead, and every other call goes
to the real program.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from understudy.core import UnderstudyError

PROGRAMS = ("python", "python3", "torchrun")
SIMPLEVLA_RL, RIPT_VLA = "simplevla-rl", "ript-vla"
MODULES = {SIMPLEVLA_RL: ("verl.trainer.main_ppo",), RIPT_VLA: ()}
SCRIPTS = {SIMPLEVLA_RL: (), RIPT_VLA: ("train_ript_openvla_oft.py", "train_ript_quest.py", "train_ript_pi0.py")}


@dataclass(frozen=True, kw_only=True)
class TrainingCall:
    """A call that starts a training of the original."""

    script: Path | None  # its Python file; None if it was called as a module
    overrides: tuple[str, ...]  # options in the words of Hydra
    config_name: str | None = None
    config_folder: Path | None = None
    ranks: int = 1


def write_programs(folder: Path, project: str, entry: str) -> None:
    """Make the programs; they run the module `entry` with the project, their name and their arguments."""
    for name in PROGRAMS:
        path = folder / name
        command = shlex.join([sys.executable, "-m", entry, project, name])
        path.write_text(f'#!/bin/sh\nexec {command} "$@"\n')
        path.chmod(0o755)


def real_program(program: str) -> list[str]:
    """The words that start the real program, of the environment that Understudy is in."""
    return [sys.executable, "-m", "torch.distributed.run"] if program == "torchrun" else [sys.executable]


def training_call(project: str, program: str, arguments: Sequence[str]) -> TrainingCall | None:
    """The call, if these are the arguments of one that trains."""
    ranks, rest = _of_torchrun(arguments) if program == "torchrun" else (1, list(arguments))
    while rest and rest[0].startswith("-") and rest[0] not in ("-m", "-c", "-"):  # options of Python, such as -u
        if rest.pop(0) in ("-X", "-W") and rest:
            rest.pop(0)
    if len(rest) > 1 and rest[0] == "-m" and rest[1] in MODULES[project]:
        return _call(None, rest[2:], ranks)
    if rest and Path(rest[0]).name in SCRIPTS[project]:
        return _call(Path(rest[0]), rest[1:], ranks)
    return None


def _call(script: Path | None, words: Sequence[str], ranks: int) -> TrainingCall:
    found: dict[str, str] = {}
    overrides: list[str] = []
    words = list(words)
    while words:
        word = words.pop(0)
        if not word.startswith("-"):
            overrides.append(word)
            continue
        name, equals, value = word.partition("=")
        if name not in ("--config-name", "-cn", "--config-path", "-cp", "--config-dir", "-cd"):
            raise UnderstudyError(f"{word}: is an option of Hydra that is not known here; leave it out")
        found[{"-cn": "--config-name", "-cp": "--config-path", "-cd": "--config-dir"}.get(name, name)] = (
            value if equals or not words else words.pop(0)
        )
    folder = found.get("--config-dir", found.get("--config-path"))
    beside = script.resolve().parent if script is not None else Path.cwd()
    return TrainingCall(
        script=script,
        overrides=tuple(overrides),
        config_name=found.get("--config-name"),
        config_folder=beside / (folder or "config"),
        ranks=ranks,
    )


def _of_torchrun(arguments: Sequence[str]) -> tuple[int, list[str]]:
    """The number of processes, and the words from the program on."""
    ranks, rest = 1, list(arguments)
    while rest and rest[0].startswith("-") and rest[0] != "-m":
        name, equals, value = rest.pop(0).replace("_", "-").partition("=")
        if name in _FLAGS:
            continue
        if not equals and rest:
            value = rest.pop(0)
        if name == "--nproc-per-node":
            if not value.isdigit():
                raise UnderstudyError(f"torchrun: --nproc_per_node: expected a number, got {value!r}")
            ranks = int(value)
        if name == "--nnodes" and value not in ("1", "1:1"):
            raise UnderstudyError(
                f"torchrun: --nnodes: a script starts the ranks of one machine here, got {value}; docs/ranks.md"
            )
    return ranks, rest


_FLAGS = ("--standalone", "--no-python", "--run-path", "--module")
