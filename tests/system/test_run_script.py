"""Scripts in the calls of other projects run unedited: they are below scripts/ and import nothing of Understudy."""

from __future__ import annotations

import json
import os
import pickle
import runpy
import signal
import socket
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.waiting import wait_for

from understudy.cli import main
from understudy.compat.original_modules import original_modules
from understudy.replay import Reader, verify

SCRIPTS = Path(__file__).parent / "scripts"


@pytest.mark.parametrize("script", sorted(SCRIPTS.glob("*.py")), ids=lambda path: path.stem)
def test_they_know_nothing_of_us(script: Path) -> None:
    text = script.read_text()
    code = [line for line in text.rpartition('"""\n\n')[0].splitlines() + text.splitlines() if "import" in line]
    assert not [line for line in code if "understudy" in line]
    assert len([line for line in text.splitlines() if line.strip()]) >= 60


def run(*words: str) -> tuple[str, str]:
    """What a script prints and logs, in a process of its own: it need not close what it opens."""
    command = [sys.executable, "-m", "understudy", "run-script", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr


def test_tf_agents() -> None:
    out, _ = run("tf-agents", str(SCRIPTS / "tf_agents_rlds.py"), "9")
    assert "9 episodes, 30 transitions" in out


def test_rlinf(tmp_path: Path) -> None:
    out, log = run("rlinf", str(SCRIPTS / "rlinf_replay.py"), str(tmp_path))
    assert "'num_trajectories': 10, 'total_samples': 320" in out
    assert "understudy: TrajectoryReplayBuffer: cache_size=5 changes nothing here: " in log
    assert verify(tmp_path / "replay").problems == []


def test_what_follows_the_script_is_its_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "beside.py").write_text("NAME = 'beside'\n")
    script = tmp_path / "show.py"
    script.write_text("import sys, beside\nprint(sys.argv[1:], beside.NAME, __name__)\nsys.exit(3)\n")
    before = list(sys.argv), list(sys.path)
    with pytest.raises(SystemExit, match="3"):
        main(["run-script", "hil-serl", str(script), "--store", "mine", "--help", "-v"])
    assert capsys.readouterr().out == "['--store', 'mine', '--help', '-v'] beside __main__\n"
    assert (list(sys.argv), list(sys.path)) == before


def test_an_error_shows_the_line_of_the_script(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run-script", "rlinf", str(tmp_path / "none.py")]) == 1
    assert "none.py: expected a Python file, got none" in capsys.readouterr().err
    script = tmp_path / "wrong.py"
    script.write_text("from rlinf.data.replay_buffer import TrajectoryReplayBuffer\nTrajectoryReplayBuffer(cash=3)\n")
    assert main(["run-script", "rlinf", str(script)]) == 1
    error = capsys.readouterr().err
    assert error.startswith(f'Traceback (most recent call last):\n  File "{script}", line 2, in <module>\n')
    assert "there is no option 'cash'" in error


# ---- HIL-SERL: two processes


class Half:
    """The actor or the learner, in a process of its own."""

    def __init__(self, log: Path, *words: str):
        self.log = log
        with log.open("ab") as out:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "understudy", "run-script", *words],
                stdout=out,
                stderr=subprocess.STDOUT,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )

    def lines(self) -> list[Any]:
        return [json.loads(line) for line in self.log.read_text().splitlines() if line.startswith(("{", "["))]


def demonstrations(path: Path, script: dict[str, Any]) -> int:
    """Three successful episodes of the script's own expert, as HIL-SERL keeps them."""
    env, transitions = script["PointEnv"](seed=5), []
    for _ in range(3):
        (obs, _), ended = env.reset(), False
        while not ended:
            action = script["expert"](obs)
            next_obs, reward, ended, _, _ = env.step(action)
            transitions.append(
                {
                    "observations": obs,
                    "actions": action,
                    "next_observations": next_obs,
                    "rewards": reward,
                    "masks": 1.0 - ended,
                    "dones": ended,
                }
            )
            obs = next_obs
    path.write_bytes(pickle.dumps(transitions))
    return len(transitions)


def two_free_ports() -> int:
    """The first of two that follow each other."""
    while True:
        with socket.socket() as first, socket.socket() as second:
            first.bind(("127.0.0.1", 0))
            port = int(first.getsockname()[1])
            try:
                second.bind(("127.0.0.1", port + 1))
            except OSError:
                continue
            return port


def test_hil_serl_with_takeovers_a_kill_and_a_restart(tmp_path: Path) -> None:
    script = SCRIPTS / "hil_serl_train.py"
    with original_modules("hil-serl"):
        num_demos = demonstrations(tmp_path / "demos.pkl", runpy.run_path(str(script)))
    port = ("--port", str(two_free_ports()))
    store = tmp_path / "kept"
    options = ("--demo_path", str(tmp_path / "demos.pkl"), "--checkpoint_path", str(tmp_path))
    learn = ("--store", str(store), "hil-serl", str(script), "--learner", *port, *options)
    halves = [Half(tmp_path / "learner-1.log", *learn)]
    try:
        actor = Half(tmp_path / "actor.log", "hil-serl", str(script), "--actor", *port)
        halves.append(actor)
        wait_for(lambda: num_steps(store / "buffer-1") > 60, every_s=0.05, logs=tmp_path)
        halves[0].process.send_signal(signal.SIGKILL)
        halves[0].process.wait()
        learner = Half(tmp_path / "learner-2.log", *learn)
        halves.append(learner)
        assert actor.process.wait(240) == 0, actor.log.read_text()
        assert learner.process.wait(240) == 0, learner.log.read_text()
    finally:
        for half in halves:
            half.process.kill()
            half.process.wait()

    (results,) = actor.lines()
    assert all(success for success, _ in results)
    taken_over = [steps for _, steps in results]
    assert sum(taken_over[-10:]) < 0.2 * sum(taken_over[:10])  # it has learned

    begun, ended = learner.lines()
    assert begun["replay"] > 60  # what the killed one had acknowledged
    assert ended["demo"] == num_demos + sum(taken_over)  # demonstrations once, each takeover once
    steps = stored(store / "buffer-1")
    assert set(steps.values()) == {1}  # each step once, whatever was killed
    assert len(steps) == ended["replay"]
    assert [verify(store / name).problems for name in ("buffer-1", "buffer-2")] == [[], []]


def num_steps(store: Path) -> int:
    if not (store / "catalog.sqlite").exists():
        return 0
    with Reader(store) as reader:
        return sum(record.num_steps for record in reader.episodes())


def stored(store: Path) -> Counter[bytes]:
    """How often each transition is in a store; no two of the actor's are alike."""
    with Reader(store) as reader:
        episodes = [reader.read(record.id) for record in reader.episodes()]
    found: Counter[bytes] = Counter()
    for episode in episodes:
        states, actions = episode.columns()["observation/state"], episode.columns()["action"]
        found.update(
            np.concatenate([state.ravel(), action]).tobytes() for state, action in zip(states, actions, strict=False)
        )
    return found
