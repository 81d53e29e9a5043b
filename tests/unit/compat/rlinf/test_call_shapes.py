"""Every way in which RLinf's own code makes, fills and reads its buffer works; options without effect say so."""

import asyncio
import logging
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.unit.compat.rlinf.trajectories import check, codes, make, shown, trajectory

from understudy.compat import TrajectoryReplayBuffer
from understudy.compat.rlinf import Trajectory
from understudy.core import tree as trees
from understudy.replay import Reader
from understudy.replay.format.paths import segment_files


def tensors(number: int, **options: Any) -> Trajectory:
    """A trajectory as RLinf's rollout worker sends it."""
    given = trees.map_leaves(torch.from_numpy, trajectory(number, **options))
    return Trajectory(max_episode_length=80, model_weights_id=f"w{number}", **given)


@dataclass
class Rollout:
    """A trajectory as RLinf has it: an object, with fields that are not there."""

    max_episode_length: int = 80
    model_weights_id: str = "abc"
    actions: Any = None
    rewards: Any = None
    dones: Any = None
    prev_values: Any = None
    forward_inputs: dict[str, Any] = field(default_factory=dict)
    curr_obs: dict[str, Any] = field(default_factory=dict)
    next_obs: dict[str, Any] = field(default_factory=dict)


def test_tensors_come_back_as_tensors_and_arrays_as_arrays(tmp_path: Path) -> None:
    given = trajectory(1)
    rollout = Rollout(
        actions=torch.from_numpy(given["actions"]).requires_grad_(),
        rewards=given["rewards"],
        dones=torch.from_numpy(given["dones"]),
        curr_obs={name: torch.from_numpy(value) for name, value in given["curr_obs"].items()},
        next_obs=given["next_obs"],
    )
    with make(tmp_path / "store") as buffer:
        buffer.add_trajectories([rollout])
        batch = buffer.sample(50)
    assert batch.keys() == {"actions", "rewards", "dones", "curr_obs", "next_obs"}
    assert isinstance(batch["rewards"], np.ndarray)
    assert (batch["actions"].dtype, batch["dones"].dtype, batch["actions"].device.type) == (
        torch.float32,
        torch.bool,
        "cpu",
    )
    assert np.array_equal(shown(batch["next_obs"]), shown({k: v.numpy() for k, v in batch["curr_obs"].items()}) + 100)
    with make(tmp_path / "store", device="meta") as buffer:  # a device that every machine has
        assert {leaf.device.type for leaf in trees.flatten(buffer.sample(4)).values()} == {"meta"}
    with Reader(tmp_path / "store") as reader:
        labels = next(iter(reader.episodes())).info.labels
        assert (labels["max_episode_length"], labels["model_weights_id"]) == ("80", "abc")


def concat(a: dict[str, Any], b: dict[str, Any]) -> dict[str, Any]:
    """Joins two batches as a training loop does that expects tensors: other leaves would be lost."""
    joined: dict[str, Any] = {}
    for name, value in a.items():
        if isinstance(value, torch.Tensor):
            joined[name] = torch.cat([value, b[name]], dim=0)
        elif isinstance(value, dict):
            joined[name] = concat(value, b[name])
    return joined


CALLS: list[dict[str, Any]] = [
    {},
    {"seed": 7},
    {"seed": None},
    {"enable_cache": True, "cache_size": 5, "sample_window_size": 3, "auto_save": False, "trajectory_format": "pt"},
    {"enable_cache": True, "cache_size": 2, "auto_save": False, "auto_save_path": "kept", "trajectory_format": "pt"},
    {"enable_cache": False, "auto_save": True, "auto_save_path": "kept", "trajectory_format": "pt"},
    {"auto_save": True, "auto_save_path": "kept", "enable_cache": True, "cache_size": 5},
    {"auto_save": True, "auto_save_path": "kept", "trajectory_format": "pkl", "sample_window_size": 0},
]


@pytest.mark.parametrize("options", CALLS)
def test_a_buffer_is_made_filled_and_read_as_there(options: dict[str, Any], tmp_path: Path) -> None:
    if "auto_save_path" in options:
        options = {**options, "auto_save_path": str(tmp_path / "kept")}
    buffer = TrajectoryReplayBuffer(**options)
    assert len(buffer) == buffer.size == buffer.total_samples == buffer.trajectory_counter == 0
    buffer.add_trajectories([tensors(0), tensors(1, done_at=2)])
    buffer.add_trajectories([])
    buffer.add_trajectories([Trajectory()])  # an empty one is left out
    assert (len(buffer), buffer.size, buffer.total_samples, buffer.trajectory_counter) == (2, 2, 36, 2)
    assert buffer.is_ready(2)
    assert asyncio.run(buffer.is_ready_async(2))
    assert not asyncio.run(buffer.is_ready_async(3))
    batch = concat(buffer.sample(num_chunks=16), buffer.sample_chunks(16))
    assert batch["curr_obs"]["states"].shape == (32, 1)
    assert batch.keys() == trajectory(0).keys()
    assert check(trees.map_leaves(lambda leaf: leaf.numpy(), batch)) <= codes(0, 1)
    assert buffer.get_stats()["cache_size"] == 2
    buffer.clear_cache()
    buffer.save_checkpoint(save_path=str(tmp_path / "checkpoint"))
    buffer.close(wait=True)
    buffer.close()
    assert (tmp_path / "kept").exists() is bool(options.get("auto_save"))
    for rank in range(2):
        with TrajectoryReplayBuffer(auto_save=False) as mine:
            path = str(tmp_path / "checkpoint")
            mine.load_checkpoint(load_path=path, is_distributed=True, local_rank=rank, world_size=2)
            assert (mine.trajectory_ids, mine.trajectory_counter) == ([rank], rank + 1)


def test_options_come_in_the_order_of_there(tmp_path: Path) -> None:
    with TrajectoryReplayBuffer(5, True, 9, 3, True, str(tmp_path / "kept"), "pkl") as buffer:
        assert (buffer.seed, buffer.sample_window_size, buffer.trajectory_format) == (5, 3, "pkl")
        assert (buffer.auto_save, buffer.enable_cache, buffer.auto_save_path) == (True, True, str(tmp_path / "kept"))
    with TrajectoryReplayBuffer(storage_dir=tmp_path / "old", save_trajectories=True, storage_format="pt") as buffer:
        assert (buffer.path, buffer.trajectory_format) == (tmp_path / "old", "pt")


def test_an_option_without_effect_is_one_line_in_the_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "understudy"):
        TrajectoryReplayBuffer(enable_cache=True, cache_size=5, auto_save=False, auto_save_path=tmp_path / "x").close()
    said = [record.getMessage() for record in caplog.records if record.name == "understudy.compat.options"]
    assert len(said) == 3
    assert all("changes nothing here: " in line for line in said)
    assert said[1].startswith("TrajectoryReplayBuffer: cache_size=5 changes nothing here: small fields are kept in")
    assert not (tmp_path / "x").exists()


def test_a_trajectory_is_got_by_its_id_as_it_was_added(tmp_path: Path) -> None:
    given = tensors(3, done_at=1)
    given.actions = given.actions.bfloat16()
    given.curr_obs |= {"wrist_images": None, "task_descriptions": [["pick", "place"]], "gain": torch.tensor([1.0, 2.0])}
    given.next_obs |= {"wrist_images": None}
    flags = torch.zeros(8, 3, 1, dtype=torch.bool)
    flags[0] = flags[2] = flags[4] = True
    values = torch.arange(24, dtype=torch.float32).reshape(8, 3, 1)
    given.dones, given.prev_values, given.intervene_flags = flags, values, flags[:6]
    with TrajectoryReplayBuffer(auto_save_path=tmp_path / "kept") as buffer:
        other = tensors(0)
        other.actions = other.actions.bfloat16()
        buffer.add_trajectories([other, given])
        entry = buffer.trajectory_index[1]
        assert entry.pop("uuid")
        assert entry == {
            "num_samples": 18,
            "trajectory_id": 1,
            "max_episode_length": 80,
            "shape": (6, 3, 1),
            "model_weights_id": "w3",
        }
    with TrajectoryReplayBuffer(auto_save_path=tmp_path / "kept") as buffer:  # also after it was opened again
        assert_equal(vars(buffer.get_trajectory(1)), vars(given))
        assert_equal(vars(buffer._load_trajectory(1, "w3")), vars(given))
        batch = buffer.sample(64)
        assert "wrist_images" not in batch["curr_obs"]


def assert_equal(found: Any, wanted: Any) -> None:
    """The same types, dtypes, shapes and values, in dicts with the same keys."""
    assert type(found) is type(wanted)
    if isinstance(wanted, dict):
        assert {k for k, v in found.items() if v is not None} == {k for k, v in wanted.items() if v is not None}
        for name, value in wanted.items():
            assert_equal(found.get(name), value)
    elif isinstance(wanted, torch.Tensor):
        assert (found.dtype, found.shape) == (wanted.dtype, wanted.shape)
        assert torch.equal(found, wanted)
    elif isinstance(wanted, np.ndarray):
        assert (found.dtype, found.shape) == (wanted.dtype, wanted.shape)
        assert np.array_equal(found, wanted)
    else:
        assert found == wanted


def test_bfloat16_comes_back_as_bfloat16() -> None:
    given = tensors(1)
    given.prev_logprobs = torch.randn(6, 3, 7, generator=torch.Generator().manual_seed(0)).bfloat16()
    with TrajectoryReplayBuffer(sample_window_size=0) as buffer:
        buffer.add_trajectories([given])
        found = buffer.sample(200)["prev_logprobs"]
        assert found.dtype == torch.bfloat16
        assert {tuple(row) for row in found.tolist()} == {tuple(r) for r in given.prev_logprobs.flatten(0, 1).tolist()}


def test_a_trajectory_may_have_only_what_a_model_is_fed() -> None:
    given = Trajectory(rewards=torch.ones(4, 2, 5), forward_inputs={"tokens": torch.arange(24).reshape(4, 2, 3)})
    with TrajectoryReplayBuffer() as buffer:
        buffer.add_trajectories([given])
        batch = buffer.sample(100)
        assert batch.keys() == {"rewards", "forward_inputs"}
        assert {tuple(row) for row in batch["forward_inputs"]["tokens"].tolist()} == {
            tuple(row) for row in given.forward_inputs["tokens"].flatten(0, 1).tolist()
        }
        assert_equal(vars(buffer.get_trajectory(0)), vars(given))


def test_fields_come_and_go(caplog: pytest.LogCaptureFixture) -> None:
    """A batch has the fields that all trajectories of the window have; each transition is drawn equally often."""
    fewer = trajectory(2, length=2, mark=np.ones((2, 3, 2), np.int8))
    del fewer["forward_inputs"]
    with TrajectoryReplayBuffer(sample_window_size=3) as buffer:
        buffer.add_trajectories([trajectory(0), trajectory(1)])
        with caplog.at_level(logging.INFO, "understudy"):
            buffer.add_trajectories([fewer])
            batch = buffer.sample(6000)
            buffer.sample(6)
        (said,) = [r.getMessage() for r in caplog.records if "in no batch" in r.getMessage()]
        assert said == "forward_inputs/tokens, mark: not in every trajectory of the window, so in no batch"
        assert batch.keys() == trajectory(0).keys() - {"forward_inputs"}
        code = batch["actions"][:, 0].astype(int)
        assert set(code.tolist()) == codes(0, 1) | codes(2, length=2)
        assert np.array_equal(batch["curr_obs"]["states"][:, 0], code)
        assert np.array_equal(batch["next_obs"]["states"][:, 0], code + 100)
        counts = np.unique(code, return_counts=True)[1]
        mean = 6000 / 42
        assert ((counts - mean) ** 2 / mean).sum() < 42 + 6 * np.sqrt(2 * 42)  # chi squared
        buffer.add_trajectories([fewer, fewer])
        assert "mark" in buffer.sample(4)
        assert buffer.trajectory_ids == [0, 1, 2, 3, 4]


def test_async_writes_return_before_the_disk_has_them(tmp_path: Path) -> None:
    with TrajectoryReplayBuffer(auto_save_path=tmp_path / "kept", durability="async") as buffer:
        go = threading.Event()
        commit = buffer._store.commit
        buffer._store.commit = lambda chunk: (go.wait(20), commit(chunk))[1]  # type: ignore[method-assign]
        given = trajectory(1)
        buffer.add_trajectories([given])  # returns although the disk does not
        given["actions"][:] = -1  # the caller may use its arrays again
        assert (buffer.size, buffer.total_samples) == (1, 18)
        go.set()
        assert check(buffer.sample(2000)) == codes(1)  # what was added is sampled
        buffer.add_trajectories([trajectory(2)])
        buffer.wait()
        with TrajectoryReplayBuffer(auto_save=False) as other:
            buffer.save_checkpoint(tmp_path / "checkpoint")
            other.load_checkpoint(tmp_path / "checkpoint")
            assert other.size == 2
        buffer.add_trajectories([trajectory(3)])
        buffer.close(wait=False)
        buffer._executor.shutdown(wait=True)  # type: ignore[union-attr]
    with TrajectoryReplayBuffer(auto_save_path=tmp_path / "kept") as again:
        assert check(again.sample(3000)) == codes(1, 2, 3)


@pytest.mark.parametrize("durability", ["sync", "async"])
def test_a_write_that_fails_raises_and_leaves_no_half(durability: Any, tmp_path: Path) -> None:
    with TrajectoryReplayBuffer(auto_save_path=tmp_path / "kept", durability=durability) as buffer:
        buffer.add_trajectories([trajectory(1)])
        buffer.wait()
        commit = buffer._store.commit

        def fail(chunk: Any) -> int:
            raise OSError("the disk is gone")

        buffer._store.commit = fail  # type: ignore[method-assign]
        with pytest.raises(OSError, match="the disk is gone"):  # noqa: PT012 (with "async" it is the second)
            buffer.add_trajectories([trajectory(2)])
            buffer.wait()
        buffer._store.commit = commit  # type: ignore[method-assign]
        assert buffer.size == 1
        buffer.add_trajectories([trajectory(3)])
        assert check(buffer.sample(2000)) == codes(1, 3)


def test_a_temporary_buffer_frees_what_is_outside_its_window() -> None:
    with TrajectoryReplayBuffer(sample_window_size=2) as buffer:
        image = {"big": np.zeros((4, 1, 64, 64, 3), np.uint8)}
        for n in range(30):
            given = trajectory(n, length=4, batch=1)
            buffer.add_trajectories([{**given, "forward_inputs": {**given["forward_inputs"], **image}}])
            buffer.sample(2)
        assert (buffer.size, buffer.total_samples, buffer.trajectory_counter) == (30, 120, 30)
        assert len(buffer.trajectory_ids) < 30
        assert buffer.trajectory_ids[-2:] == [28, 29]
        assert check(buffer.sample(200)) == codes(28, 29, length=4, batch=1)
        buffer.clear()
        assert (buffer.size, buffer.total_samples, buffer.trajectory_counter) == (0, 0, 0)
        assert not segment_files(buffer.path)
