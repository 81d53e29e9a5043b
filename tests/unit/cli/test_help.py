"""The help of every command: full sentences for every option, in less than a second."""

from __future__ import annotations

import argparse
import json
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
from understudy.cli import main
from understudy.cli.commands import COMMANDS, Command, all_functions
from understudy.cli.long_help import LONG
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
    for group in parser._action_groups:
        if group.description:
            yield str(group.title), " ".join(group.description.split())


def problem(text: str) -> str | None:
    if not re.match(r"[A-Z`]", text):
        return "does not begin with a capital"
    if not text.endswith("."):
        return "does not end with a full stop"
    if re.search(r"noqa|type: ignore|fmt: skip", text):
        return "has a comment for a tool in it"
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


@pytest.mark.parametrize("columns", [60, 80])
@pytest.mark.parametrize(("words", "usage"), [("verify", "STORE"), ("record", "TARGET"), ("train clone", "RUN")])
def test_arguments_have_names_and_lines_fit(
    words: str, usage: str, columns: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    with pytest.raises(SystemExit, match="0"):
        main([*words.split(), "--help"])
    printed = re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().out)
    first, *lines = printed.splitlines()
    assert usage in first.split()
    assert max(len(line) for line in lines) <= columns
    about = " ".join(printed.split()).partition("positional arguments")[0].rstrip(" ╭─")
    text = (FUNCTIONS[words].load().__doc__ or "").partition("Args:")[0]
    assert about.endswith(" ".join(text.split()))


# ---- commands with hundreds of options


def printed_help(words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> str:
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit, match="0"):
        main(words.split())
    return capsys.readouterr().out


@pytest.mark.parametrize("words", ["train grpo", "train rlpd", "init toy", "evaluate", "improve"])
def test_long_help_is_shown_in_parts(
    words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    short, whole = (printed_help(f"{words} {word}", monkeypatch, capsys) for word in ("-h", "--help-all"))
    assert len(whole.splitlines()) > LONG > len(short.splitlines())
    assert f"`understudy {words} --help GROUP` prints those of one group" in " ".join(short.split())
    nested = {name for name in re.findall(r"^│ (--[\w.-]+)", whole, re.MULTILINE) if "." in name}
    assert nested
    for group in {name[2:].partition(".")[0] for name in nested}:
        assert re.search(rf"^  {group} +[A-Z]", short, re.MULTILINE), group
        part = printed_help(f"{words} --help {group}", monkeypatch, capsys)
        assert set(re.findall(r"^│ (--[\w.-]+)", part, re.MULTILINE)) == {
            name for name in nested if name[2:].partition(".")[0] == group
        }
    assert not any(f"│ {name} " in short for name in nested)


def test_help_that_is_short_or_has_no_frames_is_whole(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "More options" not in printed_help("verify --help", monkeypatch, capsys)
    with pytest.raises(SystemExit, match="2"):
        main(["verify", "--nothing", "--help"])  # what is wrong before it goes first, as without this
    assert "For full helptext, run understudy verify --help" in capsys.readouterr().err
    ascii_only = {**os.environ, "PYTHONIOENCODING": "ascii"}
    command = [sys.executable, "-m", "understudy", "train", "grpo", "--help"]
    out = subprocess.run(command, env=ascii_only, stdout=subprocess.PIPE, text=True, check=True).stdout
    assert "--cluster.shards.port" in out


# ---- how long it takes

LISTS = ["", *(name for name, command in COMMANDS.items() if command.subcommands)]  # these import no function

# Prints the CPU time of each command line in argv[1] and argv[2] as one list: the process's own until it forks, and
# that of the fork until it has ended. What every function imports is imported once and counted for each of them.
MEASURE = """
import json, os, resource, sys
from understudy.cli import main

def cpu_s(line):
    own = resource.getrusage(resource.RUSAGE_SELF)
    child = os.fork()
    if not child:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        sys.exit(main([*line.split(), "--help"]))
    _, status, usage = os.wait4(child, 0)
    assert status == 0, f"{line}: {status}"
    return sum(used.ru_utime + used.ru_stime for used in (own, usage))

lists, functions = (json.loads(text) for text in sys.argv[1:])
took = {line: cpu_s(line) for line in lists}
if functions:
    import tyro
    import understudy.core.errors
print(json.dumps(took | {line: cpu_s(line) for line in functions}))
"""


def measure(lists: list[str], functions: list[str]) -> dict[str, float]:
    """The CPU time of the help of each command, in seconds. Compiled modules are kept, as in an installed package."""
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    process = subprocess.run(
        [sys.executable, "-c", MEASURE, json.dumps(lists), json.dumps(functions)],
        env={**kept, "PYTHONPATH": str(Path(understudy.__file__).parents[1])},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    took: dict[str, float] = json.loads(process.stdout)
    return took


@pytest.fixture(scope="module")
def help_cpu_s() -> dict[str, float]:
    took = measure(LISTS, list(FUNCTIONS))
    slow = {line for line, cpu_s in took.items() if cpu_s >= HELP_CPU_S}
    if slow:  # they may have compiled modules that no command before them had imported
        took |= measure([line for line in LISTS if line in slow], [line for line in FUNCTIONS if line in slow])
    return took


def test_no_help_imports_torch() -> None:
    """Which takes seconds; the figures below are measured each night."""
    code = """if True:
        import contextlib, io, json, sys
        from understudy.cli import main
        for line in json.loads(sys.argv[1]):
            with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):
                main([*line.split(), "--help"])
            assert "torch" not in sys.modules, line
    """
    command = [sys.executable, "-c", code, json.dumps([*LISTS, *FUNCTIONS])]
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.serial
@pytest.mark.nightly
@pytest.mark.parametrize("words", [*LISTS, *FUNCTIONS])
def test_help_answers_within_a_second_of_cpu_time(words: str, help_cpu_s: dict[str, float]) -> None:
    print(f"{help_cpu_s[words]:.2f} s")
    assert help_cpu_s[words] < HELP_CPU_S
