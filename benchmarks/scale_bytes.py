"""Bytes counted in real small runs beside the model of bytes_model.py: `python benchmarks/scale_bytes.py`."""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks import scale_ranks
from benchmarks.bytes_model import Setup, facts, gradients_ddp, gradients_fsdp, row_numbers, rows_between_ranks
from benchmarks.onpolicy import SAMPLING, TOY, _new_policy, _num_bytes, _plan
from benchmarks.scale_machine import loopback_bytes
from benchmarks.scale_ranks import LAYERS, ROW_BYTES, ROWS, UPDATES, WIDTH, WORKS, raise_loopback

from understudy.algorithms.onpolicy.policy_gradient import PolicyGradientConfig
from understudy.cli import main as understudy
from understudy.policies.vla import VLAConfig
from understudy.training.collection.collector import Collector
from understudy.training.collection.serialization import serialize_rollouts
from understudy.training.distributed.ranks import single_rank
from understudy.training.onpolicy.rollout_exchange import RolloutExchange
from understudy.training.runs.metrics import read_metrics

ROOT = Path(__file__).parents[1]
APART = ("unshare", "--user", "--map-root-user", "--net")  # a network of one's own; no rights are needed
TIMEOUT_S = 600.0


@dataclass(frozen=True, kw_only=True)
class Counted:
    """One kind of traffic, by the counter and by the model."""

    what: str
    ranks: int
    counted: float
    expected: float

    @property
    def ratio(self) -> float:
        return self.counted / self.expected

    def __str__(self) -> str:
        return (
            f"{self.what}, {self.ranks} ranks: counted {self.counted / 1e6:.2f} MB, by the model "
            f"{self.expected / 1e6:.2f} MB ({self.ratio:.3f}x)"
        )


def can_count() -> bool:
    """Whether this machine lets its users have a network of their own."""
    if shutil.which(APART[0]) is None:
        return False
    return subprocess.run([*APART, "true"], capture_output=True, check=False, timeout=60).returncode == 0


def count_all() -> Iterator[Counted]:
    """Gradients and rows of two and four ranks, and a whole small run of two."""
    for ranks in (2, 4):
        yield from count(ranks, *WORKS)
    yield count_run(2)


def count(ranks: int, *whats: str) -> list[Counted]:
    """What these ranks move in some of the works of scale_ranks.py."""
    with tempfile.TemporaryDirectory() as made:
        out = Path(made) / "counted.json"
        _apart(Path(scale_ranks.__file__), ranks, out, *whats)
        found: dict[str, int] = json.loads(out.read_text())
    labelled = {what: expected(what, ranks) for what in whats}
    return [
        Counted(what=label, ranks=ranks, counted=found[what], expected=wanted)
        for what, (label, wanted) in labelled.items()
    ]


def expected(what: str, ranks: int) -> tuple[str, float]:
    """What a work of scale_ranks.py is called, and the bytes that the model gives it."""
    if what == "rows":
        setup = Setup(ranks=ranks, episodes=ROWS, blocks=1, observation_bytes=ROW_BYTES)
        return f"{ROWS} rows of {ROW_BYTES} bytes", rows_between_ranks(setup) + row_numbers(setup)
    size = LAYERS * WIDTH**2
    trained = WIDTH**2 if what == "adapters" else size
    setup = Setup(
        ranks=ranks, parameters=size, trained=trained, weight_bytes=4, episodes=UPDATES, blocks=1, mini_batch=1
    )
    if what == "fsdp":
        acting = (ranks - 1) * size * 4  # nobody acts here
        again = UPDATES * (ranks - 1) * size * 4  # gloo scatters by adding up all of it everywhere; NCCL does not
        return f"{UPDATES} updates by FSDP2", gradients_fsdp(setup) - acting + again
    return f"{UPDATES} updates by DDP, {trained / size:.0%} trained", gradients_ddp(setup)


def count_run(ranks: int) -> Counted:
    """What the ranks of a whole run of GRPO on the toy say to each other, from the first process to the last."""
    with tempfile.TemporaryDirectory() as made:
        out = Path(made) / "counted.json"
        _apart(Path(__file__), ranks, out)
        return Counted(**json.loads(out.read_text()))


def _apart(script: Path, ranks: int, out: Path, *words: str) -> None:
    if not can_count():
        raise RuntimeError(f"{' '.join(APART)}: not allowed, or not there; bytes are counted in a network of one's own")
    command = [*APART, sys.executable, str(script.resolve()), str(ranks), str(out), *words]
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])  # ranks find `benchmarks` by it
    subprocess.run(command, check=True, timeout=TIMEOUT_S, env={**os.environ, "PYTHONPATH": path})


def _run(ranks: int, place: Path, iterations: int = 2) -> dict[str, Any]:
    torch.set_num_threads(1)
    light = _light(place)
    before = loopback_bytes()
    assert (
        understudy(
            [
                "train",
                "grpo",
                str(place / "run"),
                "--policy",
                str(place / "policy.safetensors"),
                "--env",
                TOY,
                "--iterations",
                str(iterations),
                "--max-steps",
                "50",
                "--ranks",
                str(ranks),
                "--engine.parallel",
                "ddp",
                "--plan.n-samples",
                "4",
                "--plan.data-batch-size",
                "16",
                "--plan.tasks-per-iteration",
                "4",
                "--filters.no-filter-accuracy",
                "--evaluation.episodes",
                "2",
                "--workers.num-parallel-envs",
                "2",
            ]
        )
        == 0
    )
    total = loopback_bytes() - before
    episodes = list(read_metrics(place / "run" / "metrics.jsonl", "episode"))
    blocks = [math.ceil(one["length"] / VLAConfig().block_steps) for one in episodes]
    updates = list(read_metrics(place / "run" / "metrics.jsonl", "train"))[-1]["update"]
    setup = replace(
        light,
        ranks=ranks,
        episodes=len(blocks),
        blocks=float(np.mean(blocks)),
        epochs=PolicyGradientConfig().ppo_epochs,
    )
    one_update = replace(setup, episodes=1, blocks=1, epochs=1)
    begin = 2 * (ranks - 1) * setup.trained * 4  # rank 0's weights, by the engine and once more by DDP
    wanted = begin + updates * gradients_ddp(one_update)
    wanted += rows_between_ranks(setup) + facts(setup) + row_numbers(setup)
    label = (
        f"GRPO, {iterations} iterations, {len(blocks)} episodes, {updates:.0f} updates of {setup.trained / 1e3:.0f}k"
    )
    return {"what": f"{label} parameters", "ranks": ranks, "counted": total, "expected": wanted}


def _light(place: Path) -> Setup:
    """Sizes of the toy: of an observation, of what a block and an episode have beside it, and of a small policy."""
    with Collector(TOY, num_parallel_envs=1, max_steps=50) as collector:
        policy = _new_policy(collector, hidden=32, vision_hidden=32, layers=1, vision_layers=1)
        policy.save(place / "policy.safetensors")
        plan = _plan(collector, 4)
        plan.next_iteration()
        rollouts = collector.collect(plan.wave(1), policy, SAMPLING)
        said, arrays = serialize_rollouts([RolloutExchange(single_rank()).keep(one) for one in rollouts])
        num_blocks = sum(one.num_rows for one in rollouts)
        layout = [[name, array.dtype.str, list(array.shape)] for name, array in arrays.items()]
        size = sum(value.numel() for value in policy.model.parameters())
        return Setup(
            observation_bytes=_num_bytes(collector.step_spec),
            parameters=size,
            trained=size,
            block_bytes=round(sum(array.nbytes for array in arrays.values()) / num_blocks),
            episode_bytes=round((len(json.dumps(said)) + len(json.dumps(layout))) / len(rollouts)),
        )


if __name__ == "__main__":
    if len(sys.argv) == 1:
        for counted in count_all():
            print(counted)
        sys.exit()
    raise_loopback()  # one of the runs that count_all starts
    Path(sys.argv[2]).write_text(json.dumps(_run(int(sys.argv[1]), Path(sys.argv[2]).parent)))
