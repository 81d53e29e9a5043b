"""Damage of what is beside a store: published parameters, checkpoints, a run's config and its policy.

Each file gets flipped bits and is cut short. Then it is read as usual: what comes back is right to the bit, or there is
an error or a message that names the file. Nothing wrong is used, and nothing older is used without a word.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import numpy as np
import pytest

from understudy.algorithms import SAC
from understudy.core import tree as trees
from understudy.envs import ToyTable
from understudy.policies import ActorPolicy, Stats
from understudy.policies.protocol import PolicyError
from understudy.replay import Store
from understudy.replay.format.paths import parameter_files
from understudy.service import Server, ServerConfig, connect
from understudy.training.offpolicy.rlpd import RLPDConfig
from understudy.training.runs.checkpoint import ARRAYS, FACTS, CheckpointError, read_checkpoint, write_checkpoint
from understudy.training.runs.run import CONFIG, Run, RunError

T = TypeVar("T")

nightly = pytest.mark.nightly
WEIGHTS = {"actor": {"w": np.arange(300, dtype=np.float32), "on": np.array([True, False])}, "step": np.int64(7)}
STATE = {"weights": np.arange(60, dtype=np.float32).reshape(6, 10), "steps": np.array(7, np.int64), "kind": "sac"}
FACTS_SAVED = {"episodes": 12, "commit": 345, "batches": {"demo": [1, 2, 3], "online": {"commit": 9, "seed": 0}}}


def damaged(path: Path, num_flips: int, num_cuts: int) -> Iterator[str]:
    """The file with one flipped bit or cut short, then as it was; as many of each as asked for, or all if that is 0."""
    whole = path.read_bytes()
    rng = random.Random(1)
    bits, sizes = range(8 * len(whole)), range(len(whole))
    for bit in rng.sample(bits, num_flips) if num_flips else bits:
        content = bytearray(whole)
        content[bit // 8] ^= 1 << bit % 8
        path.write_bytes(content)
        yield f"bit {bit} of {path.name}"
    for size in rng.sample(sizes, num_cuts) if num_cuts else sizes:
        path.write_bytes(whole[:size])
        yield f"{path.name} with {size} bytes"
    path.write_bytes(whole)


def read_or_refuse(read: Callable[[], T], refusal: type[Exception], path: Path) -> T | None:
    """What was read; None if it was refused with an error that names the path. Other errors are raised."""
    try:
        return read()
    except refusal as error:
        text = str(error)
    assert str(path) in text
    return None


@pytest.mark.parametrize(("num_flips", "num_cuts"), [(25, 10), pytest.param(2000, 300, marks=nightly)])
def test_damaged_parameters_are_not_sent(
    num_flips: int, num_cuts: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with Store.open(tmp_path / "store") as store:
        with Server(store, ServerConfig(port=0)) as server, connect(server.address) as remote:
            assert remote.publish(WEIGHTS, metadata={"update": "500"}) == 1
        (path,) = parameter_files(store.path)
        whole = path.read_bytes()
        num_sent = 0
        for where in damaged(path, num_flips, num_cuts):
            caplog.clear()
            with (
                Server(store, ServerConfig(port=0)) as server,
                connect(server.address) as remote,
                remote.parameters() as subscription,
            ):
                said = f"{path}: this version of the parameters is damaged and is not sent" in caplog.text
                if not said:  # nothing that is checked was hit
                    found = subscription.wait(timeout_s=60)
                    assert found is not None
                    assert (found.version, found.metadata) == (1, {"update": "500"}), where
                    assert trees.equal(found.tree, trees.map_leaves(np.asarray, WEIGHTS)), where
                    num_sent += 1
                assert remote.publish({"w": np.zeros(1)}) == 2, where  # its number is not used again
            parameter_files(store.path)[-1].unlink()
            path.write_bytes(whole)
        assert num_sent == 0  # every bit is checked


@pytest.mark.parametrize("name", [ARRAYS, FACTS])
@pytest.mark.parametrize(("num_flips", "num_cuts"), [(300, 50), pytest.param(0, 0, marks=nightly)])
def test_a_damaged_checkpoint_is_refused(name: str, num_flips: int, num_cuts: int, tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path, 5, STATE, FACTS_SAVED, keep=2)
    num_refused = num_used = 0
    for where in damaged(path / name, num_flips, num_cuts):
        found = read_or_refuse(lambda: read_checkpoint(path), CheckpointError, path)
        if found is None:
            num_refused += 1
        else:  # a space that became another
            assert (found.number, found.facts, found.state["kind"]) == (5, FACTS_SAVED, "sac"), where
            assert all(np.array_equal(found.state[key], STATE[key]) for key in ("weights", "steps")), where
            num_used += 1
    assert num_refused > 10 * num_used


@pytest.mark.parametrize(("num_flips", "num_cuts"), [(100, 20), pytest.param(0, 0, marks=nightly)])
def test_a_damaged_config_is_refused_or_named(
    num_flips: int, num_cuts: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = RLPDConfig(seed=3, steps=12345)
    run = Run.create(tmp_path / "run", "rlpd", config)
    for where in damaged(run.path / CONFIG, num_flips, num_cuts):
        caplog.clear()
        found = read_or_refuse(lambda: run.config(RLPDConfig), RunError, run.path)
        assert found in (None, config) or "config.json: was changed since the run was created" in caplog.text, where
    assert run.config(RLPDConfig) == config
    caplog.clear()
    text = (run.path / CONFIG).read_text()
    (run.path / CONFIG).write_text(text.replace("12345", "12346"))  # by somebody who wants to
    assert run.config(RLPDConfig) == replace(config, steps=12346)
    assert "was changed since the run was created" in caplog.text


@pytest.mark.parametrize(("num_flips", "num_cuts"), [(60, 20), pytest.param(3000, 500, marks=nightly)])
def test_a_damaged_policy_is_refused(num_flips: int, num_cuts: int, tmp_path: Path) -> None:
    config = RLPDConfig()
    spec = ToyTable(cameras=False, state="task").step_spec
    path = tmp_path / "policy.safetensors"
    policy = SAC(config.sac, spec, Stats.none(config.inputs(spec)), seed=0).policy(version=4)
    policy.save(path)
    wanted = trees.flatten(policy.parameters())
    for where in damaged(path, num_flips, num_cuts):
        found = read_or_refuse(lambda: ActorPolicy.load(path), PolicyError, path)
        if found is None:
            continue
        assert found.version == 4, where
        for name, leaf in trees.flatten(found.parameters()).items():
            assert np.asarray(leaf).tobytes() == np.asarray(wanted[name]).tobytes(), where
    ActorPolicy.load(path)
