"""A killed run comes to the same bits as one that was not; and three processes that are killed in turn go on."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from tests.system.train_process import ENV, small_config
from tests.waiting import wait_for

from understudy.cli import main
from understudy.replay import Reader, verify
from understudy.training.runs.checkpoint import newest_checkpoint
from understudy.training.runs.metrics import read_metrics
from understudy.training.runs.run import Run

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def demos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("demos") / "store"
    assert main(["record", str(path), "--env", ENV, "--successes", "4"]) == 0
    return path


def start(run: Path, demos: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "tests.system.train_process", str(run), str(demos)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def outcome(run: Path) -> tuple[bytes, list[dict[str, Any]]]:
    """The policy and all metrics but the speed; batches are in them by their digest."""
    lines = [{k: v for k, v in line.items() if k != "updates_per_s"} for line in read_metrics(run / "metrics.jsonl")]
    return (run / "policy.safetensors").read_bytes(), lines


@pytest.fixture(scope="module")
def undisturbed(demos: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, float]:
    path = tmp_path_factory.mktemp("undisturbed") / "run"
    began = time.monotonic()
    process = start(path, demos)
    process.communicate(timeout=240)
    assert process.returncode == 0
    return outcome(path), time.monotonic() - began


def killed_and_resumed(path: Path, demos: Path, rng: random.Random, whole_s: float) -> int:
    """Kill a run at random moments, at most three times, and let it end; returns how often it was killed."""
    for kills in range(4):
        goes_on = newest_checkpoint(path / "checkpoints") is not None  # else it was killed before the first
        process = start(path, demos)
        if kills < 3:
            try:
                process.wait(rng.uniform(0.2 * whole_s, whole_s))
            except subprocess.TimeoutExpired:
                process.send_signal(signal.SIGKILL)
        out, _ = process.communicate(timeout=240)
        if process.returncode == 0:
            assert ("samplers: batch" in out) == goes_on
            return kills
        assert process.returncode == -signal.SIGKILL, out
    raise AssertionError("it did not end")


def trials(number: int, seed: int, demos: Path, undisturbed: tuple[Any, float], tmp_path: Path) -> int:
    rng = random.Random(seed)
    wanted, whole_s = undisturbed
    kills = 0
    for trial in range(number):
        path = tmp_path / str(trial)
        kills += killed_and_resumed(path, demos, rng, whole_s)
        policy, lines = outcome(path)
        assert lines == wanted[1]
        assert policy == wanted[0]
        assert verify(path / "store").problems == []
    return kills


@pytest.mark.nightly  # test_local_run.py breaks runs off in every run
def test_a_killed_run_comes_to_the_same_bits(demos: Path, undisturbed: tuple[Any, float], tmp_path: Path) -> None:
    kills = 0
    for seed in range(5):
        kills += trials(1, seed, demos, undisturbed, tmp_path / str(seed))
        if kills:
            return
    raise AssertionError("no run was killed in time")


@pytest.mark.nightly
def test_twenty_killed_runs_come_to_the_same_bits(demos: Path, undisturbed: tuple[Any, float], tmp_path: Path) -> None:
    kills = trials(20, 1, demos, undisturbed, tmp_path)
    print(f"20 runs, {kills} kills, all equal")
    assert kills >= 20


# ---- three processes


def command(*arguments: str, log: Path) -> subprocess.Popen[bytes]:
    with log.open("ab") as out:
        return subprocess.Popen(
            [sys.executable, "-m", "understudy", *arguments],
            stdout=out,
            stderr=subprocess.STDOUT,
            env={**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "200"},
        )


def address_of(log: Path) -> str:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        for line in log.read_text().splitlines() if log.exists() else []:
            if line.startswith("serving"):
                return line.rpartition(" ")[2]
        time.sleep(0.1)
    raise AssertionError(log.read_text())


def test_actor_learner_and_server_are_killed_in_turn_and_go_on(demos: Path, tmp_path: Path) -> None:
    config = small_config(str(demos), steps=600, publish_every=20, max_pending_updates=200)
    run = Run.create(tmp_path / "run", "rlpd", config)
    server = command("serve", str(run.store), "--port", "0", log=tmp_path / "serve.log")
    address = address_of(tmp_path / "serve.log")
    port = address.rpartition(":")[2]

    def serve() -> subprocess.Popen[bytes]:
        return command("serve", str(run.store), "--port", port, log=tmp_path / "serve.log")

    def act() -> subprocess.Popen[bytes]:
        spool = str(tmp_path / "spool")
        return command("actor", str(run.path), address, "--spool", spool, log=tmp_path / "actor.log")

    def learn() -> subprocess.Popen[bytes]:
        return command("learner", str(run.path), address, log=tmp_path / "learner.log")

    roles = {"server": (server, serve), "actor": (act(), act), "learner": (learn(), learn)}
    try:
        for name in ("actor", "server", "learner"):
            before = num_steps(run)
            wait_for(lambda before=before: num_steps(run) > before + 30, every_s=0.1, logs=tmp_path)
            if name == "learner":  # that it goes on from what it has saved can be seen only once it has
                wait_for(lambda: list(run.checkpoints.glob("[0-9]*")), every_s=0.1, logs=tmp_path)
            process, again = roles[name]
            process.send_signal(signal.SIGKILL)
            process.wait()
            roles[name] = (again(), again)
        assert roles["learner"][0].wait(240) == 0, (tmp_path / "learner.log").read_text()
        assert roles["actor"][0].wait(60) == 0, (tmp_path / "actor.log").read_text()
    finally:
        for process, _ in roles.values():
            process.kill()
            process.wait()
    assert verify(run.store).problems == []
    assert "restored checkpoint" in (tmp_path / "learner.log").read_text()
    evaluations = list(read_metrics(run.metrics, "evaluation"))
    assert evaluations[-1]["step"] >= 600
    # The actor did not run ahead: it ran what max_pending_updates allows, and an episode more for each of its starts.
    assert evaluations[0]["step"] * 2 <= evaluations[0]["update"] + 50 * 2 + 200 + 4 * 200
    with Reader(run.store) as reader:
        records = list(reader.episodes())
        assert sum(record.num_steps for record in records) >= 600
        ended = [record for record in records if record.state == "ended"]
        assert len(ended) >= len(records) - 2  # only who was killed leaves one behind
        versions = [set(reader.read(record.id).policy_version.tolist()) for record in ended]
        assert all(len(found) == 1 for found in versions)
        assert len(set.union(*versions)) >= 3  # by chance at first, then the actor heard of new policies


def num_steps(run: Run) -> int:
    if not (run.store / "catalog.sqlite").exists():
        return 0
    with Reader(run.store) as reader:
        return sum(record.num_steps for record in reader.episodes())


def test_the_config_of_a_run_is_whole(tmp_path: Path) -> None:
    run = Run.create(tmp_path / "run", "rlpd", small_config(None))
    assert run.config(type(small_config(None))) == small_config(None)
    assert json.loads((run.path / "config.json").read_text())["config"]["sac"]["num_critics"] == 3
