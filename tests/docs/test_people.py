"""The code of docs/people.md is run as it stands."""

import re
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "people.md"
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)


def test_the_code_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    (block,) = BLOCKS
    exec(compile(block, PAGE.name, "exec"), {})
    assert re.fullmatch(r"True \d+ steps by a human in 1 takeover\n", capsys.readouterr().out)
