"""The code of docs/rtc.md is run as it stands, and the page knows every option and its default."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import pytest
from tests.docs.pages import DOCS, run_page

from understudy.policies.rtc import RTCConfig

PAGE = DOCS / "rtc.md"


def test_the_code_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    assert run_page(PAGE) == 1
    assert capsys.readouterr().out == "[6, 10, 14, 18] 4\n"


def test_every_option_and_its_default_is_listed() -> None:
    rows = [row for row in PAGE.read_text().splitlines() if row.startswith("| `")]
    for field in fields(RTCConfig):
        (row,) = [row for row in rows if row.startswith(f"| `{field.name}` |")]
        if field.default is not None:
            shown = f"{field.default:g}" if isinstance(field.default, float) else f"`{field.default}`"
            assert f"| {shown} |" in row
