"""docs/howto.md: each answer is short and links on; its commands have the options that they name, its Python is run."""

from __future__ import annotations

import argparse
import re
import shlex
import warnings
from functools import cache
from pathlib import Path

import pytest
import torch
import tyro
from tests.docs.pages import DOCS, blocks, run_page

from understudy.cli.commands import COMMANDS
from understudy.cli.main import with_script_arguments
from understudy.cli.options import MARKERS, REGISTRY

PAGE = DOCS / "howto.md"
TEXT = PAGE.read_text()
MIN_QUESTIONS = 30
MAX_LINES = 8  # of an answer with commands


@cache
def parser_of(name: str, inner: str | None) -> argparse.ArgumentParser:
    command = COMMANDS[name] if inner is None else COMMANDS[name].subcommands[inner]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # there is no other way to ask tyro
        return tyro.extras.get_parser(command.load(), prog=name, config=MARKERS, registry=REGISTRY)


def check(line: str) -> None:
    """Parse a command as the command line does, without running it."""
    program, name, *rest = shlex.split(line)
    assert program == "understudy"
    inner = rest.pop(0) if COMMANDS[name].subcommands else None
    parser_of(name, inner).parse_args(with_script_arguments(rest) if COMMANDS[name].runs_script else rest)


def test_every_command_has_the_options_that_it_names() -> None:
    lines = [line for block in blocks(TEXT, "bash") for line in block.splitlines()]
    assert len(lines) >= MIN_QUESTIONS
    for line in lines:
        try:
            check(line)
        except SystemExit:
            pytest.fail(line)


def test_the_first_day_with_gpus_has_the_options_that_it_names() -> None:
    page = (DOCS / "gpus.md").read_text()
    (block,) = [one for one in blocks(page, "bash") if "doctor --gpu" in one]
    install, *lines = block.splitlines()
    assert install.startswith("pip install")
    assert len(lines) == len(re.findall(r"^\d+\. \*\*", page, re.MULTILINE)) - 1 == 9
    for line in lines:
        for one in line.split(" && "):
            try:
                check(one)
            except SystemExit:
                pytest.fail(one)


@pytest.mark.parametrize("line", ["understudy record demos --succeses 3", "understudy record demos --human mouse"])
def test_a_mistake_would_be_found(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        check(line)


def test_every_answer_is_short_and_leads_on() -> None:
    answers = re.split(r"^### ", TEXT, flags=re.MULTILINE)[1:]
    assert len(answers) >= MIN_QUESTIONS
    for answer in answers:
        title, _, body = answer.partition("\n")
        assert title.startswith("How do I "), title
        assert title.endswith("?"), title
        assert re.search(r"\]\([\w/-]+\.md", body), title
        lines = [line for line in re.sub(r"```python.*?```", "", body, flags=re.DOTALL).splitlines() if line.strip()]
        lines = [line for line in lines if not line.startswith(("```", "## "))]
        assert 1 <= len(lines) <= MAX_LINES, title


def test_the_python_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    torch.set_num_threads(1)
    assert run_page(PAGE) == 3
    printed = capsys.readouterr().out
    assert "steps of 2 episodes" in printed
    assert "(4,) of version 20" in printed
    assert printed.count("torch.Size([64, 4])") == 3
