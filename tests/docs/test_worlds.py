"""The code of docs/worlds.md is run as it stands; its example of a world is short and passes check_env."""

from pathlib import Path

import pytest
from tests.docs.pages import DOCS, blocks, run_page

from understudy.envs.toy import STATE_NAMES, TASKS

PAGE = DOCS / "worlds.md"


def test_the_code_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    assert run_page(PAGE) == 5
    printed = capsys.readouterr().out
    assert "stack the red block on the blue block\nsuccess: True" in printed
    assert "['pick_red', 'pick_blue', 'red_on_plate']\n[400, 401, 402]\n" in printed
    assert "Reach: 11 checks passed" in printed
    assert printed.count(": True") == 1 + len(TASKS)


def test_the_example_is_short() -> None:
    (example,) = (block for block in blocks(PAGE.read_text()) if "class Reach" in block)
    assert len(example.splitlines()) < 60


def test_the_page_knows_every_task() -> None:
    text = PAGE.read_text()
    assert all(f"`{name}`" in text for name in TASKS)
    assert f"`float32 [{len(STATE_NAMES)}]`" in text
    assert (PAGE.parent / "images" / "toy_table.png").stat().st_size < 60_000
