"""Scripts in the calls of other projects run unedited: they are below scripts/ and import nothing of Understudy."""

from __future__ import annotations

import json
import os
import pickle
import runpy
import shlex
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.unit.training.onpolicy.making import save_policy
from tests.waiting import wait_for

from understudy.cli import main
from understudy.compat.original_modules import original_modules
from understudy.core import tree as trees
from understudy.policies.vla import VLAPolicy
from understudy.replay import Reader, verify
from understudy.selftest.faulty_proxy import free_port
from understudy.training.runs.metrics import read_metrics
from understudy.training.runs.run import Run

ROOT = Path(__file__).parents[2]
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


# ---- SimpleVLA-RL and RIPT-VLA: shell scripts

SIDES = "tests.sides:SidesWorld?tasks=2"


@pytest.mark.parametrize("script", [*SCRIPTS.glob("*.sh"), SCRIPTS / "ript_vla"], ids=lambda path: path.stem)
def test_shell_scripts_know_nothing_of_us(script: Path) -> None:
    files = [script] if script.is_file() else [path for path in script.rglob("*.*") if path.is_file()]
    text = "\n".join(path.read_text() for path in files)
    assert "understudy" not in text
    assert len([line for line in text.splitlines() if line.strip()]) >= 60


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_policy(tmp_path_factory.mktemp("policy") / "policy.safetensors")


def run_shell(*words: str | Path, cwd: Path) -> tuple[str, str]:
    command = [sys.executable, "-m", "understudy", "run-script", *map(str, words)]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)]), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr


def test_simplevla_rl_learns(policy: Path, tmp_path: Path) -> None:
    """From nothing: a policy that succeeds by chance comes to do what it is told. A second call goes on."""
    words = ("simplevla-rl", SCRIPTS / "simplevla_rl_train.sh", policy, SIDES, tmp_path)
    out, log = run_shell(*words, cwd=tmp_path)
    assert "Python 3 prepares sides_grpo\nchecked the environment\n" in out
    assert out.endswith("trained sides_grpo\n")
    assert "understudy: data.oversample_factor=1 changes nothing here: " in log
    assert "understudy train grpo " in log
    run = tmp_path / "SimpleVLA-RL" / "sides_grpo"
    first, *_, last = read_metrics(run / "metrics.jsonl", "evaluation")
    assert first["success"] < 0.6
    assert last["low"] > first["high"]
    weights = (run / "policy.safetensors").read_bytes()
    _, log = run_shell(*words, cwd=tmp_path)
    assert f"understudy resume {run}" in log
    assert (run / "policy.safetensors").read_bytes() == weights


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.nightly)])
def test_ript_vla_does_what_it_prints(ranks: int, policy: Path, tmp_path: Path) -> None:
    """The command that stands for a script of RIPT-VLA trains to the same weights; two ranks sum in another order."""
    _, log = run_shell("ript-vla", SCRIPTS / "ript_vla" / "train.sh", str(ranks), policy, tmp_path, cwd=tmp_path)
    assert "understudy: algo.scale_factor=2.0 changes nothing here: " in log
    run = tmp_path / "sides_train" / "bz_8"
    command = log[log.index("understudy train rloo") :].replace("\\\n", " ").splitlines()[0]
    _, train, kind, path, *options = shlex.split(command)
    assert path == str(run)
    if ranks > 1:
        assert options[-4:] == ["--engine.parallel", "ddp", "--ranks", str(ranks)]
        del options[-4:]
    assert main([train, kind, str(tmp_path / "again"), *options]) == 0
    first, found, wanted = (
        trees.flatten(VLAPolicy.load(path).parameters(), "")
        for path in (policy, run / "policy.safetensors", tmp_path / "again" / "policy.safetensors")
    )
    assert max(np.abs(found[name] - first[name]).max() for name in first) > 2e-3
    for name, value in wanted.items():
        np.testing.assert_allclose(found[name], value, rtol=0, atol=0 if ranks == 1 else 1e-4)


def test_a_script_that_is_stopped_saves_and_goes_on(policy: Path, tmp_path: Path) -> None:
    script, run = tmp_path / "long.sh", tmp_path / "run"
    script.write_text(
        "python -m verl.trainer.main_ppo data.task_suite_name='" + SIDES + f"' actor_rollout_ref.model.path={policy} "
        f"trainer.default_local_dir={run} data.train_batch_size=2 trainer.total_training_steps=200\n"
        "echo not reached; exit 5\n"
    )
    command = [sys.executable, "-m", "understudy", "run-script", "simplevla-rl", str(script)]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)]), "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, cwd=tmp_path, env=env, stdout=subprocess.PIPE, text=True) as process:
        wait_for(lambda: (run / "metrics.jsonl").exists() and len(list(read_metrics(run / "metrics.jsonl"))) > 2)
        process.send_signal(signal.SIGTERM)
        out, _ = process.communicate(timeout=60)
    assert process.returncode == 143
    assert "not reached" not in out
    assert list((run / "checkpoints").iterdir())
    Run(run).lock().close()  # the training has ended, and not only the shell around it


@pytest.mark.parametrize(
    ("project", "line", "text"),
    [
        ("simplevla-rl", "python -m verl.trainer.main_ppo data.n_sample=8", "did you mean 'data.n_samples'?"),
        ("ript-vla", "python train_ript_openvla_oft.py algo.lr=1", "--config-name: expected the name of a config"),
        ("ript-vla", "torchrun --nproc_per_node=1 train_ript_quest.py --config-name=it", "expected the folder with"),
    ],
)
def test_an_error_of_a_shell_script_is_one_sentence(project: str, line: str, text: str, tmp_path: Path) -> None:
    (tmp_path / "it.sh").write_text(f"{line}\n")
    command = [sys.executable, "-m", "understudy", "run-script", project, "it.sh"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith("error: ")
    assert text in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_a_shell_script_has_no_buffers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run-script", "simplevla-rl", str(tmp_path / "none.sh")]) == 1
    assert "none.sh: expected a shell script, got none" in capsys.readouterr().err
    (tmp_path / "it.sh").write_text("true\n")
    assert main(["run-script", "--store", str(tmp_path / "store"), "simplevla-rl", str(tmp_path / "it.sh")]) == 1
    assert "a script of simplevla-rl makes no buffers" in capsys.readouterr().err


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


def test_hil_serl_with_takeovers_a_kill_and_a_restart(tmp_path: Path) -> None:
    script = SCRIPTS / "hil_serl_train.py"
    with original_modules("hil-serl"):
        num_demos = demonstrations(tmp_path / "demos.pkl", runpy.run_path(str(script)))
    port = ("--port", str(free_port(count=2)))
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
    assert all(taken_over[:2])  # it cannot do it at first; the actor ends when it can

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
