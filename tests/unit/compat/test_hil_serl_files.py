"""The files of HIL-SERL come in and go out as they were, and its own way of loading takes them."""

import pickle
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from understudy.compat import MemoryEfficientReplayBufferDataStore, export_demos, export_run, load_run
from understudy.core import ArraySpec, StoreError
from understudy.core import tree as trees


def random_run(rng: np.random.Generator) -> tuple[dict[str, ArraySpec], list[dict[str, Any]], list[bool]]:
    """Transitions as train_rlpd.py makes them, which of them a human took, and the observation space."""
    stack = int(rng.integers(1, 3))
    space: dict[str, Any] = {
        "wrist_1": ArraySpec(shape=(stack, 4, 4, 3), dtype="uint8"),
        "state": ArraySpec(shape=(stack, int(rng.integers(1, 5))), dtype="float32"),
    }
    if rng.random() < 0.5:
        space = {"images": {"wrist_1": space["wrist_1"]}, "state": space["state"]}

    def observe() -> Any:
        return trees.map_leaves(lambda leaf: rng.integers(0, 255, leaf.shape).astype(leaf.dtype), space)

    found, human = [], []
    now = observe()
    for _ in range(int(rng.integers(5, 60))):
        if rng.random() < 0.1:  # the robot was moved, or a second one takes its turn
            now = observe()
        then = observe()
        done, timeout = bool(rng.random() < 0.1), bool(rng.random() < 0.05)
        found.append(
            {
                "observations": now,
                "actions": rng.normal(size=7).astype(np.float32),
                "next_observations": then,
                "rewards": float(np.float32(rng.normal())),
                "masks": 1.0 - done,
                "dones": done or timeout,
                "grasp_penalty": float(np.float32(rng.normal())),
            }
        )
        human.append(bool(rng.random() < 0.3))
        now = observe() if done or timeout else then
    return space, found, human


def save(path: Path, transitions: list[dict[str, Any]], human: list[bool], steps_per_file: int) -> None:
    for name in ("buffer", "demo_buffer"):
        (path / name).mkdir(parents=True)
    for start in range(0, len(transitions), steps_per_file):
        stop = min(start + steps_per_file, len(transitions))
        parts = (transitions[start:stop], [transitions[n] for n in range(start, stop) if human[n]])
        for name, part in zip(("buffer", "demo_buffer"), parts, strict=True):
            (path / name / f"transitions_{stop}.pkl").write_bytes(pickle.dumps(part))


def loaded(folder: Path) -> list[dict[str, Any]]:
    """As HIL-SERL loads it, in the order of the numbers."""
    files = sorted(folder.glob("*.pkl"), key=lambda file: int(re.sub(r"\D", "", file.name)))
    return [transition for file in files for transition in pickle.loads(file.read_bytes())]


def assert_same(found: list[dict[str, Any]], wanted: list[dict[str, Any]]) -> None:
    assert len(found) == len(wanted)
    for a, b in zip(found, wanted, strict=True):
        assert a.keys() == b.keys()
        assert trees.equal(a, b)
        assert {name: type(a[name]) for name in a} == {name: type(b[name]) for name in b}


def round_trip(seed: int, tmp_path: Path) -> None:
    rng = np.random.default_rng(seed)
    space, transitions, human = random_run(rng)
    steps_per_file = int(rng.integers(5, 40))
    save(tmp_path / "theirs", transitions, human, steps_per_file)
    action = ArraySpec(shape=(7,), dtype="float32")
    with MemoryEfficientReplayBufferDataStore(
        space, action, 1000, image_keys=("wrist_1",), path=tmp_path / "store", include_grasp_penalty=True
    ) as buffer:
        assert load_run(tmp_path / "theirs", buffer) == len(transitions) == len(buffer)
        assert load_run(tmp_path / "theirs", buffer) and len(buffer) == 2 * len(transitions)  # noqa: PT018
    with MemoryEfficientReplayBufferDataStore(
        space, action, 1000, image_keys=("wrist_1",), path=tmp_path / "again", include_grasp_penalty=True
    ) as buffer:
        load_run(tmp_path / "theirs", buffer)
        buffer.sample(8)
    assert export_run(tmp_path / "ours", tmp_path / "again", steps_per_file=steps_per_file) == len(transitions)
    for name in ("buffer", "demo_buffer"):
        assert [file.name for file in sorted((tmp_path / "ours" / name).iterdir())] == [
            file.name for file in sorted((tmp_path / "theirs" / name).iterdir())
        ]
        assert_same(loaded(tmp_path / "ours" / name), loaded(tmp_path / "theirs" / name))


@pytest.mark.parametrize("seed", range(10))
def test_a_run_of_hil_serl_comes_in_and_goes_out_exactly(seed: int, tmp_path: Path) -> None:
    round_trip(seed, tmp_path)


@pytest.mark.nightly
def test_two_hundred_runs_of_hil_serl_come_in_and_go_out_exactly(tmp_path: Path) -> None:
    for seed in range(200):
        round_trip(seed, tmp_path / str(seed))


def test_successful_episodes_become_a_file_of_demonstrations(tmp_path: Path) -> None:
    space = {"state": ArraySpec(shape=(2,), dtype="float32")}
    action = ArraySpec(shape=(1,), dtype="float32")
    with MemoryEfficientReplayBufferDataStore(space, action, 100, image_keys=(), path=tmp_path / "store") as buffer:
        for episode, succeed in enumerate((True, False, True)):
            for t in range(4):
                done = t == 3
                infos = {"succeed": succeed and done, "intervene_action": np.zeros(1, np.float32)}
                buffer.insert(
                    {
                        "observations": {"state": np.full(2, 10 * episode + t, np.float32)},
                        "actions": np.full(1, t, np.float32),
                        "next_observations": {"state": np.full(2, 10 * episode + t + 1, np.float32)},
                        "rewards": float(done and succeed),
                        "masks": 1.0 - done,
                        "dones": done,
                        "infos": infos,
                    }
                )
    path = export_demos(tmp_path / "demo_data", "pick", tmp_path / "store")
    assert re.fullmatch(r"pick_2_demos_\d{4}-\d\d-\d\d_\d\d-\d\d-\d\d\.pkl", path.name)
    found = pickle.loads(path.read_bytes())
    assert [int(t["observations"]["state"][0]) for t in found] == [0, 1, 2, 3, 20, 21, 22, 23]
    assert [t["infos"]["succeed"] for t in found] == [False, False, False, True] * 2
    assert all("intervene_action" in t["infos"] for t in found)
    with MemoryEfficientReplayBufferDataStore(space, action, 100, image_keys=(), path=tmp_path / "store") as buffer:
        assert load_run(path, buffer) == 8
        assert len(buffer) == 12  # they were there already


def test_what_cannot_be_exported_is_named(tmp_path: Path) -> None:
    space, action = {"x": ArraySpec(shape=(), dtype="float32")}, ArraySpec(shape=(1,), dtype="float32")
    MemoryEfficientReplayBufferDataStore(space, action, 10, image_keys=(), path=tmp_path / "store").close()
    with pytest.raises(StoreError, match="has no successful episode to export"):
        export_demos(tmp_path / "demo_data", "pick", tmp_path / "store")
    (tmp_path / "run" / "buffer").mkdir(parents=True)
    (tmp_path / "run" / "buffer" / "transitions_1.pkl").write_bytes(b"")
    with pytest.raises(StoreError, match=r"holds \.pkl files already, which would be loaded too"):
        export_run(tmp_path / "run", tmp_path / "store")
    with pytest.raises(StoreError, match="steps_per_file: expected a number from 1, got 0"):
        export_run(tmp_path / "run", tmp_path / "store", steps_per_file=0)
