"""The code of docs/moving.md is run as it stands."""

from pathlib import Path

import pytest
from tests.docs.pages import DOCS, blocks

PAGE = DOCS / "moving.md"
BLOCKS = blocks(PAGE.read_text())


@pytest.mark.parametrize("number", range(len(BLOCKS)))
def test_the_code_runs(number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    patient = BLOCKS[number].replace("timeout_ms=3000", "timeout_ms=60_000")
    exec(compile(patient, f"{PAGE.name} block {number}", "exec"), {})


def test_every_face_has_a_block() -> None:
    assert len(BLOCKS) == 3
