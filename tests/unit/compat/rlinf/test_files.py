"""The files of RLinf's own buffer come in and go out exactly, and nothing in them is run."""

import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.unit.compat.rlinf.test_call_shapes import assert_equal

from understudy.compat import TrajectoryReplayBuffer
from understudy.compat.rlinf.files import load_pkl, load_pt
from understudy.core import StoreFormatError
from understudy.replay import Reader

DTYPES = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.bool,
]


def random_trajectory(rng: np.random.Generator, dtypes: dict[str, torch.dtype]) -> dict[str, Any]:
    """A dict as RLinf saves it. A field has one dtype in all trajectories, and may be missing in some."""
    length, batch, epochs = (int(n) for n in rng.integers(1, 4, 3))
    length *= epochs
    steps = int(rng.integers(1, 4))

    def tensor(name: str, *shape: int, rows: int = length) -> torch.Tensor:
        values = torch.from_numpy(rng.integers(0, 200, (rows, batch, *shape)))
        return values.to(dtypes.setdefault(name, DTYPES[int(rng.integers(len(DTYPES)))]))

    seen = {name: tensor(name, 2, 3, rows=length + 1) for name in ("main_images", "states")}
    flags = torch.from_numpy(rng.random((length + epochs, batch, 1)) < 0.3)
    found: dict[str, Any] = {
        "max_episode_length": int(rng.integers(100)),
        "model_weights_id": f"{rng.integers(1000):03d}",
        "rewards": tensor("rewards", 1),
        "forward_inputs": {},
        "curr_obs": {name: value[:-1].clone() for name, value in seen.items()},
        "next_obs": {name: value[1:].clone() for name, value in seen.items()},
    }
    optional = {
        "actions": lambda: tensor("actions", 4),
        "intervene_flags": lambda: torch.from_numpy(rng.random((length, batch, 4)) < 0.2),
        "terminations": lambda: flags.clone(),
        "truncations": lambda: torch.zeros_like(flags),
        "dones": lambda: flags.clone(),
        "prev_logprobs": lambda: tensor("prev_logprobs", 7),
        "prev_values": lambda: tensor("prev_values", 1, rows=length + epochs),
        "versions": lambda: torch.full((length, batch, 1), float(steps)),
        "forward_inputs": lambda: {"tokens": tensor("tokens", 5), "nested": {"mask": tensor("mask", 2)}},
    }
    for name, make in optional.items():
        if rng.random() < 0.7:
            found[name] = make()
    if rng.random() < 0.3:  # a gap, as in a trajectory of intervened steps alone
        found["next_obs"]["states"] = tensor("states", 2, 3)
    if rng.random() < 0.3:
        found["curr_obs"]["wrist_images"] = found["next_obs"]["wrist_images"] = None
    if rng.random() < 0.3:
        found["curr_obs"]["task_descriptions"] = [f"task {n}" for n in range(batch)]
    if rng.random() < 0.2:
        found["curr_obs"], found["next_obs"] = {}, {}
    return found


def save_as_rlinf(path: Path, trajectories: list[dict[str, Any]], ids: list[int], suffix: str) -> None:
    """Writes a directory with the names and the contents that RLinf's buffer gives its files."""
    path.mkdir()
    index = {}
    for number, fields in zip(ids, trajectories, strict=True):
        shape = fields.get("prev_logprobs", fields["rewards"]).shape
        index[number] = {
            "num_samples": shape[0] * shape[1],
            "trajectory_id": number,
            "max_episode_length": fields["max_episode_length"],
            "shape": tuple(shape),
            "model_weights_id": fields["model_weights_id"],
        }
        file = path / f"trajectory_{number}_{fields['model_weights_id']}.{suffix}"
        if suffix == "pt":
            torch.save(fields, file)
        else:
            file.write_bytes(pickle.dumps(fields))
    total = sum(entry["num_samples"] for entry in index.values())
    (path / "trajectory_index.json").write_text(json.dumps({"trajectory_index": index, "trajectory_id_list": ids}))
    metadata = {
        "trajectory_format": suffix,
        "size": len(ids),
        "total_samples": total,
        "trajectory_counter": max(ids) + 1,
        "seed": 77,
    }
    (path / "metadata.json").write_text(json.dumps(metadata))


def round_trip(seed: int, tmp_path: Path) -> None:
    rng = np.random.default_rng(seed)
    suffix = ("pt", "pkl")[seed % 2]
    dtypes: dict[str, torch.dtype] = {}
    given = [random_trajectory(rng, dtypes) for _ in range(int(rng.integers(1, 4)))]
    first = int(rng.integers(5))
    save_as_rlinf(tmp_path / "theirs", given, [first + 2 * n for n in range(len(given))], suffix)
    with TrajectoryReplayBuffer(sample_window_size=0, trajectory_format=suffix) as buffer:
        buffer.load_checkpoint(load_path=str(tmp_path / "theirs"))
        assert buffer.total_samples == sum(t["rewards"].shape[0] * t["rewards"].shape[1] for t in given)
        buffer.sample(8)
        buffer.save_checkpoint(save_path=str(tmp_path / "ours"))
    names = sorted(file.name for file in (tmp_path / "theirs").iterdir())
    assert sorted(file.name for file in (tmp_path / "ours").iterdir()) == sorted([*names, "understudy.json"])
    for name in names:
        theirs, ours = tmp_path / "theirs" / name, tmp_path / "ours" / name
        if name.endswith(".json"):
            assert json.loads(ours.read_text()) == json.loads(theirs.read_text())
        else:
            load = torch.load if suffix == "pt" else lambda path: pickle.loads(path.read_bytes())
            assert_equal(load(ours), load(theirs))


@pytest.mark.parametrize("seed", range(10))
def test_a_buffer_of_rlinf_comes_in_and_goes_out_exactly(seed: int, tmp_path: Path) -> None:
    round_trip(seed, tmp_path)


@pytest.mark.nightly
def test_two_hundred_buffers_of_rlinf_come_in_and_go_out_exactly(tmp_path: Path) -> None:
    for seed in range(200):
        (tmp_path / str(seed)).mkdir()
        round_trip(seed, tmp_path / str(seed))


def test_a_buffer_opens_where_rlinf_saved_one_and_loading_again_adds_nothing(tmp_path: Path) -> None:
    """As RLinf's viewer does: auto_save_path is the directory of the files, and load_checkpoint is called at once."""
    rng = np.random.default_rng(3)
    dtypes: dict[str, torch.dtype] = {}
    given = [random_trajectory(rng, dtypes) for _ in range(3)]
    save_as_rlinf(tmp_path / "theirs", given, [4, 5, 6], "pt")
    sizes = []
    for _ in range(3):
        path = str(tmp_path / "theirs")
        with TrajectoryReplayBuffer(auto_save=True, auto_save_path=path, enable_cache=True, cache_size=5) as buffer:
            buffer.load_checkpoint(path)
            assert buffer._trajectory_id_list == [4, 5, 6]
            assert_equal(vars(buffer.get_trajectory(5))["rewards"], given[1]["rewards"])
            assert (buffer.trajectory_counter, buffer.seed) == (7, 77)
        with Reader(tmp_path / "theirs" / "store") as reader:
            sizes.append(sum(record.num_steps for record in reader.episodes("1")))
    assert sizes[0] == sizes[1] == sizes[2]


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_ranks_share_a_buffer_of_rlinf(world_size: int, tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    dtypes: dict[str, torch.dtype] = {}
    save_as_rlinf(tmp_path / "theirs", [random_trajectory(rng, dtypes) for _ in range(5)], [*range(5)], "pkl")
    seen = []
    for rank in range(world_size):
        with TrajectoryReplayBuffer() as mine:
            mine.load_checkpoint(tmp_path / "theirs", is_distributed=True, local_rank=rank, world_size=world_size)
            seen += mine.trajectory_ids
            assert mine.size == len(mine.trajectory_ids)
            assert mine.trajectory_counter == max(mine.trajectory_ids) + 1
    assert sorted(seen) == [*range(5)]


def test_arrays_of_numpy_are_saved_as_tensors(tmp_path: Path) -> None:
    with TrajectoryReplayBuffer(trajectory_format="pt") as buffer:
        buffer.add_trajectories([{"rewards": np.ones((2, 1)), "actions": np.zeros((2, 1, 3), np.float32)}])
        buffer.save_checkpoint(tmp_path / "out")
        buffer.save_checkpoint(tmp_path / "out")  # replaced
    found = torch.load(tmp_path / "out" / "trajectory_0_.pt")
    assert_equal(found, {"rewards": torch.ones(2, 1, dtype=torch.float64), "actions": torch.zeros(2, 1, 3)})


class Evil:
    def __reduce__(self) -> Any:
        return (print, ("run",))


@pytest.mark.parametrize("suffix", ["pt", "pkl"])
def test_code_in_a_file_is_not_run(suffix: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fields = {"rewards": torch.ones(2, 1), "max_episode_length": 1, "model_weights_id": ""}
    save_as_rlinf(tmp_path / "theirs", [fields], [0], suffix)
    file = tmp_path / "theirs" / f"trajectory_0_.{suffix}"
    evil = {**fields, "actions": Evil()}
    if suffix == "pt":
        torch.save(evil, file)
    else:
        file.write_bytes(pickle.dumps(evil))
    with TrajectoryReplayBuffer() as buffer:
        with pytest.raises(StoreFormatError, match="cannot be read as tensors, numbers, text and containers"):
            buffer.load_checkpoint(tmp_path / "theirs")
        assert buffer.size == 0
    assert "run" not in capsys.readouterr().out.split()


def test_damaged_files_are_named(tmp_path: Path) -> None:
    for load in (load_pt, load_pkl):
        with pytest.raises(StoreFormatError, match=r"t.bin: cannot be read as tensors"):
            load(b"no such thing", tmp_path / "t.bin")
    (tmp_path / "metadata.json").write_text("{}")
    (tmp_path / "trajectory_index.json").write_text('{"trajectory_id_list": [1], "trajectory_index": {"1": {}}}')
    with TrajectoryReplayBuffer() as buffer:
        with pytest.raises(FileNotFoundError, match=r"trajectory_1_.pt"):
            buffer.load_checkpoint(tmp_path)
        (tmp_path / "trajectory_index.json").write_text("[1]")
        with pytest.raises(StoreFormatError, match="not those of a buffer of RLinf"):
            buffer.load_checkpoint(tmp_path)
