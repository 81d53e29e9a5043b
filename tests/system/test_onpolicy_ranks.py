"""Several ranks, real processes: whatever the number of tasks and ranks, they come to the weights of one process."""

from __future__ import annotations

import os
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.sides import SidesWorld
from tests.unit.training.onpolicy import ranked
from tests.unit.training.onpolicy.making import save_policy

from understudy.core import tree as trees
from understudy.policies.flow import FlowConfig, FlowPolicy
from understudy.policies.load import load_policy_file
from understudy.replay import Reader
from understudy.training.distributed.errors import RanksError
from understudy.training.distributed.launch import launch_function
from understudy.training.runs.metrics import read_metrics

RANKED = "tests.unit.training.onpolicy.ranked:train"
# Gradients of ranks are added in another order than those of one, and Adam divides what is nearly 0 by its own size: a
# weight may be apart by a part of one step, which is 1e-3 here. Losses have no such excuse.
WEIGHT_TOLERANCE, LOSS_TOLERANCE = 1e-4, 2e-5
ROOT = Path(__file__).parents[2]


def train(
    place: Path, num_ranks: int, tasks: list[int], parallel: str = "ddp", until: int | None = None, max_lag: int = 0
) -> None:
    if num_ranks == 1:  # here, because a process takes seconds to start
        threads = torch.get_num_threads()
        ranked.train(str(place), tasks, parallel, until, max_lag)
        torch.set_num_threads(threads)
    else:
        options = {"place": str(place), "tasks": tasks, "parallel": parallel, "until": until, "max_lag": max_lag}
        assert launch_function(num_ranks, RANKED, **options) == 0


def flat_weights(path: Path) -> dict[str, np.ndarray]:
    return trees.flatten(load_policy_file(path / "policy.safetensors").parameters())


def assert_same_weights(one: Path, other: Path) -> None:
    mine, theirs = flat_weights(one), flat_weights(other)
    apart = max(float(np.abs(mine[name] - theirs[name]).max()) for name in mine)
    assert apart < WEIGHT_TOLERANCE, f"{one} and {other} differ by {apart}"


def assert_same(one: Path, other: Path) -> None:
    assert_same_weights(one, other)
    assert outcomes(one) == outcomes(other)
    assert evaluations(one) == evaluations(other)
    assert losses(one) == pytest.approx(losses(other), abs=LOSS_TOLERANCE)


def losses(path: Path) -> list[float]:
    return [line[name] for line in read_metrics(path / "metrics.jsonl", "train") for name in ("loss", "gradient")]


def outcomes(path: Path) -> list[tuple[int, str, bool]]:
    return [
        (line["episode"], line["task"], line["success"]) for line in read_metrics(path / "metrics.jsonl", "episode")
    ]


def evaluations(path: Path) -> list[list[dict[str, Any]]]:
    return [line["episode_results"] for line in read_metrics(path / "metrics.jsonl", "evaluation")]


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PYTHONPATH", str(ROOT), prepend=os.pathsep)  # the ranks and their workers import tests
    save_policy(tmp_path / "policy.safetensors")
    return tmp_path


@pytest.mark.parametrize(
    ("tasks", "ranks"),
    [([4], [2]), pytest.param(list(range(1, 10)), [2, 3, 4], marks=pytest.mark.nightly)],
)
def test_any_number_of_ranks_comes_to_the_weights_of_one(place: Path, tasks: list[int], ranks: list[int]) -> None:
    train(place, 1, tasks)
    for size in ranks:
        train(place, size, tasks)
        for number in tasks:
            assert_same(place / f"{number}-1", place / f"{number}-{size}")
            assert_same_weights(*(place / f"{number}-{n}" / "policies" / "iteration-000002" for n in (1, size)))
            assert_groups_are_whole(place / f"{number}-{size}")
            assert_each_episode_is_stored_by_one_rank(place / f"{number}-{size}", size)


@pytest.mark.nightly
def test_ranks_that_collect_while_they_learn_come_to_the_weights_of_one(place: Path) -> None:
    for size in (1, 2, 3):
        train(place, size, [4], max_lag=1)
        lines = list(read_metrics(place / f"4-{size}" / "metrics.jsonl", "train"))
        assert [line["lag"] for line in lines] == [0, 1, 2]
        assert lines[1]["carried"] > 0  # the groups that were run ahead, and then carried over
        assert_same(place / "4-1", place / f"4-{size}")
        assert_each_episode_is_stored_by_one_rank(place / f"4-{size}", size)


@pytest.mark.nightly
@pytest.mark.parametrize("noise", [{"noise_level": 0.5}, {"noise_bounds": (0.1, 0.4)}])
@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_ranks_come_to_the_same_flow_policy(place: Path, parallel: str, noise: dict[str, Any]) -> None:
    world = SidesWorld(tasks=2)
    config = FlowConfig(block_steps=3, hidden=16, layers=2, num_inference_steps=3, **noise)
    instructions = [task.instruction for task in world.suite.tasks]
    FlowPolicy.new(config, world.step_spec, instructions, seed=0).save(place / "policy.safetensors")
    for size in (1, 2, 3):
        train(place, size, [2], parallel)
    assert_same(place / "2-1", place / "2-2")
    assert_same(place / "2-1", place / "2-3")


def assert_groups_are_whole(path: Path) -> None:
    for line in read_metrics(path / "metrics.jsonl", "train"):
        assert (line["episodes"], line["groups"]) == (16, 4)
    groups = Counter(line["group"] for line in read_metrics(path / "metrics.jsonl", "episode"))
    assert set(groups.values()) == {4}


def assert_each_episode_is_stored_by_one_rank(path: Path, size: int) -> None:
    stored: list[int] = []
    for rank in range(size):
        with Reader(path / "store" if rank == 0 else path / "stores" / f"rank-{rank}") as reader:
            stored += [int(record.info.labels["ticket"]) for record in reader.episodes()]
    assert sorted(stored) == [number for number, _, _ in outcomes(path)]
    busy = [line["busy"] for line in read_metrics(path / "metrics.jsonl", "train")]
    assert all(0 <= share <= 1 for share in busy)  # 0 if the others took all tickets of a rank that stood still
    assert max(busy) > 0


@pytest.mark.nightly  # test_onpolicy.py kills one process during a write in every run
@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_ranks_of_which_one_is_killed_during_a_write_come_to_the_same(place: Path, parallel: str) -> None:
    (place / "killed").mkdir()
    shutil.copy(place / "policy.safetensors", place / "killed" / "policy.safetensors")
    train(place, 2, [2], parallel)
    options = {"write": 3, "tasks": [2], "parallel": parallel}
    with pytest.raises(RanksError, match=r"rank 1 of 2 was killed by SIGKILL"):
        launch_function(
            2, "tests.unit.training.onpolicy.ranked:train_until_killed", place=str(place / "killed"), **options
        )
    run = place / "killed" / "2-2"
    left = sorted(one.name for one in (run / "checkpoints").iterdir())
    assert left == [".new-000000000002", "000000000000-0", "000000000001-0"]
    train(place / "killed", 2, [2], parallel)
    mine, theirs = flat_weights(run), flat_weights(place / "2-2")
    assert all(np.array_equal(mine[name], theirs[name]) for name in theirs)
    assert losses(run) == losses(place / "2-2")


@pytest.mark.nightly  # test_sharded_checkpoint.py loads shards with another number of ranks in every run
@pytest.mark.parametrize("sizes", [(1,), (1, 3)])
def test_shards_come_to_the_same_and_resume_with_another_number_of_ranks(place: Path, sizes: tuple[int, ...]) -> None:
    """FSDP2 on two ranks, left after two iterations, resumes with one and with three."""
    train(place, 1, [2])
    train(place, 2, [2], "fsdp", until=2)
    for size in sizes:
        run = place / f"on-{size}" / f"2-{size}"
        run.parent.mkdir()
        shutil.copytree(place / "2-2", run)
        _set_parallel(run, "fsdp" if size > 1 else "none")
        shutil.copy(place / "policy.safetensors", run.parent / "policy.safetensors")
        train(run.parent, size, [2], "fsdp")
        assert_same(place / "2-1", run)


def _set_parallel(run: Path, value: str) -> None:
    text = (run / "config.json").read_text()
    (run / "config.json").write_text(text.replace('"parallel": "fsdp"', f'"parallel": "{value}"'))
