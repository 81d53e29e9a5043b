"""A run and a checkpoint of format 1 are refused in one sentence that says what to do."""

import shutil
from pathlib import Path

import pytest

from understudy.cli import main
from understudy.training.offpolicy.local_run import LocalRun
from understudy.training.runs.checkpoint import CheckpointError, newest_checkpoint, read_checkpoint
from understudy.training.runs.run import Run, RunError

GOLDEN = Path(__file__).parent / "run_format_1"  # written by commit 7d59133: config.json and one small checkpoint
SENTENCE = (
    "is a run of format 1, and this version of understudy reads format 2; start a new run, or resume this one with the "
    "version that wrote it"
)


@pytest.fixture
def golden(tmp_path: Path) -> Path:
    return Path(shutil.copytree(GOLDEN, tmp_path / "run"))


def test_a_run_of_format_1_is_refused(golden: Path) -> None:
    assert Run.is_at(golden)
    with pytest.raises(RunError) as refused:
        LocalRun(Run(golden))
    assert str(refused.value) == f"{golden}: {SENTENCE}"


def test_resume_says_the_same_and_changes_nothing(golden: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = {path: path.read_bytes() for path in golden.rglob("*") if path.is_file()}
    assert main(["resume", str(golden)]) != 0
    assert SENTENCE in " ".join(capsys.readouterr().err.split())
    assert {path: path.read_bytes() for path in golden.rglob("*") if path.is_file()} == before


def test_a_checkpoint_of_format_1_is_refused(golden: Path) -> None:
    newest = newest_checkpoint(golden / "checkpoints")
    assert newest is not None
    with pytest.raises(CheckpointError) as refused:
        read_checkpoint(newest)
    assert str(refused.value) == f"{newest}: {SENTENCE.replace('a run', 'a checkpoint')}"
