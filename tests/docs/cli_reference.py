"""Writes docs/reference/cli.md from the commands themselves: `python -m tests.docs.cli_reference`."""

from __future__ import annotations

import argparse
import importlib
import re
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import tyro

from understudy.cli.commands import GROUPS, module_of
from understudy.cli.options import REGISTRY

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "cli.md"
HEAD = """# Commands

Made from the commands' own help by `python -m tests.docs.cli_reference`, which a test repeats and compares. In a
terminal, `understudy COMMAND --help` says the same.

Exit codes: 0 done, 1 it failed or found something wrong, 2 the command line makes no sense, 130 interrupted.
"""
DEFAULTS = {"": "", "None": "", "False": ""}  # that go without saying
MACHINE = {"--workers.num-parallel-envs": "as many as there are cores, at least 2"}  # defaults that are of the machine
MARKERS = (tyro.conf.FlagCreatePairsOff, tyro.conf.AvoidSubcommands)  # those of cli/main.py


def page() -> str:
    parts = [HEAD]
    for group, commands in GROUPS.items():
        parts.append(f"\n## {group.capitalize()}\n")
        parts += [_command(name, line) for name, line in commands.items()]
    return "".join(parts)


def _command(name: str, line: str) -> str:
    module = importlib.import_module(module_of(name))
    functions: dict[str, Callable[..., int]] | None = getattr(module, "COMMANDS", None)
    if functions is None:
        return _function(f"understudy {name}", module.command)
    whole = "".join(_function(f"understudy {name} {inner}", function) for inner, function in functions.items())
    return f"\n### understudy {name}\n\n{line}\n{whole.replace(chr(10) + '### ', chr(10) + '#### ')}"


def _function(title: str, function: Callable[..., int]) -> str:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # there is no other way to ask tyro
        parser = tyro.extras.get_parser(function, prog=title, config=MARKERS, registry=REGISTRY)
    text = (function.__doc__ or "").partition("Args:")[0]
    said = "\n\n".join(" ".join(paragraph.split()) for paragraph in text.split("\n\n") if paragraph.strip())
    rows = list(_rows(parser))
    table = "\n| | value | |\n|---|---|---|\n" + "".join(rows) if rows else ""
    return f"\n### {title}\n\n{_plain(said)}\n{table}"


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
        shown = f"`{value}`" if value else ""
        yield f"| `{name}` | {_cell(shown)} | {_cell(about)} |\n"


def _plain(text: str) -> str:
    """Words like RUN/store and <name> must not become Markdown."""
    return text.replace("<", "&lt;").replace("*", "\\*")


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    PAGE.parent.mkdir(parents=True, exist_ok=True)
    PAGE.write_text(page())
    print(PAGE)
