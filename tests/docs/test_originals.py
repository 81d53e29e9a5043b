"""The page on the originals names tests and files that are there."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "originals.md").read_text()
SECTIONS = PAGE.split("\n## ")[1:]


def rows(section: str) -> list[list[str]]:
    table = [line for line in section.splitlines() if line.startswith("|")]
    return [
        [cell.strip() for cell in line.strip().removeprefix("|").removesuffix("|").split(" | ")] for line in table[2:]
    ]


@pytest.mark.parametrize("section", SECTIONS, ids=[section.splitlines()[0] for section in SECTIONS])
def test_every_row_has_a_test_that_is_there(section: str) -> None:
    (home,) = re.findall(r"directory are in `([^`]+)`", section.replace("\n", " "))
    before = ""
    assert rows(section)
    for row in rows(section):
        assert len(row) == 3, row
        named = re.findall(r"`([^`]+\.py)(?:::(\w+))?`", row[2])
        assert named or (row[2] == "the same" and before) or "[" in row[1], f"no test: {row}"
        before = row[2]
        for path, function in named:
            near = ROOT / "tests" / home / path
            file = near if near.is_file() else ROOT / "tests" / path
            assert file.is_file(), path
            assert not function or f"def {function}(" in file.read_text(), f"{path}::{function}"
