"""The code of docs/people.md is run as it stands."""

import re
from pathlib import Path

import pytest
from tests.docs.pages import DOCS, run_page

PAGE = DOCS / "people.md"


def test_the_code_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    assert run_page(PAGE) == 1
    assert re.fullmatch(r"True \d+ steps by a human in 1 takeover\n", capsys.readouterr().out)
