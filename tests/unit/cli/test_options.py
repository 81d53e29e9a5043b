"""Options that are a small record or nothing: given as JSON, kept in the run, wrong ones explained."""

from __future__ import annotations

from pathlib import Path

import pytest

from understudy.cli import main

pytest.importorskip("torch")

from understudy.training.offpolicy.rlpd import RLPDConfig
from understudy.training.runs.run import Run

ENV = "toy:touch_purple?cameras=false"
SHORT = ("--env", ENV, "--steps", "30", "--evaluation.episodes", "1", "--batch-size", "8")


def test_a_gripper_is_given_as_json_and_used(tmp_path: Path) -> None:
    assert main(["record", str(tmp_path / "run" / "store"), "--env", ENV, "--successes", "1"]) == 0
    given = '{"values": [-1, 1], "epsilon": 0.1}'
    assert main(["train", "rlpd", str(tmp_path / "run"), *SHORT, "--sac.actor.gripper", given]) == 0
    gripper = Run(tmp_path / "run").config(RLPDConfig).sac.actor.gripper
    assert gripper is not None
    assert (gripper.values, gripper.element, gripper.epsilon) == ((-1.0, 1.0), -1, 0.1)
    assert "gripper_q" in (tmp_path / "run" / "metrics.jsonl").read_text()


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ('{"value": [-1, 1]}', "did you mean 'values'"),
        ('{"values": [1]}', "two or more"),
        ("open", "sac.actor.gripper"),
    ],
)
def test_a_wrong_one_is_explained(given: str, text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["train", "rlpd", str(tmp_path / "run"), *SHORT, "--sac.actor.gripper", given])
    said = capsys.readouterr()
    assert text in " ".join((said.out + said.err).replace("│", " ").split())
