"""What a store says of its trajectories, also one of a version that kept less."""

from pathlib import Path

import numpy as np

from understudy.compat import TrajectoryReplayBuffer
from understudy.compat.rlinf.stored import read_trajectories
from understudy.core import ArraySpec, EpisodeInfo, Spec, Step, StepSpec
from understudy.replay import Reader, Store


def test_trajectories_of_an_older_version_are_sampled(tmp_path: Path) -> None:
    """They have no layout: one is made from the spec of their steps, and they are numbered in their order."""
    spec = StepSpec(
        observation=Spec({"x": ArraySpec(shape=(1,), dtype="float32")}),
        action=Spec(ArraySpec(shape=(2,), dtype="float32")),
        extras=Spec({"dones": ArraySpec(shape=(), dtype="bool")}),
    )
    with Store.open(tmp_path / "store") as store:
        writer = store.writer("rlinf", spec)
        for n in range(2):
            writer.begin(EpisodeInfo(actor="rlinf", group=f"g{n}", labels={"trajectory": f"k{n}"}))
            for t in range(3):
                x = np.array([10 * n + t], np.float32)
                extras = {"dones": np.bool_(False)}
                writer.append(Step(observation={"x": x}, action=np.zeros(2, np.float32), reward=0.0, extras=extras))
            writer.cut({"x": np.array([10 * n + 3], np.float32)}, labels={"trajectory": f"k{n}", "complete": "yes"})
    with Reader(tmp_path / "store") as reader:
        found = read_trajectories(reader)
        assert [(t.key, t.trajectory_id, t.num_steps, t.complete) for t in found] == [
            ("k0", 0, 3, True),
            ("k1", 1, 3, True),
        ]
    with TrajectoryReplayBuffer(auto_save_path=tmp_path / "store") as buffer:
        batch = buffer.sample(100)
        assert batch.keys() == {"actions", "rewards", "dones", "curr_obs", "next_obs"}
        assert set(batch["curr_obs"]["x"][:, 0].tolist()) == {0, 1, 2, 10, 11, 12}
        assert np.array_equal(batch["next_obs"]["x"], batch["curr_obs"]["x"] + 1)
        assert buffer.trajectory_counter == 2
