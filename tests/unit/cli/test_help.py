"""The help of every command: full sentences for every option, in less than a second."""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import tyro

import understudy
from understudy.cli.commands import COMMANDS, Command, all_functions
from understudy.cli.options import MARKERS, REGISTRY

FUNCTIONS = dict(all_functions())
HELP_CPU_S = 1.0


def options(function: Callable[..., int]) -> Iterator[tuple[str, str]]:
    """The name and the help text of each option, without what tyro adds."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # there is no other way to ask tyro
        parser: argparse.ArgumentParser = tyro.extras.get_parser(function, config=MARKERS, registry=REGISTRY)
    for action in parser._actions:
        if "--help" not in action.option_strings:
            text = " ".join(str(action.help or "").split())
            yield "/".join(action.option_strings) or action.dest, re.sub(r" ?\((required|default: .*)\)$", "", text)


def problem(text: str) -> str | None:
    if not re.match(r"[A-Z`]", text):
        return "does not begin with a capital"
    if not text.endswith("."):
        return "does not end with a full stop"
    return "has fewer than 4 words" if len(text.split()) < 4 else None


@pytest.mark.parametrize("words", FUNCTIONS)
def test_every_option_is_explained_in_a_sentence(words: str) -> None:
    function = FUNCTIONS[words].load()
    wrong = {name: f"{text!r} {why}" for name, text in options(function) if (why := problem(text))}
    assert wrong == {}


@pytest.mark.parametrize("words", FUNCTIONS)
def test_every_command_is_explained_in_a_sentence(words: str) -> None:
    text = (FUNCTIONS[words].load().__doc__ or "").partition("\n\n")[0]
    assert problem(" ".join(text.split())) is None


@pytest.mark.parametrize(("name", "command"), [*COMMANDS.items(), *FUNCTIONS.items()])
def test_every_line_of_the_list_is_a_sentence(name: str, command: Command) -> None:
    assert problem(command.help) is None
    assert len(command.help) <= 90


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Compiled modules are kept, as in an installed package."""
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    source = str(Path(understudy.__file__).parents[1])
    return {**kept, "PYTHONPATH": source, "PYTHONPYCACHEPREFIX": str(tmp_path_factory.mktemp("pycache"))}


def help_cpu_s(words: str, environment: dict[str, str]) -> float:
    process = subprocess.Popen(
        [sys.executable, "-m", "understudy", *words.split(), "--help"], stdout=subprocess.DEVNULL, env=environment
    )
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0
    return usage.ru_utime + usage.ru_stime


@pytest.mark.serial
@pytest.mark.parametrize("words", ["", *COMMANDS, *(words for words in FUNCTIONS if " " in words)])
def test_help_answers_within_a_second_of_cpu_time(words: str, environment: dict[str, str]) -> None:
    cpu_s = help_cpu_s(words, environment)
    if cpu_s >= HELP_CPU_S:  # it has compiled modules that no command before it has imported
        cpu_s = help_cpu_s(words, environment)
    print(f"{cpu_s:.2f} s")
    assert cpu_s < HELP_CPU_S
