"""`understudy train` and `evaluate`: their options, and what is left when they fail."""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import understudy as us
from understudy.cli import main

ENV = "toy:touch_purple?cameras=false"
SMALL = ["--cloning.actor.hidden", "8", "8", "--updates", "20", "--evaluation.episodes", "1", "--env", ENV]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    path = tmp_path_factory.mktemp("cloned") / "run"
    assert main(["record", str(path / "store"), "--env", ENV, "--successes", "2"]) == 0
    assert main(["train", "clone", str(path), *SMALL]) == 0
    return path


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["--env", "toyy"], "did you mean 'toy'"),
        (["--device", "nonsense"], "device: torch cannot use 'nonsense' here"),
        (["--demos", "nowhere"], "nowhere"),
        (["--evaluation.episodes", "0"], "episodes from 1"),
    ],
)
@pytest.mark.parametrize("kind", ["rlpd", "clone"])
def test_a_start_that_fails_leaves_no_run(
    kind: str,
    options: list[str],
    text: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["record", "run/store", "--env", ENV, "--successes", "1"]) == 0
    with contextlib.suppress(SystemExit):  # the options themselves may make no sense
        assert main(["train", kind, "run", "--env", ENV, *options]) == 1
    said = capsys.readouterr()
    assert text in (said.err + said.out).replace("\n", " ")
    assert not (tmp_path / "run" / "config.json").exists()


@pytest.mark.parametrize(
    "command",
    [["train", "rlpd", "a/b"], ["train", "rlpd", "a/b", "--env", "toyy"], ["train", "clone", "a/b"], ["sft", "a/b"]],
)
def test_a_refused_start_leaves_no_directory(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main([*command, "--demos", "nowhere"]) == 1
    assert list(tmp_path.iterdir()) == []


# ---- evaluate


def test_a_run_that_is_not_there_is_said_to_be_missing(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["evaluate", "runs/nope"]) == 1
    assert "runs/nope: there is no such run or policy file; check the path" in capsys.readouterr().err


def test_a_log_file_gets_lines_with_what_is_left(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("understudy.cli.progress.EVERY_S", 0.002)
    assert main(["record", str(tmp_path / "run/store"), "--env", ENV, "--successes", "20"]) == 0
    assert main(["train", "clone", str(tmp_path / "run"), *SMALL, "--updates", "60", "--threads", "1"]) == 0
    out = capsys.readouterr().out
    assert re.search(r"^record touch_purple: \d+ of 20 successes", out, re.MULTILINE)
    assert "torch uses 1 CPU thread: as asked by --threads\n" in out
    assert re.search(
        r"^cloning: \d+ of 60 updates \(\d+ %\), 0:0\d:\d\d so far, about 0:0\d:\d\d left", out, re.MULTILINE
    )


def result(run: Path, out: Path, *options: str) -> dict[str, Any]:
    assert main(["evaluate", str(run), "--out", str(out), "--episodes", "2", *options]) == 0
    found: dict[str, Any] = json.loads((out / "evaluation.json").read_text())
    return found


def test_every_option_of_evaluate_changes_something(run: Path, tmp_path: Path) -> None:
    base = result(run, tmp_path / "base")
    assert base["score"]["episodes"] == 2
    assert base == result(run, tmp_path / "again")
    assert [trial["start"] for trial in base["score"]["episode_results"]] == [400, 401]
    more = result(run, tmp_path / "more", "--episodes", "3")
    assert more["score"]["episodes"] == 3
    train = result(run, tmp_path / "train", "--split", "train")
    assert [trial["start"] for trial in train["score"]["episode_results"]] == [0, 1]
    other = result(run, tmp_path / "other", "--env", ENV.replace("touch_purple", "pick_red"))
    assert other["score"]["episode_results"][0]["task"] == "pick_red"
    assert other["fingerprint"]["env"] != base["fingerprint"]["env"]
    for options in (["--sampled"], ["--seed", "1"]):
        assert result(run, tmp_path / options[0], *options)["fingerprint"]["config"] != base["fingerprint"]["config"]
    assert main(["evaluate", str(run), "--episodes", "1"]) == 0
    assert (run / "evaluations" / "evaluation.json").exists()  # the default place


def test_a_score_says_what_it_measured_and_does_not_replace_another(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other_env = ENV.replace("touch_purple", "pick_red")
    first = result(run, tmp_path)
    assert f"world {ENV}\n" in capsys.readouterr().out
    other = result(run, tmp_path, "--env", other_env)
    assert f"world {other_env}\nthis policy was trained in {ENV}\n" in capsys.readouterr().out
    assert json.loads((tmp_path / "evaluation-1.json").read_text()) == first
    assert result(run, tmp_path, "--env", other_env) == other  # again the same: nothing to keep
    result(run, tmp_path)
    assert json.loads((tmp_path / "evaluation-2.json").read_text()) == other
    assert sorted(path.name for path in tmp_path.glob("*.json")) == [
        "evaluation-1.json",
        "evaluation-2.json",
        "evaluation.json",
    ]


def test_a_run_and_its_store_are_told_apart(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def error_of(*words: str) -> str:
        assert main([*map(str, words)]) == 1
        return " ".join(capsys.readouterr().err.split())

    run, store = tmp_path / "run", tmp_path / "run" / "store"
    assert main(["init", "sft", str(run), "--env", ENV]) == 0
    assert (
        error_of("resume", str(run))
        == f"error: {store}: has no demonstrations; run `understudy record {store} --env '{ENV}'`"
    )
    us.Store.open(store).close()
    assert error_of("info", str(run)) == f"error: {run}: is a run, not a store; its store is {store}"
    assert error_of("verify", str(run)) == f"error: {run}: is a run, not a store; its store is {store}"
    assert f"{run}: is a run, not a store" in error_of("train", "clone", str(tmp_path / "clone"), "--demos", str(run))
    assert error_of("resume", str(store)).startswith(f"error: {store}: is a store, not a run; `understudy init`")
    assert error_of("resume", str(tmp_path / "no")).startswith(
        f"error: {tmp_path / 'no'}: is not a run, there is no such"
    )


def test_sampled_actions_are_drawn_from_the_seed(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from understudy.cli.training import run_evaluation

    seen: list[Any] = []

    def spy(policy: Any, rng: Any, *, deterministic: bool, world: Any) -> Any:
        seen.append((deterministic, rng.bit_generator.state["state"]["state"]))
        return policy_act(policy, rng, deterministic=deterministic, world=world)

    policy_act = run_evaluation.policy_act  # type: ignore[attr-defined]
    monkeypatch.setattr(run_evaluation, "policy_act", spy)
    for number, options in enumerate(([], ["--sampled"], ["--sampled", "--seed", "1"])):
        result(run, tmp_path / str(number), *options)
    assert [deterministic for deterministic, _ in seen] == [True, False, False]
    assert seen[1][1] != seen[2][1]


def test_videos_are_written_where_there_are_cameras(tmp_path: Path) -> None:
    env = "toy:touch_purple?size=16"
    path = tmp_path / "run"
    assert main(["record", str(path / "store"), "--env", env, "--successes", "1"]) == 0
    options = ["--cloning.actor.encoder.inputs", "state", "--cloning.actor.hidden", "8", "8"]
    assert (
        main(["train", "clone", str(path), "--env", env, "--updates", "3", "--evaluation.episodes", "1", *options]) == 0
    )
    found = result(path, tmp_path / "out", "--videos", "1")
    (film,) = found["score"]["videos"]
    assert (tmp_path / "out" / film).stat().st_size > 1000


def test_a_policy_file_needs_a_world(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    policy = str(run / "policy.safetensors")
    assert main(["evaluate", policy]) == 1
    said = "expected the name of a world, because a policy file does not name one; pass --env, such as --env"
    assert said in capsys.readouterr().err.replace("\n", " ")
    assert main(["evaluate", policy, "--env", ENV, "--episodes", "1"]) == 0
    assert main(["evaluate", policy, "--env", "gym:Pendulum-v1?success_return=0", "--episodes", "1"]) == 1
    assert "observation" in capsys.readouterr().err


def test_a_policy_that_decides_at_each_step_cannot_act_asynchronously(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["evaluate", str(run), "--async-inference"]) == 1
    said = capsys.readouterr().err.replace("\n", " ")
    assert "async_inference: expected a policy that decides on blocks, got" in said


# ---- what is not installed


@pytest.mark.parametrize(
    "args",
    [
        ["train", "rlpd", "--help"],
        ["train", "grpo", "--help"],
        ["resume", "--help"],
        ["evaluate", "--help"],
        ["sft", "--help"],
    ],
)
def test_commands_that_many_use_need_no_transformers(args: list[str]) -> None:
    code = (
        "import sys; sys.modules |= dict.fromkeys(['transformers', 'peft', 'tokenizers'])\n"
        f"from understudy.cli import main; main({args!r})"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_checkpoint_without_transformers_says_what_to_install(tmp_path: Path) -> None:
    code = (
        "import sys; sys.modules |= dict.fromkeys(['transformers', 'peft', 'tokenizers'])\n"
        "from understudy.cli import main\n"
        f"sys.exit(main(['train', 'grpo', {str(tmp_path / 'run')!r}, '--policy', {str(tmp_path)!r}]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "pip install 'understudy-robotics[vla]'" in done.stderr


OWN_POLICY = """
import numpy as np

def still(observation):
    return np.zeros(4, np.float32)

def versioned(observation):
    return still(observation), 7

def short(observation):
    return np.zeros(2, np.float32)

number = 3
"""


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["own_policy:still"], 0, "0 % of 2"),
        (["own_policy:versioned", "--out", "out"], 0, "0 % of 2"),
        (
            ["own_policy:short"],
            1,
            "the action that the policy returned: expected float32 [4], got float32 [2]; convert",
        ),
        (["own_policy:number"], 1, "expected a function of an observation, got int 3"),
        (["own_policy:still", "--sampled"], 1, "a function of your own decides this itself"),
        (["own_policy:nothing"], 1, "own_policy.py has no 'nothing'"),
        (["nowhere:act"], 1, "there is no module 'nowhere', neither nowhere.py in /"),
    ],
)
def test_a_function_of_ones_own_is_scored(
    words: list[str],
    code: int,
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "own_policy.py").write_text(OWN_POLICY)
    try:
        assert main(["evaluate", *words, "--env", "toy:press_button?cameras=false", "--episodes", "2"]) == code
    finally:
        sys.modules.pop("own_policy", None)
    printed = capsys.readouterr()
    assert said in printed.out + printed.err
    if "out" in words:
        assert json.loads((tmp_path / "out" / "evaluation.json").read_text())["fingerprint"]["parameters"]
