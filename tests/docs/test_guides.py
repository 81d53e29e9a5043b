"""The code and the commands of the quick start, the guides and the page on metrics are run as they stand."""

from __future__ import annotations

import json
import re
import runpy
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tests.docs.pages import DOCS, blocks, run_page

from understudy.cli import main
from understudy.training.runs.health import Health

PAGES = (
    "quickstart.md",
    "reference/metrics.md",
    "guides/policy.md",
    "guides/simulator.md",
    "guides/own.md",
    "guides/from-rlinf.md",
    "guides/from-tf-agents.md",
)
MAX_LINES = 30  # of a file of the user's own
SHORT = {"400": "100", "1500": "80", "300": "60", "50": "5", "20": "3"}  # in every run, of steps, updates and episodes


def commands(page: str) -> list[list[str]]:
    found = blocks((DOCS / page).read_text(), "bash")
    lines = [line.partition(" #")[0] for block in found for line in block.splitlines()]
    assert all(line.startswith(("understudy ", "python ")) for line in lines)
    return [shlex.split(line)[line.startswith("understudy ") :] for line in lines]


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def test_the_quick_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    asked = commands("quickstart.md")
    assert [words[0] for words in asked] == ["record", "train", "evaluate", "report", "info", "verify"]
    for words in asked:
        assert main([SHORT.get(word, word) for word in words]) == 0, words
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


@pytest.fixture
def own_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The files of guides/own.md, whose first lines name them, in the current directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    names = []
    for block in blocks((DOCS / "guides" / "own.md").read_text()):
        title, _, text = block.partition("\n")
        names.append(title.removeprefix("# "))
        assert len(text.strip().splitlines()) <= MAX_LINES, title
        (tmp_path / names[-1]).write_text(text)
    yield names
    for name in names:
        sys.modules.pop(name.removesuffix(".py"), None)


@pytest.mark.parametrize("short", [True, pytest.param(False, marks=pytest.mark.nightly)])
def test_ones_own(short: bool, own_files: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("gymnasium")
    assert own_files == ["reach.py", "my_policy.py", "my_reward.py", "my_data.py"]
    scores = []
    for words in commands("guides/own.md"):
        words = [SHORT.get(word, word) if short else word for word in words]
        capsys.readouterr()
        if words[0] == "python":
            runpy.run_path(words[1], run_name="__main__")
        else:
            assert main(words) == 0, words
        printed = capsys.readouterr().out
        scores += [int(found) for found in re.findall(r"^(\d+) % of", printed, re.MULTILINE)]
    assert len(scores) == 5
    assert short or (scores[2] >= 60 and scores[3] >= 80), scores  # RLPD, and the policy in plain PyTorch
    assert "3 of 3" in printed  # the imported demonstrations


def test_a_buffer_of_rlinf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert run_page(DOCS / "guides/from-rlinf.md")
    saved = sorted(file.name for file in (tmp_path / "saved").iterdir())
    assert saved == ["metadata.json", "trajectory_0_.pt", "trajectory_index.json", "understudy.json"]


def test_a_table_of_reverb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    assert run_page(DOCS / "guides/from-tf-agents.md")
    assert capsys.readouterr().out == "(256, 2, 2) (256, 2) True\n"


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
