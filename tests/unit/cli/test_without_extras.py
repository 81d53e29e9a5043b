"""Commands where only the package itself is installed: they work, or say which package is missing."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import understudy as us

# The packages of all extras; the data commands of the README work without them.
PROGRAM = """
import sys
EXTRAS = set('''av fastapi grpc gymnasium h5py matplotlib mcap mujoco peft PIL prometheus_client pyarrow ray rosbags
simplejpeg tokenizers torch transformers uvicorn websockets yaml'''.split())
class Missing:
    def find_spec(self, name, path=None, target=None):
        package = name.partition(".")[0]
        if package in EXTRAS:
            raise ModuleNotFoundError(f"No module named {package!r}", name=package)
sys.meta_path.insert(0, Missing())
"""
LOAD_ALL = """
from understudy.cli.commands import COMMANDS
from understudy.core import UnderstudyError
def load(command):
    for each in command.subcommands.values():
        load(each)
    if command.function:
        try:
            command.load()
        except UnderstudyError as error:
            assert "not installed" in str(error), (command.function, error)
for command in COMMANDS.values():
    load(command)
"""
MAIN = "from understudy.cli import main; sys.exit(main(sys.argv[1:]))"


def run(program: str, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", PROGRAM + program, *words]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)


def test_every_command_is_there_or_says_what_is_missing() -> None:
    found = run(LOAD_ALL)
    assert (found.returncode, found.stderr) == (0, "")


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("without") / "store"
    state = us.Spec({"state": us.ArraySpec(shape=(2,), dtype="float32")})
    spec = us.StepSpec(observation=state, action=us.Spec(us.ArraySpec(shape=(1,), dtype="float32", low=-1, high=1)))
    with us.Store.open(path) as opened:
        writer = opened.writer("arm", spec)
        writer.begin(task="pick")
        writer.append(
            us.Step(
                observation=state.zero(),
                action=np.zeros(1, np.float32),
                reward=0.0,
                terminated=True,
                source=us.Source.POLICY,
            )
        )
        writer.end(state.zero(), success=True)
    return path


@pytest.mark.parametrize("command", [["info"], ["verify"], ["repair"], ["compact", "--yes"]])
def test_commands_of_a_store(command: list[str], store: Path) -> None:
    found = run(MAIN, *command, str(store))
    assert (found.returncode, found.stderr) == (0, ""), found


def test_serve_says_what_to_install(store: Path) -> None:
    found = run(MAIN, "serve", str(store))
    assert found.returncode == 1
    assert (
        "grpc: this package is needed and not installed; run `pip install 'understudy-robotics[remote]'`"
        in found.stdout + found.stderr
    )
