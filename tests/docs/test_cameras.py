"""The code of docs/cameras.md runs as it stands."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.docs.pages import DOCS, run_page

from understudy.replay import Reader


def test_the_code_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    assert run_page(DOCS / "cameras.md") == 4
    for line in capsys.readouterr().out.splitlines():
        age, _, said = line.partition(" ")
        assert said == "nanoseconds old"
        assert int(age) > 0
    with Reader(tmp_path / "timed") as reader:
        episode = reader.read(1)
    assert [len(samples) for samples in episode.extras["samples"]["observation"]["joints"]] == [0, 0, 0]
    assert episode.observation["depth"].shape == (4, 480, 640)
