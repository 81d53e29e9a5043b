"""The call that trains is found among those of a script."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from understudy.compat.launch.programs import PROGRAMS, RIPT_VLA, SIMPLEVLA_RL, training_call, write_programs
from understudy.core import UnderstudyError


def test_simplevla_rl() -> None:
    call = training_call(SIMPLEVLA_RL, "python", ["-u", "-m", "verl.trainer.main_ppo", "data.n_samples=8", "+a=b"])
    assert call is not None
    assert call.overrides == ("data.n_samples=8", "+a=b")
    assert call.script is None


def test_options_of_python_are_passed_over() -> None:
    words = ["-u", "-X", "faulthandler", "-Wignore", "-W", "error", "-m", "verl.trainer.main_ppo", "a=1"]
    call = training_call(SIMPLEVLA_RL, "python3", words)
    assert call is not None
    assert call.overrides == ("a=1",)


def test_ript_vla(tmp_path: Path) -> None:
    script = tmp_path / "train_ript_openvla_oft.py"
    words = [
        "--nproc_per_node=4",
        "--master_port",
        "29500",
        "--standalone",
        str(script),
        "--config-name=it.yaml",
        "a=1",
    ]
    call = training_call(RIPT_VLA, "torchrun", words)
    assert call is not None
    assert (call.ranks, call.config_name, call.overrides) == (4, "it.yaml", ("a=1",))
    assert call.config_folder == tmp_path / "config"
    call = training_call(RIPT_VLA, "python", [str(script), "--config-name", "it", "--config-path", "../other"])
    assert call is not None
    assert (call.ranks, call.config_name, call.config_folder) == (1, "it", tmp_path / "../other")


@pytest.mark.parametrize(
    ("program", "words"),
    [
        ("python", ["-c", "import verl.trainer.main_ppo"]),
        ("python", ["-"]),
        ("python", ["-m", "pip", "list"]),
        ("python3", ["examples/prepare.py", "verl.trainer.main_ppo"]),
        ("torchrun", ["--nproc-per-node", "2", "other.py"]),
        ("torchrun", ["--standalone", "-m", "other"]),
        ("python", []),
    ],
)
def test_all_other_calls_are_left_alone(program: str, words: list[str]) -> None:
    assert training_call(SIMPLEVLA_RL, program, words) is None
    assert training_call(RIPT_VLA, program, words) is None


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--nproc_per_node=gpu", "train_ript_openvla_oft.py"], "--nproc_per_node: expected a number, got 'gpu'"),
        (["--nnodes=2", "train_ript_openvla_oft.py"], "--nnodes: a script starts the ranks of one machine here, got 2"),
        (["train_ript_openvla_oft.py", "--multirun"], "--multirun: is an option of Hydra that is not known here"),
    ],
)
def test_what_cannot_be_is_refused(words: list[str], text: str) -> None:
    with pytest.raises(UnderstudyError, match=text):
        training_call(RIPT_VLA, "torchrun", words)


def test_programs_get_the_project_their_name_and_their_arguments(tmp_path: Path) -> None:
    (tmp_path / "entry.py").write_text("import sys\nprint(sys.argv[1:])\n")
    (tmp_path / "bin").mkdir()
    write_programs(tmp_path / "bin", SIMPLEVLA_RL, "entry")
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    for name in PROGRAMS:
        done = subprocess.run(
            [tmp_path / "bin" / name, "-m", "a b"], env=env, capture_output=True, text=True, check=True
        )
        assert done.stdout == f"['simplevla-rl', '{name}', '-m', 'a b']\n"
