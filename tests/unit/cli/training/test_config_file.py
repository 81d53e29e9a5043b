"""`--config FILE`: options of every command that trains, from YAML or a run; and --env from the store."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tyro

pytest.importorskip("torch")

from understudy.cli import main
from understudy.cli.commands import COMMANDS, INIT, TRAIN
from understudy.cli.options import MARKERS, REGISTRY
from understudy.cli.training.config_file import PARAMETER, StoredEnv, read_config, with_config_file, with_default
from understudy.policies import Gripper
from understudy.training.offpolicy.rlpd import RLPDConfig
from understudy.training.runs.run import Run

TRAINS = {**{f"train {name}": command for name, command in TRAIN.items()}, "sft": COMMANDS["sft"]}
KINDS = {"train clone": "cloning"}


def parsed(function: Any, *args: str) -> Any:
    """The config that a command would get; the command itself does not run."""
    import inspect

    found = with_config_file(function, args)
    kind = inspect.signature(found).parameters["config"]
    return tyro.cli(type(kind.default), default=kind.default, args=_without(args), config=MARKERS, registry=REGISTRY)


def _without(args: tuple[str, ...]) -> list[str]:
    index = args.index("--config")
    return [*args[:index], *args[index + 2 :]]


@pytest.mark.parametrize("words", TRAINS)
def test_the_config_of_a_run_is_a_config_file_and_reloads_equal(words: str, tmp_path: Path) -> None:
    function = TRAINS[words].load()
    default = function.__defaults__[0]
    given = {"seed": 5, "threads": 2, **({"policy": "some/run"} if "policy" in vars(default) else {})}
    config = replace(default, **given, env="toy:touch_purple?cameras=false")
    kind = KINDS.get(words, words.split()[-1])
    run = Run.create(tmp_path / "run", kind, config)
    for path in (run.path, run.path / "config.json"):
        assert read_config(path, default) == config
        assert parsed(function, "--config", str(path)) == config
        assert parsed(function, "--config", str(path), "--seed", "6") == replace(config, seed=6)
    only = tmp_path / "only.yaml"  # the same without what a run adds, as a user would write it
    only.write_text(json.dumps(run.metadata["config"]))
    assert read_config(only, default) == config


def test_every_command_that_trains_has_the_option() -> None:
    for command in [*TRAINS.values(), *INIT.values()]:
        assert PARAMETER in command.load().__code__.co_varnames


def test_a_file_is_completed_with_defaults_and_the_command_line_goes_first(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(
        "env: toy\nsteps: 60\nn-step: 1\nsinks: [tensorboard]\n"
        "sac:\n  actor-lr: 1e-4\n  actor:\n    hidden: [16, 16]\n    gripper: {values: [-1, 1]}\n"
    )
    assert main(["init", "rlpd", str(tmp_path / "run"), "--config", str(file), "--sac.tau", "0.5", "--steps=70"]) == 0
    config = Run(tmp_path / "run").config(RLPDConfig)
    plain = RLPDConfig()
    actor = replace(plain.sac.actor, hidden=(16, 16), gripper=Gripper(values=(-1.0, 1.0)))
    assert config == RLPDConfig(
        env="toy",
        steps=70,
        n_step=1,
        sinks=("tensorboard",),
        sac=replace(plain.sac, actor_lr=1e-4, tau=0.5, actor=actor),
    )


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("stepz: 60", "mine.yaml: stepz: no such option; did you mean 'steps'?"),
        ("sac: {discuont: 0.9}", "mine.yaml: sac/discuont: no such option; did you mean 'discount'?"),
        ("sac: {tau: high}", "mine.yaml: sac/tau: expected float, got str 'high'"),
        ("steps: -1", "mine.yaml: steps: expected a number from 1, got -1"),
        ("[1, 2]", "mine.yaml: expected options as `name: value`, got [1, 2]"),
        ("steps: [", "mine.yaml: is not YAML (while parsing"),
        (None, "mine.yaml: No such file or directory; expected a YAML file, or a run"),
    ],
)
def test_mistakes_are_named(
    content: str | None,
    text: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    if content is not None:
        Path("mine.yaml").write_text(content)
    assert main(["train", "rlpd", "run", "--config", "mine.yaml"]) == 1
    assert text in capsys.readouterr().err
    assert not Path("run").exists()


def test_a_policy_that_must_be_given_may_stand_in_the_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("iterations: 2\n")
    with pytest.raises(SystemExit):
        main(["init", "grpo", str(tmp_path / "run"), "--config", str(file)])
    assert "--policy" in capsys.readouterr().err
    file.write_text("iterations: 2\npolicy: here\n")
    assert main(["init", "grpo", str(tmp_path / "run"), "--config", str(file)]) == 0
    assert Run(tmp_path / "run").metadata["config"]["policy"] == str(Path("here").resolve())


def test_a_copy_of_a_command_has_the_other_default() -> None:
    function = TRAINS["train clone"].load()
    other = replace(function.__defaults__[0], updates=3)
    assert with_default(function, other).__defaults__ == (other,)
    assert function.__defaults__[0].updates != 3


# ---- the world of the store

WORLD = "toy:touch_purple?cameras=false"


def record(store: Path, env: str = WORLD) -> None:
    assert main(["record", str(store), "--env", env, "--successes", "1"]) == 0


@pytest.mark.parametrize("kind", ["rlpd", "clone", "sft"])
def test_the_world_is_that_of_the_store(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record(tmp_path / "demos")
    assert main(["init", kind, str(tmp_path / "a"), "--demos", str(tmp_path / "demos")]) == 0
    assert f"env: {WORLD}, in which {tmp_path / 'demos'} was recorded; --env changes it" in capsys.readouterr().out
    assert Run(tmp_path / "a").metadata["config"]["env"] == WORLD
    assert main(["init", kind, str(tmp_path / "b"), "--demos", str(tmp_path / "demos"), "--env", "toy"]) == 0
    assert Run(tmp_path / "b").metadata["config"]["env"] == "toy"
    file = tmp_path / "mine.yaml"
    file.write_text("env: toy:pick_red\n")
    assert main(["init", kind, str(tmp_path / "c"), "--demos", str(tmp_path / "demos"), "--config", str(file)]) == 0
    assert Run(tmp_path / "c").metadata["config"]["env"] == "toy:pick_red"


def test_a_store_of_two_worlds_is_asked_about(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record(tmp_path / "run" / "store")
    record(tmp_path / "run" / "store", WORLD.replace("touch_purple", "push_blue"))
    assert main(["train", "clone", str(tmp_path / "run"), "--updates", "1"]) == 1
    assert "has demonstrations of 2 worlds" in capsys.readouterr().err
    assert not (tmp_path / "run" / "config.json").exists()


def test_training_uses_the_stores_world(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record(tmp_path / "run" / "store")
    small = ["--updates", "2", "--batch-size", "4", "--evaluation.episodes", "1"]
    assert main(["train", "clone", str(tmp_path / "run"), *small]) == 0
    assert Run(tmp_path / "run").metadata["config"]["env"] == WORLD
    assert type(StoredEnv("toy")) is StoredEnv


def test_training_without_demonstrations_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Those of the run that --config names stay there."""
    env = "toy:touch_purple?cameras=false"
    assert main(["record", str(tmp_path / "a" / "store"), "--env", env, "--successes", "1"]) == 0
    small = ["--steps", "30", "--start-steps", "5", "--batch-size", "4", "--n-step", "1", "--sac.actor.hidden", "8"]
    small += ["--evaluation.episodes", "1"]
    assert main(["train", "rlpd", str(tmp_path / "a"), *small, "--start-steps", "0"]) == 0
    assert "no demonstrations" not in capsys.readouterr().out
    assert main(["train", "rlpd", str(tmp_path / "b"), "--config", str(tmp_path / "a"), "--start-steps", "5"]) == 0
    said = capsys.readouterr().out
    assert f"no demonstrations: {tmp_path / 'b' / 'store'} has none" in said
    assert f"pass --demos {tmp_path / 'a' / 'store'} for those of {tmp_path / 'a'}" in said
    assert main(["train", "rlpd", str(tmp_path / "c"), "--env", env, *small]) == 0
    assert "or pass --demos" in capsys.readouterr().out
