"""The code of docs/flow.md is run as it stands, and the page knows every option and metric."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

import pytest
from tests.docs.pages import DOCS, run_page

from understudy.policies import EncoderConfig
from understudy.policies.flow import FlowConfig
from understudy.recipes import load_recipe

PAGE = DOCS / "flow.md"


def test_the_code_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    assert run_page(PAGE) == 1
    shapes, same, start, metrics = capsys.readouterr().out.splitlines()
    assert (shapes, same, start) == ("(3, 4, 4) (3, 6, 4, 4) (3, 4, 5)", "True", "0.0")
    for name in re.findall(r"'(\w+)'", metrics):
        assert f"| `{name}` |" in PAGE.read_text()


@pytest.mark.parametrize("config", [FlowConfig, EncoderConfig])
def test_every_option_is_listed(config: type) -> None:
    rows = [row for row in PAGE.read_text().splitlines() if row.startswith("| `")]
    listed = {name for row in rows for name in re.findall(r"[`.](\w+)`", row)}
    assert {field.name for field in fields(config)} - listed == set()


def test_the_page_says_what_the_recipe_does() -> None:
    config = load_recipe("toy-flow").config
    said = f"--network flow --flow.block-steps {config.flow.block_steps} --updates {config.updates} --batch-size"
    assert f"{said} {config.batch_size}`" in PAGE.read_text()
