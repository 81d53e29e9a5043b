"""The code of docs/workers.md is run as it stands."""

import pytest
from tests.docs.pages import DOCS, run_page

PAGE = DOCS / "workers.md"


def test_the_code_runs(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_page(PAGE) == 2
    assert capsys.readouterr().out == "(8,) False False\nTrue\n"
