"""Writes docs/reference/cli.md from the commands themselves: `python -m tests.docs.cli_reference`."""

from __future__ import annotations

import argparse
import re
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import tyro

from understudy.cli.commands import GROUPS, Command
from understudy.cli.options import MARKERS, REGISTRY

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "cli.md"
HEAD = """# Commands

`understudy COMMAND --help` prints the same in a terminal. Of a command with hundreds of options it prints the first
ones, and the groups of the others: `--help GROUP` prints one group, such as `--help engine`, and `--help-all` all.

This page is generated from the commands themselves by `python -m tests.docs.cli_reference`, and a test checks that it
is up to date.

Exit codes: 0 success, 1 the command failed or found a problem, 2 the command line is not valid,
130 stopped by Ctrl-C, 143 by SIGTERM.
"""
DEFAULTS = {"": "", "None": "", "False": ""}  # not worth a word
MACHINE = {"--workers.num-parallel-envs": "the number of CPU cores, at least 2"}  # defaults that depend on the machine


def page() -> str:
    parts = [HEAD]
    for group, commands in GROUPS.items():
        parts.append(f"\n## {group.capitalize()}\n")
        parts += [_command(name, command) for name, command in commands.items()]
    return "".join(parts)


def _command(name: str, command: Command) -> str:
    if not command.subcommands:
        return _function(f"understudy {name}", command.load())
    sections = [_function(f"understudy {name} {inner}", one.load()) for inner, one in command.subcommands.items()]
    return f"\n### understudy {name}\n\n{command.help}\n" + "".join(
        section.replace("\n### ", "\n#### ") for section in sections
    )


def _function(title: str, function: Callable[..., int]) -> str:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # there is no other way to ask tyro
        parser = tyro.extras.get_parser(function, prog=title, config=MARKERS, registry=REGISTRY)
    text = (function.__doc__ or "").partition("Args:")[0]
    about = "\n\n".join(" ".join(paragraph.split()) for paragraph in text.split("\n\n") if paragraph.strip())
    rows = list(_rows(parser))
    table = "\n| Option | Value | Meaning |\n|---|---|---|\n" + "".join(rows) if rows else ""
    return f"\n### {title}\n\n{_plain(about)}\n{table}"


def _rows(parser: argparse.ArgumentParser) -> Iterator[str]:
    for action in parser._actions:
        if "--help" in action.option_strings:
            continue
        name = action.option_strings[-1] if action.option_strings else action.dest.upper()
        value = "" if action.metavar is None else str(action.metavar).replace("{None}|", "")
        about = _plain(" ".join(str(action.help or "").split()))
        if name in MACHINE:
            about = re.sub(r"\(default: .*\)$", f"(default: {MACHINE[name]})", about)
        about = re.sub(r"\(default: (.*)\)$", lambda found: DEFAULTS.get(found[1], f"Default: `{found[1]}`."), about)
        about = about.replace("(required)", "").strip()
        if re.search(r"(--|\.)no-", name):
            about = about.replace("Default: `True`.", "On by default; this option turns it off.")
        shown = f"`{value}`" if value else ""
        yield f"| `{name}` | {_cell(shown)} | {_cell(about)} |\n"


def _plain(text: str) -> str:
    """Text in which < and * are not Markdown."""
    return text.replace("<", "&lt;").replace("*", "\\*")


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    PAGE.parent.mkdir(parents=True, exist_ok=True)
    PAGE.write_text(page())
    print(PAGE)
