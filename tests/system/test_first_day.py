"""What a new user does on the first day works, one command after the other."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from tests import first_day

# The other parts are in every run as they stand in README.md, the guides and examples/.
QUICK = (first_day.look_around, first_day.record_and_look)


@pytest.mark.parametrize(
    "parts", [QUICK, pytest.param(first_day.PARTS, marks=pytest.mark.nightly)], ids=["some", "all"]
)
def test_the_first_day(parts: tuple[first_day.Part, ...], tmp_path: Path) -> None:
    day = first_day.Day(directory=tmp_path, python=Path(sys.executable), whole=False, installed=False)
    for part in parts:
        part(day)
