"""`understudy plan`: what it reads, prints and answers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from tests.unit.training.onpolicy.making import make_config, save_policy

from understudy.cli import main
from understudy.training.runs.run import Run

SMALL = ("--assume.episode-steps", "12")


@pytest.fixture
def run(tmp_path: Path) -> Path:
    config = make_config(save_policy(tmp_path / "policy.safetensors"))
    return Run.create(tmp_path / "run", "grpo", config).path


def test_a_run_that_fits(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(run), "--gpus", "1xA100-80GB", *SMALL]) == 0
    out = capsys.readouterr().out
    assert "it fits: 5." in out
    assert "bottleneck: collection, which waits for worlds" in out
    assert "- episodes have 12 steps of 25 ms" in out
    assert main(["plan", str(run), "--gpus", "1xA100-80GB", *SMALL, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["fits"]
    assert found["optimizer_steps"] == 8  # 64 rows in mini batches of 16, twice
    assert found["iteration_s"] == pytest.approx(sum(one["seconds"] for one in found["phases"].values()))
    assert found["gpu_hours"] == pytest.approx(found["run_s"] / 3600)


def test_a_run_that_collects_while_it_learns(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    note = "collection goes on during the other phases"
    for max_lag in (0, 1):
        config = make_config(save_policy(tmp_path / "policy.safetensors"), max_lag=max_lag)
        run = Run.create(tmp_path / f"run-{max_lag}", "grpo", config).path
        assert main(["plan", str(run), "--gpus", "1xA100-80GB", *SMALL]) == 0
        assert (note in " ".join(capsys.readouterr().out.split())) == bool(max_lag)


def test_a_run_that_does_not_fit(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    speed = ("--speed.tflops", "1", "--speed.bandwidth-gb-s", "1", "--speed.link-gb-s", "1")
    assert main(["plan", str(run), "--gpus", "1x1GB", *speed, *SMALL]) == 1
    out = capsys.readouterr().out
    assert "it does not fit: 1.1 of 1.0 GiB" in out
    assert "nothing that was tried makes it fit" in out


def test_a_file_of_options(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(f"policy: {tmp_path / 'policy.safetensors'}\nmax_steps: 12\nplan: {{data_batch_size: 32}}\n")
    assert main(["plan", str(file), "--gpus", "1xA100-80GB", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["episodes"] == 32


@pytest.mark.nightly  # a network of 7B parameters is half a minute of work
def test_the_recipe_with_the_sizes_of_simplevla_rl(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "libero-openvla-grpo", "--gpus", "8xA800-80GB", "--network", "openvla-7b", "--json"]
    assert main(words) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["episodes"], found["optimizer_steps"], found["micro_batch_rows"]) == (512, 4, 8)
    assert (found["peak_bytes"] + found["reserve_bytes"]) / 2**30 == pytest.approx(30.3, abs=0.05)  # as in docs/gpus.md


@pytest.mark.parametrize(
    ("args", "error"),
    [
        (["RUN", "--gpus", "8xA10-80GB"], "did you mean 'A100-80GB'?"),
        (["RUN", "--gpus", "8xA100-80GB"], "'none' is for 1 process, and there are 8 GPUs; use ddp or fsdp"),
        (["RUN", "--gpus", "here"], "torch sees no GPU on this machine"),
        (["toy", "--gpus", "1xA100-80GB"], "plan knows runs of grpo, rloo, reinforce, ppo, got one of rlpd"),
        (["toy-vla-grp", "--gpus", "1xA100-80GB"], "did you mean 'toy-vla-grpo'?"),
        (["toy-vla-grpo", "--gpus", "1xA100-80GB"], "is not on this machine; if it is a published OpenVLA"),
    ],
)
def test_what_it_refuses(
    run: Path,
    args: list[str],
    error: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["plan", *[str(run) if word == "RUN" else word for word in args], *SMALL]) == 1
    assert error in capsys.readouterr().err
