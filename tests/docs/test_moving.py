"""The code of docs/moving.md is run as it stands."""

from pathlib import Path

import pytest
from tests.docs.pages import DOCS, blocks

PAGE = DOCS / "moving.md"
BLOCKS = blocks(PAGE.read_text())


@pytest.mark.parametrize("number", range(len(BLOCKS)))
def test_the_code_runs(number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    exec(compile(BLOCKS[number], f"{PAGE.name} block {number}", "exec"), {})


def test_every_face_has_a_block() -> None:
    assert len(BLOCKS) == 3
