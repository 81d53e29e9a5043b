"""The code and the commands of the quick start, the guides and the page on metrics are run as they stand."""

from __future__ import annotations

import json
import re
import shlex
import sys
from pathlib import Path

import pytest
import torch
from tests.docs.pages import DOCS, blocks, run_page

from understudy.cli import main
from understudy.training.runs.health import Health

PAGES = ("quickstart.md", "reference/metrics.md", "guides/policy.md", "guides/simulator.md")


def commands(page: str) -> list[list[str]]:
    found = blocks((DOCS / page).read_text(), "bash")
    lines = [line.partition(" #")[0] for block in found for line in block.splitlines()]
    assert all(line.startswith("understudy ") for line in lines)
    return [shlex.split(line)[1:] for line in lines]


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def test_the_quick_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    asked = commands("quickstart.md")
    assert [words[0] for words in asked] == ["record", "train", "evaluate", "report", "info", "verify"]
    for words in asked:
        assert main(words) == 0, words
    capsys.readouterr()
    assert run_page(DOCS / "quickstart.md")
    assert capsys.readouterr().out == "5 demonstrations of press_button\n"
    assert (tmp_path / "runs" / "press" / "report" / "report.html").stat().st_size > 50_000


def test_a_policy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    assert run_page(DOCS / "guides/policy.md")
    score, batch = capsys.readouterr().out.splitlines()
    assert int(score.partition(" ")[0]) >= 90  # a hand-written policy that works
    assert batch == "(64, 20) 1"


def test_a_simulator(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])  # the commands find the current directory themselves
    (world,) = blocks((DOCS / "guides" / "simulator.md").read_text())
    (tmp_path / "line.py").write_text(world)
    try:
        for words in commands("guides/simulator.md"):
            assert main(words) == 0, words
    finally:
        sys.modules.pop("line", None)
    assert "100 % of 5" in capsys.readouterr().out


def test_health(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    assert run_page(DOCS / "reference/metrics.md")
    assert capsys.readouterr().out == "arm-1 running\n"


def test_every_field_of_health_is_explained(tmp_path: Path) -> None:
    with Health(tmp_path, role="a", name="b") as health:
        assert health.path is not None
        said = json.loads(health.path.read_text())
    text = (DOCS / "reference" / "metrics.md").read_text()
    assert [name for name in said if f"`{name}`" not in text] == []


def test_no_guide_has_code_that_is_not_run() -> None:
    for path in [*DOCS.glob("guides/*.md"), *DOCS.glob("reference/*.md"), DOCS / "operations.md", DOCS / "index.md"]:
        page = str(path.relative_to(DOCS))
        if page not in PAGES:
            assert not re.search(r"```(python|bash)", path.read_text()), page
