"""Workers as a whole: under faults for some seconds, against bare processes, and in another virtual environment."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import venv
from pathlib import Path

import numpy as np
import pytest
from benchmarks.workers import FAULTS, FaultRun, compare, throughput

from understudy.core import tree as trees
from understudy.envs.check import check_env
from understudy.envs.toy import ToyTable
from understudy.envs.workers.isolated import IsolatedWorld
from understudy.envs.world_factory import WorldFactory

TOY = "understudy.envs.toy:ToyTable"


@pytest.mark.nightly  # a long fault run; test_collector.py breaks workers in every run
def test_of_eight_workers_one_breaks_every_moment_and_every_promise_is_kept() -> None:
    summary = FaultRun(seconds=8.0, num_workers=8, every_s=0.5, seed=1).run()
    print(json.dumps(summary))
    assert summary["problems"] == []
    assert summary["num_faults"] > 3
    assert min(summary["slot_steps"]) > 0
    assert set(summary["faults"]) <= set(FAULTS)


def test_the_toy_table_gives_the_same_bits_in_a_worker() -> None:
    here = ToyTable(size=32)
    rng = np.random.default_rng(0)
    with IsolatedWorld(WorldFactory(factory=TOY, options={"size": 32})) as there:
        for seed in range(2):
            (seen, info), (wanted, wanted_info) = (world.reset(seed=seed) for world in (there, here))
            assert trees.equal(seen, wanted)
            assert info == wanted_info
            for _ in range(20):
                action = rng.uniform(-1, 1, 4).astype(np.float32)
                seen, *rest = there.step(action)
                wanted, *wanted_rest = here.step(action)
                assert trees.equal(seen, wanted)
                assert rest == wanted_rest
                if any(rest[1:3]):
                    break


def test_an_isolated_world_keeps_the_contract_of_worlds() -> None:
    report = check_env(lambda: IsolatedWorld(WorldFactory(factory=TOY, options={"size": 16})), episodes=1)
    assert "passed" in str(report)


def test_the_study_of_throughput_leaves_its_figures(tmp_path: Path) -> None:
    throughput(workers=1, seconds=0.1, rounds=1, blocks=(4,), out=tmp_path)
    rows = json.loads((tmp_path / "benchmarks" / "workers_throughput.json").read_text())["rows"]
    assert [row["block_steps"] for row in rows] == [4, 4, 4]
    assert all(row["steps_per_s"] > 0 and row["caller_cpu_s"] > 0 for row in rows)


@pytest.mark.nightly
@pytest.mark.serial
def test_a_round_trip_costs_little_beside_a_step_with_images() -> None:
    """The promise is 0.85 (benchmarks/workers.py); a loaded machine gets some room."""
    source = WorldFactory(factory=TOY, options={"size": 128})
    figures = compare(source, num_workers=4, block_steps=4, seconds=0.4, rounds=4)
    assert max(figures["ratio"], figures["cpu_ratio"]) > 0.7


SEEN_FROM_THERE = """
import json, sys
from understudy.envs.toy import ToyTable
class Telling(ToyTable):
    def advance(self, action):
        *rest, info = super().advance(action)
        return *rest, {**info, "prefix": sys.prefix, "modules": sorted(sys.modules)}
"""


@pytest.fixture(scope="module")
def other_python(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The interpreter of a new virtual environment that holds numpy and nothing else."""
    home = tmp_path_factory.mktemp("other")
    venv.create(home / "venv", with_pip=False)
    python = home / "venv" / "bin" / "python"
    found = subprocess.run(
        [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
        capture_output=True,
        text=True,
        check=True,
    )
    numpy = Path(np.__file__).parent
    for folder in (numpy, numpy.with_name("numpy.libs")):
        if folder.exists():
            (Path(found.stdout.strip()) / folder.name).symlink_to(folder)
    return str(python)


def test_a_worker_lives_in_a_virtual_environment_of_its_own(other_python: str, tmp_path: Path) -> None:
    variables = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    for missing in ("understudy", "safetensors", "xxhash"):
        done = subprocess.run(
            [other_python, "-c", f"import {missing}"], capture_output=True, cwd=tmp_path, env=variables, check=False
        )
        assert done.returncode == 1, f"{missing} is there, so this test shows nothing"
    (tmp_path / "telling.py").write_text(SEEN_FROM_THERE)
    source = WorldFactory(
        factory="telling:Telling", options={"size": 16}, python=other_python, env={"PYTHONPATH": str(tmp_path)}
    )
    here = ToyTable(size=16)
    with IsolatedWorld(source) as there:
        assert trees.equal(there.reset(seed=3)[0], here.reset(seed=3)[0])
        action = np.full(4, 0.5, np.float32)
        seen, *_, info = there.step(action)
        assert trees.equal(seen, here.step(action)[0])
    assert info["prefix"] == str(Path(other_python).parents[1])
    assert "safetensors" not in info["modules"]


@pytest.mark.nightly
def test_a_worker_lives_in_a_virtual_environment_made_with_pip(tmp_path: Path) -> None:
    """As a user makes it; needs a package index."""
    venv.create(tmp_path / "venv", with_pip=True)
    python = str(tmp_path / "venv" / "bin" / "python")
    variables = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    subprocess.run([python, "-m", "pip", "install", "-q", "numpy"], check=True, env=variables)
    with IsolatedWorld(WorldFactory(factory=TOY, options={"size": 16}, python=python)) as there:
        seen, _ = there.reset(seed=3)
    assert trees.equal(seen, ToyTable(size=16).reset(seed=3)[0])
    assert sys.executable != python
