"""Checkpoints that are whole: those who are killed while they save leave the old one or the new one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.unit.training.distributed.small import Net, train

from understudy.training.distributed.config import EngineConfig
from understudy.training.distributed.engine import Engine
from understudy.training.distributed.errors import RanksError
from understudy.training.distributed.ranks import single_rank
from understudy.training.distributed.sharded_checkpoint import CURRENT, FACTS

KILLER = """
import os, signal, sys, time
from pathlib import Path
import torch
from tests.unit.training.distributed.test_sharded_checkpoint import make
torch.set_num_threads(1)
place = Path(sys.argv[1])

def save_for_ever(engine, say):
    while True:
        engine.num_updates += 1
        for value in engine.tensors().values():
            value.data.fill_(engine.num_updates)
        engine.save(place)
        os.write(say, engine.num_updates.to_bytes(4, "big"))

engine = make()
engine.save(place)
torn = 0
for wait_s in [0.001 * one for one in range(12)]:
    hear, say = os.pipe()
    pid = os.fork()
    if pid == 0:
        save_for_ever(engine, say)
    os.close(say)
    said = os.read(hear, 4)
    time.sleep(wait_s)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    while more := os.read(hear, 4):
        said = more
    last = int.from_bytes(said, "big")
    engine.load(place)
    assert engine.num_updates in (last, last + 1), (engine.num_updates, last)
    assert all((value == engine.num_updates).all() for value in engine.tensors().values())
    torn += any(one.name.startswith(".new-") for one in place.iterdir())
engine.save(place)
assert len(list(place.iterdir())) == 2, list(place.iterdir())  # what the killed ones left is gone
print(torn)
"""


def make(seed: int = 0) -> Engine:
    return Engine(Net(seed=seed), EngineConfig(learning_rate=1e-2), single_rank())


def test_killed_while_saving(tmp_path: Path) -> None:
    root = Path(__file__).parents[4]
    done = subprocess.run(
        [sys.executable, "-c", KILLER, str(tmp_path)], cwd=root, check=True, capture_output=True, text=True, timeout=300
    )
    assert int(done.stdout) > 0  # some were killed in the middle


def test_leftovers_and_saving_again(tmp_path: Path) -> None:
    engine = make()
    train(engine, single_rank())
    for _ in range(3):
        path = engine.save(tmp_path)
    (tmp_path / ".new-000000000009-0").mkdir()
    (tmp_path / ".new-000000000009-0" / "shard").write_text("half")
    whole = tmp_path / "000000000008-0"  # there, and not yet the current one
    whole.mkdir()
    other = make(1)
    other.load(tmp_path)
    assert other.num_updates == 5
    assert all(torch.equal(a, b) for a, b in zip(engine.tensors().values(), other.tensors().values(), strict=True))
    other.save(tmp_path)
    assert sorted(one.name for one in tmp_path.iterdir()) == sorted([other_name(path.name), CURRENT])


def other_name(name: str) -> str:
    return f"{name[:-1]}{1 - int(name[-1])}"


def test_refuses_what_is_not_what_was_saved(tmp_path: Path) -> None:
    engine = make()
    before = engine.parameters()
    with pytest.raises(RanksError, match=r"holds no complete checkpoint .* give a directory that save has written"):
        engine.load(tmp_path)
    path = make(1).save(tmp_path)
    shard = next(path.glob("*.safetensors"))
    content = shard.read_bytes()
    shard.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(RanksError, match="its shards do not match their checksums"):
        engine.load(tmp_path)
    shard.write_bytes(content)
    engine.load(tmp_path)
    facts = path / FACTS
    saved = facts.read_text()
    facts.write_text(saved.replace('"num_updates": 0', '"num_updates": 1'))
    with pytest.raises(RanksError, match=r"facts.json does not match its checksum; resume from another checkpoint"):
        engine.load(tmp_path)
    facts.write_text(saved.replace('"format": 1', '"format": 2'))
    with pytest.raises(RanksError, match="has format 2, and this version of understudy reads format 1"):
        engine.load(tmp_path)
    wide = Engine(Net(width=16), EngineConfig(), single_rank())
    wide.save(tmp_path / "wide")
    engine.load_parameters(before)
    with pytest.raises(
        RanksError, match=r"first.weight: expected \[8, 4\], got \[16, 4\]; build the same module as when it was saved"
    ):
        engine.load(tmp_path / "wide")
    assert all(np.array_equal(before[name], value) for name, value in engine.parameters().items())


def test_shards_are_plain_safetensors(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    engine = make()
    path = engine.save(tmp_path)
    assert sorted(one.suffix for one in path.iterdir()) == [".json", ".safetensors"]  # and no pickle
    there = load_file(next(path.glob("*.safetensors")))
    assert torch.equal(there["module/head.weight"], engine.tensors()["module/head.weight"])
