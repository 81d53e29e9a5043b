"""The code of docs/delivery.md is run as it stands, against a real server at its usual address or one like it."""

import re
from pathlib import Path

import pytest

from understudy.replay import Store
from understudy.service import Server, ServerConfig

PAGE = Path(__file__).parents[2] / "docs" / "delivery.md"
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)


def test_the_code_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    with Store.open("my-store") as store, Server(store, ServerConfig(port=0)) as server:
        for number, block in enumerate(BLOCKS):
            code = block.replace("127.0.0.1:7447", server.address)
            exec(compile(code, f"{PAGE.name} block {number}", "exec"), names)
    printed = capsys.readouterr().out
    assert "delivered=101" in printed
    assert "1 (4, 4) {'update': '500'}" in printed
    assert len(BLOCKS) == 4
