"""The face of RLinf: what comes out is what went in, from the window, again after a kill, and split over ranks."""

import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.unit.compat.rlinf.trajectories import check, codes, make, shown, trajectory

from understudy.compat import TrajectoryReplayBuffer
from understudy.core import SpecError, StoreClosedError, StoreError, StoreFormatError
from understudy.replay import Reader, compact, verify
from understudy.replay.format.paths import segment_files


def test_every_transition_comes_back_as_it_was_added(tmp_path: Path) -> None:
    with make(tmp_path / "store") as buffer:
        buffer.add_trajectories([trajectory(1, done_at=2), trajectory(2)])
        batch = buffer.sample(3000)
        assert (buffer.size, buffer.total_samples) == (2, 36)
    assert check(batch) == codes(1, 2)
    given = trajectory(1)
    assert batch.keys() == given.keys()
    for name in ("actions", "rewards", "terminations", "dones", "prev_logprobs", "versions"):
        assert batch[name].dtype == given[name].dtype
        assert batch[name].shape == (3000, *given[name].shape[2:])
    code = shown(batch["curr_obs"])
    ended = (code // 10_000 == 1) & (code // 100 % 100 == 2)
    assert np.array_equal(batch["dones"][:, 0], ended)
    assert np.array_equal(batch["terminations"][:, 0], ended)
    assert verify(tmp_path / "store").ok


def test_columns_become_episodes(tmp_path: Path) -> None:
    with make(tmp_path / "store") as buffer:
        truncated = trajectory(3, done_at=4)
        truncated["truncations"], truncated["terminations"] = truncated["terminations"], truncated["truncations"]
        buffer.add_trajectories([trajectory(1, done_at=2), trajectory(2), truncated])
    with Reader(tmp_path / "store") as reader:
        records = list(reader.episodes())
        assert [r.num_steps for r in records] == [3, 3] * 3 + [6] * 3 + [5, 1] * 3
        assert [r.num_rows - r.num_steps for r in records] == [1] * len(records)
        assert [r.state for r in records] == ["ended", "cut"] * 3 + ["cut"] * 3 + ["ended", "cut"] * 3
        assert reader.read(1).terminated.tolist() == [False, False, True]
        assert reader.read(records[9].id).truncated.tolist() == [False] * 4 + [True]
        assert reader.read(1).policy_version.tolist() == [1, 1, 1]


def test_a_gap_in_a_column_is_cut(tmp_path: Path) -> None:
    """Steps taken out of the middle, as of a trajectory of intervened steps alone."""
    whole = trajectory(1, length=9, batch=1)
    kept = [0, 1, 4, 5, 8]
    gappy = {
        name: value[kept] if isinstance(value, np.ndarray) else {k: v[kept] for k, v in value.items()}
        for name, value in whole.items()
    }
    gappy["intervene_flags"] = np.ones((5, 1, 4), bool)
    with make(tmp_path / "store") as buffer:
        buffer.add_trajectories([gappy])
        batch = buffer.sample(500)
        assert check(batch) == {10_000 + t * 100 for t in kept}
        assert batch["intervene_flags"].all()
    with Reader(tmp_path / "store") as reader:
        assert [(r.num_steps, r.num_human) for r in reader.episodes()] == [(2, 2), (2, 2), (1, 1)]


@pytest.mark.parametrize("window", [1, 2, 5, 9])
def test_samples_come_uniformly_from_the_newest_trajectories(window: int, tmp_path: Path) -> None:
    with make(tmp_path / "store", sample_window_size=window) as buffer:
        for n in range(7):
            buffer.add_trajectories([trajectory(n, length=2 + n, done_at=1)])
        batch = buffer.sample(30_000)
        expected = set().union(*(codes(n, length=2 + n) for n in range(7)[-window:]))
        assert check(batch) == expected
        counts = np.unique(shown(batch["curr_obs"]), return_counts=True)[1]
        mean = 30_000 / len(expected)
        assert ((counts - mean) ** 2 / mean).sum() < len(expected) + 6 * np.sqrt(2 * len(expected))  # chi squared
        assert buffer.get_stats() == {
            "num_trajectories": 7,
            "total_samples": sum(3 * (2 + n) for n in range(7)),
            "cache_size": min(window, 7),
            "window_trajectories": min(window, 7),
            "window_samples": len(expected),
        }


def test_rows_between_steps_are_told_from_those_of_steps(tmp_path: Path) -> None:
    """A rollout of two epochs has two rows more of flags (before each epoch) and of values (after each)."""
    given = trajectory(1, length=6, batch=2, done_at=2)
    values = np.arange(16, dtype=np.float32).reshape(8, 2, 1)
    steps = given["dones"]
    flags = np.concatenate([np.ones((1, 2, 1), bool), steps[:3], np.ones((1, 2, 1), bool), steps[3:]])
    with make(tmp_path / "store") as buffer:
        buffer.add_trajectories([{**given, "dones": flags, "terminations": flags, "prev_values": values}])
        batch = buffer.sample(1000)
    code = shown(batch["curr_obs"])
    time, column = code // 100 % 100, code % 100
    assert np.array_equal(batch["dones"][:, 0], time == 2)
    assert np.array_equal(batch["prev_values"][:, 0], 2 * (time + time // 3) + column)


def test_a_buffer_goes_on_where_it_was(tmp_path: Path) -> None:
    with make(tmp_path / "store") as buffer:
        buffer.add_trajectories([trajectory(1)])
    with make(tmp_path / "store") as buffer:
        assert (buffer.size, buffer.total_samples, buffer.is_ready(1), buffer.is_ready(2)) == (1, 18, True, False)
        buffer.add_trajectories([trajectory(2)])
        assert check(buffer.sample(2000)) == codes(1, 2)
        buffer.clear()
        assert (buffer.size, buffer.total_samples) == (0, 0)
        with pytest.raises(StoreError, match="there is nothing to sample; add a trajectory first"):
            buffer.sample(1)
        buffer.add_trajectories([trajectory(3)])
        assert check(buffer.sample(2000)) == codes(3)


KILLED = """
import os, sys
sys.path.insert(0, sys.argv[1])
from pathlib import Path
from tests.unit.compat.rlinf.trajectories import make, trajectory
from understudy.compat.rlinf import buffer as buffer_module
buffer_module.COMMIT_BYTES = 500  # several commits for each trajectory
buffer = make(Path(sys.argv[2]))
for n in range(5):
    buffer.add_trajectories([trajectory(n)])
    print(n, flush=True)
commit, left = buffer._store.commit, int(sys.argv[3])
def die_later(chunk):
    global left
    left -= 1
    return commit(chunk) if left >= 0 else os._exit(9)
buffer._store.commit = die_later
buffer.add_trajectories([trajectory(5, done_at=1)])
"""


@pytest.mark.parametrize("commits", [0, 1, 4])
def test_what_was_added_survives_a_kill_and_what_was_torn_is_not_there(commits: int, tmp_path: Path) -> None:
    root = Path(__file__).parents[4]
    done = subprocess.run(
        [sys.executable, "-c", KILLED, str(root), str(tmp_path / "store"), str(commits)],
        env={**os.environ, "PYTHONPATH": str(root / "src")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout.split()) == (9, ["0", "1", "2", "3", "4"]), done.stderr
    with Reader(tmp_path / "store") as reader:
        assert sum(record.num_steps for record in reader.episodes()) > 5 * 18 or not commits  # some of it is there
    with make(tmp_path / "store") as buffer:
        assert buffer.size == 5
        assert check(buffer.sample(3000)) == codes(*range(5))
        buffer.add_trajectories([trajectory(6)])
        assert check(buffer.sample(3000)) == codes(0, 1, 2, 3, 4, 6)


def test_adding_and_sampling_at_once_mixes_nothing(tmp_path: Path) -> None:
    with make(tmp_path / "store", sample_window_size=3) as buffer:
        buffer.add_trajectories([trajectory(0)])

        def add() -> None:
            for n in range(1, 15):
                buffer.add_trajectories([trajectory(n, done_at=3)])

        thread = threading.Thread(target=add)
        thread.start()
        while thread.is_alive():
            assert len({code // 10_000 for code in check(buffer.sample(64))}) <= 3
        thread.join()
        assert check(buffer.sample(2000)) == codes(12, 13, 14)


# ---- checkpoints


def stream(buffer: TrajectoryReplayBuffer, count: int = 4) -> list[bytes]:
    return [buffer.sample(32)["actions"].tobytes() for _ in range(count)]


def test_a_checkpoint_holds_the_trajectories_and_the_state_of_sampling(tmp_path: Path) -> None:
    with make(tmp_path / "store", seed=5, sample_window_size=2) as buffer:
        for n in range(3):
            buffer.add_trajectories([trajectory(n, done_at=n)])
        stream(buffer)
        buffer.save_checkpoint(tmp_path / "ckpt")
        expected = stream(buffer)
        buffer.add_trajectories([trajectory(8)])
        assert stream(buffer) != expected
        buffer.load_checkpoint(tmp_path / "ckpt")  # the same store: nothing is copied
        assert buffer.size == 3
        assert stream(buffer) == expected
        buffer.add_trajectories([trajectory(9)])
        assert check(buffer.sample(2000)) == codes(2, 9)
    with make(tmp_path / "other", seed=77, sample_window_size=2) as fresh:
        fresh.add_trajectories([trajectory(20)])
        fresh.load_checkpoint(tmp_path / "ckpt")
        assert stream(fresh) == expected
        assert check(fresh.sample(2000)) == codes(1, 2)
    with make(tmp_path / "other", sample_window_size=0) as fresh:  # and it lasts
        assert check(fresh.sample(2000)) == codes(0, 1, 2)
    for path in (tmp_path / "store", tmp_path / "other", *(tmp_path / "ckpt").glob("store-*")):
        assert verify(path).ok


def test_a_checkpoint_outlives_the_buffer_and_costs_no_copy(tmp_path: Path) -> None:
    with make(tmp_path / "store") as buffer:
        buffer.add_trajectories([trajectory(n) for n in range(4)])
        buffer.save_checkpoint(tmp_path / "ckpt")
        (saved,) = (tmp_path / "ckpt").glob("store-*")
        assert [p.stat().st_ino for p in segment_files(saved)] == [p.stat().st_ino for p in segment_files(buffer.path)]
        buffer.clear()
        compact(buffer._store, min_dead=0.0)
        assert not segment_files(buffer.path)
        buffer.load_checkpoint(tmp_path / "ckpt")  # gone from the store, so it is copied
        assert check(buffer.sample(2000)) == codes(0, 1, 2, 3)


def test_a_checkpoint_is_replaced_in_place(tmp_path: Path) -> None:
    with make(tmp_path / "store") as buffer:
        for n in range(3):
            buffer.add_trajectories([trajectory(n)])
            buffer.save_checkpoint(tmp_path / "ckpt")
    assert len(list((tmp_path / "ckpt").glob("store-*"))) == 1
    with TrajectoryReplayBuffer(auto_save=False, sample_window_size=0) as buffer:
        buffer.load_checkpoint(tmp_path / "ckpt")
        assert check(buffer.sample(2000)) == codes(0, 1, 2)


def test_a_checkpoint_after_a_return_to_an_older_one(tmp_path: Path) -> None:
    """Orders of saving that give checkpoints which cannot be loaded there."""
    with make(tmp_path / "store") as buffer:
        buffer.add_trajectories([trajectory(1)])
        buffer.save_checkpoint(tmp_path / "a")
        buffer.add_trajectories([trajectory(2)])
        buffer.save_checkpoint(tmp_path / "b")
        buffer.load_checkpoint(tmp_path / "a")
        buffer.add_trajectories([trajectory(3)])
        buffer.save_checkpoint(tmp_path / "c")
        for name, numbers in (("b", (1, 2)), ("c", (1, 3)), ("a", (1,)), ("b", (1, 2))):
            buffer.load_checkpoint(tmp_path / name)
            assert check(buffer.sample(1000)) == codes(*numbers)
    with make(tmp_path / "new") as buffer:
        for name, numbers in (("c", (1, 3)), ("b", (1, 2)), ("a", (1,)), ("c", (1, 3))):
            buffer.load_checkpoint(tmp_path / name)
            assert check(buffer.sample(1000)) == codes(*numbers)


@pytest.mark.parametrize("world_size", [1, 2, 3, 7])
def test_ranks_share_a_checkpoint(world_size: int, tmp_path: Path) -> None:
    with make(tmp_path / "store") as buffer:
        buffer.add_trajectories([trajectory(n, length=2) for n in range(5)])
        buffer.save_checkpoint(tmp_path / "ckpt")
    for rank in range(world_size):
        with make(tmp_path / f"rank_{rank}", seed=rank) as mine:
            mine.load_checkpoint(tmp_path / "ckpt", is_distributed=True, local_rank=rank, world_size=world_size)
            numbers = range(5)[rank::world_size]
            assert mine.size == len(numbers)
            if numbers:
                assert check(mine.sample(1000)) == codes(*numbers, length=2)


def test_fields_may_change_after_the_buffer_was_emptied(tmp_path: Path) -> None:
    with make(tmp_path / "store") as buffer:
        buffer.add_trajectories([trajectory(1)])
        buffer.save_checkpoint(tmp_path / "ckpt")
        buffer.clear()
        buffer.add_trajectories([trajectory(2, mark=np.ones((6, 3, 2), np.int8))])
        assert buffer.sample(10)["mark"].shape == (10, 2)
        buffer.load_checkpoint(tmp_path / "ckpt")
        assert check(buffer.sample(500)) == codes(1)


# ---- what is refused, and in which words


def test_wrong_options(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="there is no option 'sample_window'; did you mean 'sample_window_size'"):
        make(tmp_path / "store", sample_window=5)
    with pytest.raises(StoreError, match="auto_save_path: expected a directory, since auto_save is True; pass one"):
        TrajectoryReplayBuffer(auto_save=True)
    with pytest.raises(StoreError, match=r"sample_window_size: expected a number from 0 \(all\), got -1"):
        make(tmp_path / "store", sample_window_size=-1)
    with pytest.raises(StoreError, match="trajectory_format: expected pt or pkl, got 'npz'"):
        make(tmp_path / "store", trajectory_format="npz")
    with pytest.raises(StoreError, match="durability: expected sync or async, got 'soon'"):
        make(tmp_path / "store", durability="soon")
    with make(tmp_path / "store") as buffer:
        with pytest.raises(StoreError, match="num_chunks: expected a number from 1, got 0"):
            buffer.sample()
        with pytest.raises(StoreFormatError, match=r"not a checkpoint \(it has neither checkpoint.json nor metadata"):
            buffer.load_checkpoint(tmp_path)
        with pytest.raises(FileNotFoundError):  # what RLinf raises
            buffer.load_checkpoint(load_path=tmp_path)
        with pytest.raises(RuntimeError, match="there is nothing to sample; add a trajectory first"):
            buffer.sample(1)
        with pytest.raises(StoreError, match="local_rank: expected a number from 0 to 1, got 2"):
            buffer.load_checkpoint(tmp_path, is_distributed=True, local_rank=2, world_size=2)
        with pytest.raises(StoreError, match="trajectory_id: there is no trajectory 3; see trajectory_ids"):
            buffer.get_trajectory(3)
    with pytest.raises(StoreClosedError, match="the buffer is closed; make a new one"):
        buffer.add_trajectories([])


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"rewards": np.full((6, 3, 1), np.nan)}, r"trajectories\[1\]/rewards: expected finite numbers"),
        ({"dones": np.zeros((6, 2, 1), bool)}, r"trajectories\[1\]/dones: expected \[6, 3, ...\] as its length has"),
        ({"note": [object()]}, r"trajectories\[1\]/note\[0\]: expected tensors, numbers, text.*leave it out"),
        ({"dones": np.zeros((6, 3), bool)}, r"trajectories\[1\]/dones: expected bool \[1\] .*, got bool \[\]"),
        ({"actions": np.zeros((0, 3, 4))}, r"trajectories\[1\]/actions: expected \[6, 3, ...\]"),
        ({"prev_logprobs": None, "rewards": None}, r"trajectories\[1\]: expected rewards or prev_logprobs"),
    ],
)
def test_if_one_trajectory_does_not_fit_none_is_stored(change: dict[str, Any], text: str, tmp_path: Path) -> None:
    with make(tmp_path / "store") as buffer:
        with pytest.raises(SpecError, match=text):
            buffer.add_trajectories([trajectory(1), {**trajectory(2), **change}])
        assert buffer.size == 0
        buffer.add_trajectories([trajectory(3)])
        assert check(buffer.sample(1000)) == codes(3)
