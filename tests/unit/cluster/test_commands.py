"""`--cluster` and `--cluster.*` on the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.unit.training.onpolicy.making import save_policy

from understudy.cli import main
from understudy.selftest.faulty_proxy import free_port
from understudy.training.runs.run import FORMAT

pytestmark = pytest.mark.xdist_group("ray")  # they share one Ray

SMALL = (
    "--policy",
    "start.safetensors",
    "--env",
    "tests.sides:SidesWorld?tasks=2",
    "--plan.data-batch-size",
    "16",
    "--plan.n-samples",
    "4",
    "--evaluation.episodes",
    "4",
    "--iterations",
    "1",
    "--filters.no-filter-accuracy",
)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    save_policy(tmp_path / "start.safetensors")
    return tmp_path


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (
            ("--cluster.rollout.num", "3"),
            "cluster: the options --cluster.* need a cluster; add `--cluster local`, or leave them out",
        ),
        (
            ("--cluster", "local", "--ranks", "2"),
            "on a cluster use --cluster.learner.num instead, got --ranks 2 too",
        ),
        (("--cluster", "local", "--cluster.learner.num", "2"), "engine.parallel: 'none' is for 1 process, got 2 ranks"),
        (("--cluster", "127.0.0.1:1"), "cluster: no Ray at '127.0.0.1:1'"),
    ],
)
def test_it_refuses(here: Path, capsys: pytest.CaptureFixture[str], options: tuple[str, ...], text: str) -> None:
    assert main(["train", "grpo", "run", *SMALL, *options]) == 1
    assert text in " ".join(capsys.readouterr().err.split())
    assert not (here / "run" / "config.json").exists()


def test_only_some_runs_can(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "run").mkdir()
    (here / "run" / "config.json").write_text(json.dumps({"format": FORMAT, "kind": "cloning", "config": {}}))
    assert main(["resume", "run", "--cluster", "local"]) == 1
    assert "cluster: a run of cloning has 1 process; leave --cluster out" in capsys.readouterr().err


@pytest.mark.parametrize("resumed", [False, pytest.param(True, marks=pytest.mark.nightly)])
def test_a_run_on_a_cluster(resumed: bool, here: Path, address: str, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "token").write_text("a token that is long enough")
    port = free_port("", count=2)
    options = (
        "--cluster.rollout.num",
        "1",
        "--cluster.shards.num",
        "2",
        "--cluster.shard-dir",
        str(here / "disks"),
        "--cluster.token-file",
        str(here / "token"),
        "--cluster.shards.port",
        str(port),
    )
    assert main(["train", "grpo", "run", *SMALL, "--cluster", address, *options]) == 0
    assert "of held-out episodes succeed" in capsys.readouterr().out
    assert sorted(path.name for path in (here / "disks" / "run").iterdir()) == ["shard-0", "shard-1"]
    if resumed:  # with the same options, and there is nothing left to do; test_offpolicy.py resumes in every run
        assert main(["resume", "run", "--cluster", address]) == 0
    status = json.loads((here / "run" / "cluster.json").read_text())
    assert status["config"]["shards"]["num"] == 2
    assert [shard["address"].rpartition(":")[2] for shard in status["shards"]] == [str(port), str(port + 1)]
    assert not (here / "run" / "token").exists()  # none is made if one is given
