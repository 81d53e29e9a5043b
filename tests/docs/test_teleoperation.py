"""The code of docs/teleoperation.md is run as it stands, and its table has the keys that there are."""

import re
from pathlib import Path

import pytest
from tests.docs.pages import DOCS, run_page

from understudy.core import ArraySpec, Spec
from understudy.envs.teleop.axes import Axes
from understudy.envs.teleop.key_bindings import SPEEDS, KeyBindings

PAGE = DOCS / "teleoperation.md"


def test_the_code_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("websockets")
    monkeypatch.chdir(tmp_path)
    assert run_page(PAGE) == 1
    assert re.fullmatch(r"open http://127.0.0.1:\d+/\nTrue with 0 takeovers\n", capsys.readouterr().out)


def test_the_table_has_every_key() -> None:
    spec = Spec(ArraySpec(shape=(7,), dtype="float32"))
    described = KeyBindings.of(Axes.of(spec)).describe()
    rows = re.findall(r"^\| (.*?) \| (.*?) \|", PAGE.read_text(), re.MULTILINE)
    table = {re.sub(r", or .*", "", keys): does for keys, does in rows}
    for axis in described["axes"]:
        pair = f"{axis['more']['key'][-1]} {axis['less']['key'][-1]}"
        (does,) = (does for keys, does in table.items() if pair in keys or pair[::-1] in keys)
        assert axis["name"] in does
    assert "grip" in table[described["grip"][-1]]
    assert table[described["hold"].lower()]
    assert "succeeded" in table[described["success"]]
    assert "failed" in table[described["failure"]]
    assert table[" ".join(key[-1] for key in SPEEDS)]


def test_the_picture_is_small() -> None:
    assert (PAGE.parent / "images" / "teleop.png").stat().st_size < 300_000
