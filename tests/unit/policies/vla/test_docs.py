"""The code of docs/vla.md is run as it stands, and the page knows every option and metric."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

import pytest

pytest.importorskip("transformers")

from tests.docs.pages import DOCS, run_page

from understudy.algorithms.sft import SFTUpdateConfig
from understudy.policies.vla import VLAConfig
from understudy.training.onpolicy.sft import SFTConfig

PAGE = DOCS / "vla.md"


def test_the_code_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    assert run_page(PAGE) == 1
    shapes, same, metrics, version = capsys.readouterr().out.splitlines()
    assert (shapes, same, version) == ("(3, 4, 4) (3, 4, 4)", "True", "1")
    for name in re.findall(r"'(\w+)'", metrics):
        assert f"| `{name}` |" in PAGE.read_text()


@pytest.mark.parametrize("config", [SFTConfig, VLAConfig, SFTUpdateConfig])
def test_every_option_is_listed(config: type) -> None:
    rows = [row.split("|")[1] for row in PAGE.read_text().splitlines() if row.startswith("| `")]
    listed = {name for row in rows for name in re.findall(r"`(\w+)`", row)}
    assert {field.name for field in fields(config)} - listed == set()
