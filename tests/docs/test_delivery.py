"""The code of docs/delivery.md is run as it stands, against a real server at its usual address or one like it."""

from pathlib import Path

import pytest
from tests.docs.pages import DOCS, run_page

from understudy.replay import Store
from understudy.service import Server, ServerConfig

PAGE = DOCS / "delivery.md"


def test_the_code_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    with Store.open("my-store") as store, Server(store, ServerConfig(port=0)) as server:
        assert run_page(PAGE, server=server.address) == 4
    printed = capsys.readouterr().out
    assert "delivered=101" in printed
    assert "1 (4, 4) {'update': '500'}" in printed
