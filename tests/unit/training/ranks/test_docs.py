"""The code of docs/ranks.md is run as it stands; the program in it, in tests/system/test_ranks.py."""

import re
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[4] / "docs" / "ranks.md"
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)


def test_the_code_runs(capsys: pytest.CaptureFixture[str]) -> None:
    names: dict[str, object] = {}
    for number, block in enumerate(BLOCKS):
        exec(compile(block, f"{PAGE.name} block {number}", "exec"), names)
    assert capsys.readouterr().out == "['push' 'push' 'push'] 0\n"
    assert len(BLOCKS) == 2
