"""On-policy runs from the command line and as processes that are really killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.unit.training.onpolicy.killed import DURING
from tests.unit.training.onpolicy.making import make_config, save_policy

from understudy.cli import main
from understudy.policies.vla import VLAPolicy
from understudy.replay import Reader
from understudy.training.runs.fingerprint import digest_of_arrays
from understudy.training.runs.metrics import read_metrics
from understudy.training.runs.run import Run

ROOT = Path(__file__).parents[2]
TIMES = {"collect_s", "learn_s", "cpu_s", "save_s", "save_wait_s", "steps_per_s", "busy", "fingerprint"}
ITERATIONS = 3


def python(*args: object, cwd: Path) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "COLUMNS": "200"}
    return subprocess.run(
        [sys.executable, *map(str, args)], cwd=cwd, env=env, capture_output=True, text=True, timeout=300, check=False
    )


def lines(path: Path) -> list[dict[str, Any]]:
    found = read_metrics(path / "metrics.jsonl")
    return [{name: value for name, value in line.items() if name not in TIMES} for line in found]


def weights(path: Path) -> str:
    return digest_of_arrays(VLAPolicy.load(path / "policy.safetensors").parameters())


# ---- kill -9


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("killed")
    save_policy(found / "policy.safetensors")
    return found


def begin(path: Path, place: Path) -> Path:
    """With groups that are carried over, a value head and a reference: all that there is to save."""
    config = make_config(
        place / "policy.safetensors",
        iterations=ITERATIONS,
        plan={"wave_groups": 5},
        eval_every=1,
        algorithm={"adv_estimator": "gae", "kl_in": "loss", "kl_controller": "adaptive"},
    )
    return Run.create(path, "ppo", config).path


@pytest.fixture(scope="module")
def undisturbed(place: Path) -> Path:
    path = begin(place / "undisturbed", place)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(ROOT))  # its workers import tests
        resume(path)
    return path


def resume(path: Path) -> None:
    """In this process, because another one takes seconds to start."""
    threads = torch.get_num_threads()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")  # as in `killed`: sums in another order would be other bits
        assert main(["resume", str(path)]) == 0
    torch.set_num_threads(threads)


QUICK = [("update", 5), (DURING, 2)]
SLOW = [
    ("snapshot", 1),
    ("snapshot", 3),
    ("policy file", 2),
    ("collect", 40),
    ("rename", 2),
    ("evaluate", 6),
    ("write", 30),
    ("shards", 1),
    ("shards", 3),
    ("arrays", 6),
    ("policy", 4),
    ("policy", 1),
]


@pytest.mark.parametrize(
    ("where", "number"), [*QUICK, *(pytest.param(*place, marks=pytest.mark.nightly) for place in SLOW)]
)
def test_a_run_that_is_killed_anywhere_comes_to_the_same(
    where: str, number: int, tmp_path: Path, place: Path, undisturbed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))  # its workers import tests
    path = begin(tmp_path / "run", place)
    killed = python("-m", "tests.unit.training.onpolicy.killed", path, where, number, cwd=ROOT)
    assert killed.returncode == -signal.SIGKILL, f"it never came to {where}: {killed.stderr}"
    if where == DURING:
        left = sorted(one.name for one in (path / "checkpoints").iterdir())
        assert left == [".new-000000000001", "000000000000-0"]  # it was made without the write that had not ended
    resume(path)
    assert weights(path) == weights(undisturbed)
    assert lines(path) == lines(undisturbed)
    with Reader(path / "store") as one, Reader(undisturbed / "store") as other:
        mine, theirs = ([reader.read(r.id) for r in reader.episodes() if r.state == "ended"] for reader in (one, other))
    assert len(mine) == len(theirs)
    assert all(a.equals(b) for a, b in zip(mine, theirs, strict=True))


# ---- the commands


def test_the_whole_way_on_the_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    save_policy(tmp_path / "policy.safetensors")
    small = (
        "--policy",
        "policy.safetensors",
        "--env",
        "tests.sides:SidesWorld?tasks=2",
        "--plan.data-batch-size",
        "16",
        "--evaluation.episodes",
        "4",
        "--workers.num-parallel-envs",
        "2",
        "--algorithm.ppo-mini-batch-size",
        "16",
    )
    done = python("-m", "understudy", "train", "grpo", "grpo", *small, "--iterations", 1, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "of held-out episodes succeed" in done.stdout
    assert "sampled (held-out: starts of the eval split, which training never sees)" in done.stdout
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))  # its workers import tests
    for kind in ("rloo", "reinforce", "ppo"):
        assert main(["train", kind, kind, *small, "--iterations", "1"]) == 0
    assert len({weights(tmp_path / kind) for kind in ("grpo", "rloo", "reinforce", "ppo")}) == 4

    capsys.readouterr()
    assert main(["evaluate", "grpo", "--episodes", "6", "--sampled", "--workers", "1"]) == 0
    said = capsys.readouterr().out
    assert "left-0: " in said
    assert "right-1: " in said
    assert main(["train", "grpo", "grpo", *small]) == 1
    assert "grpo: already is a run; `understudy resume grpo` continues it" in capsys.readouterr().err
    assert main(["train", "ppo", "new", *small, "--algorithm.adv-estimator", "rloo"]) == 1
    assert "use `train rloo`" in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "new" / "config.json").exists()


@pytest.mark.nightly  # test_onpolicy_ranks.py compares ranks in every run
def test_ranks_on_the_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))  # ranks and workers import tests
    monkeypatch.setenv("COLUMNS", "200")
    save_policy(tmp_path / "policy.safetensors")
    small = (
        "--policy",
        "policy.safetensors",
        "--env",
        "tests.sides:SidesWorld?tasks=2",
        "--plan.data-batch-size",
        "16",
        "--evaluation.episodes",
        "4",
        "--workers.num-parallel-envs",
        "2",
        "--iterations",
        "1",
        "--filters.no-filter-accuracy",
    )
    words = ["train", "grpo", "two", *small, "--ranks", "2"]
    assert main(words) == 1
    assert "engine.parallel: 'none' is for 1 process, got 2 ranks" in capfd.readouterr().err
    assert main([*words, "--engine.parallel", "ddp", "--env", "toyy"]) == 1
    assert "did you mean 'toy'?" in capfd.readouterr().err
    assert not (tmp_path / "two" / "config.json").exists()
    assert main([*words, "--engine.parallel", "ddp"]) == 0
    assert (tmp_path / "two" / "stores" / "rank-1").is_dir()
    assert capfd.readouterr().out.count("of held-out episodes succeed") == 1
