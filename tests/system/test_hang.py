"""An actor that hangs says where; a killed learner is gone; a server that stands still is silent, and all go on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tests.system.train_process import small_config
from tests.waiting import wait_for

from understudy.replay import verify
from understudy.training.runs.health import HEALTH, ProcessStatus, read_health
from understudy.training.runs.run import Run

ROOT = Path(__file__).resolve().parents[2]


def start(*arguments: object, log: Path) -> subprocess.Popen[bytes]:
    with log.open("ab") as out:
        return subprocess.Popen(
            [sys.executable, "-m", "understudy", *map(str, arguments)],
            stdout=out,
            stderr=subprocess.STDOUT,
            env={**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "200"},
            cwd=ROOT,
        )


@pytest.mark.nightly  # a long fault run; test_ranks.py has one that hangs in every run
def test_who_hangs_who_is_gone_and_who_is_silent(tmp_path: Path) -> None:
    hang = tmp_path / "hang"
    env = f"tests.system.hang_world:HangWorld?cameras=false&task=touch_purple&hang={hang}"
    config = small_config(None, env=env, steps=50_000, publish_every=20, updates_per_step=1, eval_every=50_000)
    run = Run.create(tmp_path / "run", "rlpd", config)

    def seen() -> dict[str, ProcessStatus]:
        found = [*read_health(run.path / HEALTH), *read_health(run.store / HEALTH)]
        return {str(one.content["role"]): one for one in found}

    def state(role: str) -> str:
        found = seen()
        return found[role].state if role in found else "not there"

    server = start("serve", run.store, "--port", "0", log=tmp_path / "serve.log")
    processes = [server]
    try:
        wait_for(lambda: state("server") == "running" and "address" in seen()["server"].content, logs=tmp_path)
        address = seen()["server"].content["address"]
        actor = start(
            "actor",
            run.path,
            address,
            "--name",
            "arm-1",
            "--hz",
            "50",
            "--spool",
            tmp_path / "spool",
            "--page",
            "127.0.0.1:0",
            log=tmp_path / "actor.log",
        )
        learner = start("learner", run.path, address, log=tmp_path / "learner.log")
        processes += [actor, learner]
        wait_for(lambda: "learner" in seen() and (seen()["learner"].content["policy_version"] or 0) > 1, logs=tmp_path)
        wait_for(lambda: seen()["actor"].content["page"] is not None, logs=tmp_path)
        assert seen()["actor"].content["page"].startswith("http://127.0.0.1:")

        hang.touch()
        wait_for(lambda: state("actor") == "stuck", logs=tmp_path)
        stack = seen()["actor"].content["stack"]
        assert "in wait_for_the_arm" in stack  # where it hangs
        assert "while self._hang.exists()" in stack or "time.sleep(0.05)" in stack  # the very line
        assert "in run_actor" in stack  # and how it came there
        wait_for(lambda: seen()["learner"].content["doing"] == "waiting for steps", logs=tmp_path)
        assert (state("learner"), state("server")) == ("running", "running")  # who waits does not hang
        hang.unlink()
        wait_for(lambda: state("actor") == "running", logs=tmp_path)
        assert seen()["actor"].content["stack"] is None

        learner.kill()
        learner.wait()
        assert state("learner") == "gone"

        server.send_signal(signal.SIGSTOP)
        wait_for(lambda: state("server") == "silent", logs=tmp_path)
        wait_for(lambda: seen()["actor"].content["spool_bytes"] > 0, logs=tmp_path)
        assert state("actor") == "running"
        server.send_signal(signal.SIGCONT)
        wait_for(lambda: state("server") == "running", logs=tmp_path)
        wait_for(lambda: seen()["actor"].content["delivery"]["connected"], logs=tmp_path)
        (writer,) = seen()["server"].content["writers"]
        assert (writer["writer"], writer["streams"] >= 1, writer["seq"] > 0) == ("arm-1", True, True)

        for process in (actor, server):
            process.send_signal(signal.SIGINT)
            process.wait(60)
        assert (state("actor"), state("server")) == ("ended", "ended")
    finally:
        for process in processes:
            process.kill()  # also one that is stopped
            process.wait()
    assert verify(run.store).problems == []
