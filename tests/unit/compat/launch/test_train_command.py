"""TrainCommand: its words are understood by the command line."""

from __future__ import annotations

import shlex
from pathlib import Path

from understudy.compat.launch.train_command import TrainCommand, to_shell


def test_words() -> None:
    command = TrainCommand(
        kind="grpo",
        run=Path("runs/a b"),
        options={
            "policy": "p",
            "filters.filter_accuracy": False,
            "engine.gradient_checkpointing": True,
            "openvla.cameras": ("agentview", "wrist"),
            "algorithm.ppo_micro_batch_size": None,
        },
        ranks=2,
    )
    words = command.words({"policy": "", "filters.filter_accuracy": True})
    assert words == [
        *("train", "grpo", "runs/a b", "--policy", "p", "--filters.no-filter-accuracy"),
        *("--engine.gradient-checkpointing", "--openvla.cameras", "agentview", "wrist"),
        *("--algorithm.ppo-micro-batch-size", "None", "--ranks", "2"),
    ]
    assert command.resume_words() == ["resume", "runs/a b", "--ranks", "2"]
    shown = to_shell(["understudy", *words])
    assert shlex.split(shown.replace("\\\n", " ")) == ["understudy", *words]
    assert "\\\n    --openvla.cameras agentview wrist \\\n" in shown


def test_what_is_as_in_the_defaults_is_left_out() -> None:
    options = {"policy": "p", "openvla.cameras": ("a",), "engine.compile": None, "filters.filter_accuracy": True}
    command = TrainCommand(kind="grpo", run=Path("run"), options=options)
    defaults = {"openvla.cameras": ["a"], "engine.compile": None, "filters.filter_accuracy": True}
    assert command.words(defaults) == ["train", "grpo", "run", "--policy", "p"]


def test_a_score() -> None:
    command = TrainCommand(kind="evaluate", run=Path(), options={"policy": "p", "env": "toy", "split": "all"})
    assert command.words({}) == ["evaluate", "p", "--env", "toy", "--split", "all"]
