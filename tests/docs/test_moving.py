"""The code of docs/moving.md is run as it stands."""

import re
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "moving.md"
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)


@pytest.mark.parametrize("number", range(len(BLOCKS)))
def test_the_code_runs(number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    exec(compile(BLOCKS[number], f"{PAGE.name} block {number}", "exec"), {})


def test_every_face_has_a_block() -> None:
    assert len(BLOCKS) == 3
