"""The code of docs/ranks.md is run as it stands; the program in it, in tests/system/test_ranks.py."""

import pytest
from tests.docs.pages import DOCS, run_page

PAGE = DOCS / "ranks.md"


def test_the_code_runs(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_page(PAGE) == 2
    assert capsys.readouterr().out == "['push' 'push' 'push'] 0\n"
