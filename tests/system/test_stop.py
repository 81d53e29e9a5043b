"""A run that is stopped loses no step and no correction, and comes to the same bits as one that was not stopped."""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.system.stop_process import signal_at
from tests.system.train_process import ENV, small_config
from tests.unit.training.onpolicy.making import TINY, make_config, save_policy
from tests.waiting import wait_for

from understudy.cli import main
from understudy.replay import Reader, verify
from understudy.training.distributed.config import EngineConfig
from understudy.training.offpolicy.cloning import CloningRunConfig
from understudy.training.offpolicy.rlpd import RLPDConfig
from understudy.training.onpolicy.config import OnPolicyConfig, TaskEvaluationConfig
from understudy.training.onpolicy.sft import SFTConfig
from understudy.training.runs.evaluate import EvaluationConfig
from understudy.training.runs.metrics import read_metrics
from understudy.training.runs.run import Run

CAMERAS = "toy:touch_purple?size=16"
TIMES = {
    "updates_per_s",
    "steps_per_s",
    "collect_s",
    "busy",
    "learn_s",
    "cpu_s",
    "save_s",
    "save_wait_s",
    "bytes_moved",  # between ranks: depends on which of them was free to run an episode
}  # measured, so they differ


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def demos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("demos") / "store"
    assert main(["record", str(path), "--env", ENV, "--successes", "4"]) == 0
    assert main(["record", str(path.parent / "cameras"), "--env", CAMERAS, "--successes", "2"]) == 0
    save_policy(path.parent / "policy.safetensors")
    return path


@dataclass(frozen=True)
class Kind:
    """A kind of run: how a new one is made."""

    name: str
    config: Callable[[Path], Any]

    def make(self, path: Path, demos: Path) -> None:
        Run.create(path, self.name, self.config(demos))


def rlpd_config(demos: Path) -> RLPDConfig:
    changes = {"steps": 130, "start_steps": 20, "eval_every": 60, "checkpoint_every": 10_000, "publish_every": 20}
    return small_config(str(demos), **changes, evaluation=EvaluationConfig(episodes=2))


def cloning_config(demos: Path) -> CloningRunConfig:
    return CloningRunConfig(
        env=ENV,
        demos=str(demos),
        updates=60,
        report_every=20,
        checkpoint_every=1000,
        batch_size=16,
        evaluation=EvaluationConfig(episodes=2),
    )


def sft_config(demos: Path) -> SFTConfig:
    return SFTConfig(
        env=CAMERAS,
        demos=str(demos.parent / "cameras"),
        updates=20,
        report_every=5,
        checkpoint_every=1000,
        batch_size=8,
        evaluation=TaskEvaluationConfig(episodes=4, sampling="sampled"),
        vla=replace(TINY, max_words=8),
    )


def on_policy_config(demos: Path, estimator: str) -> OnPolicyConfig:
    return make_config(
        demos.parent / "policy.safetensors",
        checkpoint_every=100,
        eval_every=2,
        plan={"wave_groups": 5},
        workers={"num_parallel_envs": 1},
        algorithm={"adv_estimator": estimator, "ppo_mini_batch_size": 6},
    )


KINDS = {
    "rlpd": Kind("rlpd", rlpd_config),
    "cloning": Kind("cloning", cloning_config),
    "sft": Kind("sft", sft_config),
    "grpo": Kind("grpo", lambda demos: on_policy_config(demos, "grpo")),
    "ppo": Kind("ppo", lambda demos: on_policy_config(demos, "gae")),
}


@dataclass(frozen=True)
class Outcome:
    """What a finished run has left behind."""

    policy: bytes
    lines: list[dict[str, Any]]
    episodes: list[tuple[int, int]]  # steps and human steps of each, sorted
    steps_lost: int  # steps that were set aside and run again
    corrections_lost: int  # of them, those by a human

    @staticmethod
    def of(run: Path) -> Outcome:
        lines = [{k: v for k, v in line.items() if k not in TIMES} for line in read_metrics(run / "metrics.jsonl")]
        episodes, lost = [], []
        if (run / "store").exists():
            assert verify(run / "store").problems == []
            with Reader(run / "store") as reader:
                for record in reader.episodes("deleted is null or deleted is not null"):
                    found = (record.num_steps, record.num_human)
                    (lost if record.deleted else episodes).append(found)
        steps, human = (sum(column) for column in zip(*lost, strict=True)) if lost else (0, 0)
        policy = (run / "policy.safetensors").read_bytes()
        return Outcome(policy=policy, lines=lines, episodes=sorted(episodes), steps_lost=steps, corrections_lost=human)


@pytest.fixture(scope="module")
def undisturbed(demos: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Outcome, int]]:
    """The outcome of a kind of run that nobody stops, and how many moments it has."""
    found: dict[str, tuple[Outcome, int]] = {}

    def run(name: str) -> tuple[Outcome, int]:
        if name not in found:
            path = tmp_path_factory.mktemp(name) / "run"
            KINDS[name].make(path, demos)
            with signal_at(0) as moments:
                assert main(["resume", str(path)]) == 0
            found[name] = Outcome.of(path), moments.count
        return found[name]

    return run


def stop_and_resume(kind: Kind, path: Path, demos: Path, moment: int, number: signal.Signals) -> float:
    """Stop a run at a moment and let it finish; returns the seconds from the signal to its end."""
    kind.make(path, demos)
    with signal_at(moment, number) as moments:
        assert main(["resume", str(path)]) == 128 + number
        assert moments.sent_at is not None
        took_s = time.monotonic() - moments.sent_at
    assert main(["resume", str(path)]) == 0
    return took_s


@pytest.mark.parametrize(("name", "share"), [("rlpd", 0.3), ("rlpd", 0.8), ("grpo", 0.4), ("grpo", 0.8)])
def test_a_stopped_run_loses_nothing_and_comes_to_the_same_bits(
    name: str,
    share: float,
    undisturbed: Callable[[str], tuple[Outcome, int]],
    demos: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    wanted, num_moments = undisturbed(name)
    number = signal.SIGINT if share < 0.5 else signal.SIGTERM
    stop_and_resume(KINDS[name], tmp_path / "run", demos, int(share * num_moments), number)
    out, err = capsys.readouterr()
    assert "stopping at the next safe moment" in err
    assert "stopped and saved at" in err
    assert f"`understudy resume {tmp_path / 'run'}` continues" in err
    assert "rolled back" not in out
    assert "lines of metrics" not in out
    assert Outcome.of(tmp_path / "run") == wanted


# ---- in full


@pytest.mark.nightly
@pytest.mark.parametrize("name", KINDS)
def test_twenty_random_moments(
    name: str, undisturbed: Callable[[str], tuple[Outcome, int]], demos: Path, tmp_path: Path
) -> None:
    wanted, num_moments = undisturbed(name)
    rng = random.Random(1)
    took, lost, corrections, equal = [], 0, 0, 0
    for trial in range(20):
        path = tmp_path / str(trial)
        number = rng.choice([signal.SIGINT, signal.SIGTERM])
        took.append(stop_and_resume(KINDS[name], path, demos, rng.randint(1, num_moments - 1), number))
        found = Outcome.of(path)
        lost, corrections = lost + found.steps_lost, corrections + found.corrections_lost
        equal += found == wanted
    print(f"{name}: 20 stops, {lost} steps lost, {corrections} corrections lost, {equal} of 20 equal, ", end="")
    print(f"{max(took):.2f} s at most from the signal to the end")
    assert (lost, corrections, equal) == (0, 0, 20)


class Command:
    """A command in a process of its own, which gets signals at random times."""

    def __init__(self, *words: str, log: Path):
        self._log = log
        with log.open("ab") as out:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "understudy", *words],
                stdout=out,
                stderr=subprocess.STDOUT,
                env={**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "200"},
            )

    def stop(self, number: signal.Signals) -> float:
        """Returns the seconds from the signal to the end."""
        began = time.monotonic()
        self.process.send_signal(number)
        assert self.process.wait(120) in (0, 128 + number, -number), self._log.read_text()  # -n: it had not begun
        return time.monotonic() - began


def started(run: Path) -> bool:
    return any((run / "checkpoints").glob("[0-9]*"))


@pytest.mark.nightly
@pytest.mark.parametrize("options", [["--ranks", "2"], ["--cluster", "local"]], ids=["ranks", "cluster"])
@pytest.mark.parametrize("name", ["grpo", "rlpd"])
def test_twenty_random_moments_of_processes(name: str, options: list[str], demos: Path, tmp_path: Path) -> None:
    """Ranks and clusters; the signal goes to the launcher or the driver."""
    if name == "rlpd" and options[0] == "--ranks":
        pytest.skip("RLPD has one process")
    if options[0] == "--cluster":
        pytest.importorskip("ray")
    kind = KINDS[name]
    if options[0] == "--ranks":
        kind = Kind(name, lambda demos: replace(KINDS[name].config(demos), engine=EngineConfig(parallel="ddp")))
    log = tmp_path / "log"

    def finish(path: Path) -> float:
        command = Command("resume", str(path), *options, log=log)
        wait_for(lambda: started(path) or command.process.poll() is not None, logs=tmp_path)
        began = time.monotonic()
        assert command.process.wait(600) == 0, log.read_text()
        return time.monotonic() - began

    kind.make(tmp_path / "undisturbed", demos)
    whole_s = finish(tmp_path / "undisturbed")
    wanted = Outcome.of(tmp_path / "undisturbed")
    rng = random.Random(1)
    took: list[float] = []
    equal = lost = 0
    for trial in range(20):
        path = tmp_path / str(trial)
        kind.make(path, demos)
        command = Command("resume", str(path), *options, log=log)
        wait_for(lambda path=path, command=command: started(path) or command.process.poll() is not None)  # type: ignore[misc]
        time.sleep(rng.uniform(0, whole_s))
        took.append(command.stop(rng.choice([signal.SIGINT, signal.SIGTERM])))
        finish(path)
        found = Outcome.of(path)
        lost += found.steps_lost
        equal += (found.policy, found.lines) == (wanted.policy, wanted.lines)
    print(f"{name} {' '.join(options)}: 20 stops, {lost} steps lost, {equal} of 20 equal, {max(took):.2f} s at most")
    assert (lost, equal) == (0, 20)


@pytest.mark.nightly
def test_twenty_random_moments_of_actor_and_learner(demos: Path, tmp_path: Path) -> None:
    """Each is stopped and started again ten times: all steps are in the store once, and no update is done twice."""
    config = small_config(str(demos), steps=2500, publish_every=20, max_pending_updates=400, eval_every=10_000)
    run = Run.create(tmp_path / "run", "rlpd", config)
    server = Command("serve", str(run.store), "--port", "0", log=tmp_path / "serve.log")
    wait_for(lambda: "serving" in (tmp_path / "serve.log").read_text(), logs=tmp_path)
    address = (tmp_path / "serve.log").read_text().split()[-1]
    words = {"actor": ["actor", str(run.path), address, "--spool", str(tmp_path / "spool")]}
    words["learner"] = ["learner", str(run.path), address]
    running = {role: Command(*words[role], log=tmp_path / f"{role}.log") for role in words}
    rng, took = random.Random(1), []
    begun = {"actor": 0, "learner": 0}

    def num_begun(role: str) -> int:
        """How many lines say that this role is at work: an actor's episodes, a learner's starts."""
        line = {"actor": r"^episode \d+", "learner": r"^torch uses"}[role]
        return len(re.findall(line, (tmp_path / f"{role}.log").read_text(), re.MULTILINE))

    try:
        for trial in range(20):
            role = ("actor", "learner")[trial % 2]
            log = tmp_path / f"{role}.log"
            wait_for(lambda: num_begun(role) > begun[role], logs=tmp_path)  # noqa: B023
            time.sleep(rng.uniform(0, 2))
            took.append(running[role].stop(rng.choice([signal.SIGINT, signal.SIGTERM])))
            begun[role] = num_begun(role)
            running[role] = Command(*words[role], log=log)
        assert running["learner"].process.wait(600) == 0, (tmp_path / "learner.log").read_text()
        assert running["actor"].process.wait(120) == 0, (tmp_path / "actor.log").read_text()
    finally:
        for command in (*running.values(), server):
            command.process.kill()
            command.process.wait()
    said = (tmp_path / "learner.log").read_text()
    saved = re.findall(r"stopped and saved at step [\d,]+ and update ([\d,]+)", said)
    restored = re.findall(r"after ([\d,]+) updates", said)
    acted = re.findall(r"in (\d+) steps, (\d+) by a human", (tmp_path / "actor.log").read_text())
    with Reader(run.store) as reader:
        records = list(reader.episodes("deleted is null"))
    stored = [(str(record.num_steps), str(record.num_human)) for record in records]
    lost = sum(int(steps) for steps, _ in acted) - sum(record.num_steps for record in records)
    corrections = sum(int(human) for _, human in acted) - sum(record.num_human for record in records)
    print(f"actor, learner: {len(took)} stops, {lost} steps lost, {corrections} corrections lost, ", end="")
    print(f"{max(took):.2f} s at most from the signal to the end")
    assert [number.replace(",", "") for number in saved] == restored[-len(saved) :]
    assert acted == stored
    assert list(read_metrics(run.metrics, "evaluation"))[-1]["update"] == config.num_updates
