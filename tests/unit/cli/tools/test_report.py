"""`understudy report`: what it writes and where, and what it says is missing."""

from __future__ import annotations

from pathlib import Path

import pytest

from understudy.cli import main
from understudy.training.offpolicy.rlpd import RLPDConfig
from understudy.training.runs.run import Run


def test_it_writes_to_the_run_or_elsewhere(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = Run.create(tmp_path / "run", "rlpd", RLPDConfig())
    assert main(["report", str(run.path)]) == 0
    assert (run.path / "report" / "report.html").exists()
    out = capsys.readouterr().out
    assert "no evaluation yet; the first comes after 2,000 steps" in out
    assert f"{run.path / 'report' / 'report.html'}, 0 figure files" in out
    assert main(["report", str(run.path), "--out", str(tmp_path / "elsewhere")]) == 0
    assert (tmp_path / "elsewhere" / "report.html").exists()


def test_it_refuses_in_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(tmp_path)]) == 1
    assert "is not a run, it has no config.json" in capsys.readouterr().err
    run = Run.create(tmp_path / "run", "rlpd", RLPDConfig())
    (tmp_path / "file").write_text("")
    assert main(["report", str(run.path), "--out", str(tmp_path / "file")]) == 1
    assert "cannot be written" in capsys.readouterr().err
