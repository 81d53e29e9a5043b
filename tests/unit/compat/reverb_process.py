"""Pushes RLDS data through a real observer of TF-Agents into a real Reverb server, and samples all of it.

    PYTHONPATH=src python tests/unit/compat/reverb_process.py   # with dm-reverb 0.14, tf-agents 0.19, tensorflow 2.15

Exit code 0 if every sampled item is a pair of neighbouring steps of the data, each pair is there, and what does not fit
the table is refused.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import reverb
import tensorflow as tf
from tf_agents.replay_buffers import reverb_utils
from tf_agents.trajectories.trajectory import Trajectory as TheirTrajectory

from understudy.compat.rlds import create_trajectory_data_spec, push_rlds_to_reverb
from understudy.core import SpecError

ROWS = (4, 1, 3, 2)


def episode(number: int, rows: int) -> dict[str, Any]:
    last = np.arange(rows) == rows - 1
    base = 100 * number + np.arange(rows)
    return {
        "steps": {
            "observation": {
                "arm": {"pose": np.stack([base, -base], 1).astype(np.float32)},
                "tick": base.astype(np.int64),
            },
            "action": {"arm": base[:, None].astype(np.float32)},
            "reward": base.astype(np.float32) / 2,
            "discount": np.ones(rows, np.float64),
            "is_first": np.arange(rows) == 0,
            "is_last": last,
            "is_terminal": last & (number % 2 == 0),
        }
    }


def tensor_specs(nest: Any, outer: bool) -> Any:
    if isinstance(nest, dict):
        return {name: tensor_specs(child, outer) for name, child in nest.items()}
    if isinstance(nest, tuple):
        return ()
    return tf.TensorSpec(([None] if outer else []) + list(nest.shape), nest.dtype)


def as_tensorflow(data: list[dict[str, Any]]) -> tf.data.Dataset:
    """The data as TF-Agents takes it: a data set of episodes, each with a data set of steps."""
    steps = [tf.data.Dataset.from_tensor_slices(one["steps"]) for one in data]
    return tf.data.Dataset.from_tensor_slices({"steps": steps})


def main() -> None:
    data = [episode(number, rows) for number, rows in enumerate(ROWS)]
    spec = create_trajectory_data_spec(data)
    signature = TheirTrajectory(*(tensor_specs(field, True) for field in spec))
    table = reverb.Table(
        name="pairs",
        max_size=1000,
        sampler=reverb.selectors.Fifo(),
        remover=reverb.selectors.Fifo(),
        rate_limiter=reverb.rate_limiters.MinSize(1),
        signature=signature,
        max_times_sampled=1,
    )
    server = reverb.Server([table])
    client = reverb.Client(f"localhost:{server.port}")
    observer = reverb_utils.ReverbAddTrajectoryObserver(client, "pairs", sequence_length=2, stride_length=1)
    with pytest.raises(SpecError, match="policy_info/x: expected None as in the table"):
        push_rlds_to_reverb(data, observer, lambda step, after: {"x": np.float32(0)})
    pushed = push_rlds_to_reverb(as_tensorflow(data), observer)
    observer.flush()
    observer.close()
    wanted = [
        (100 * number + row, 100 * number + row + 1) for number, rows in enumerate(ROWS) for row in range(rows - 1)
    ]
    size = client.server_info()["pairs"].current_size
    assert pushed == size == len(wanted), (pushed, size, len(wanted))
    found = []
    for sample in client.sample("pairs", num_samples=size, emit_timesteps=False):
        step_type, pose, tick, action, next_type, reward, discount = (np.asarray(x) for x in fields(sample.data))
        found.append((int(tick[0]), int(tick[1])))
        assert pose.tolist() == [[float(t), -float(t)] for t in tick]
        assert action[:, 0].tolist() == tick.tolist()
        assert reward.tolist() == (tick / 2).tolist()
        number = int(tick[0]) // 100
        last = tick[1] % 100 == ROWS[number] - 1
        assert next_type[0] == step_type[1] == (2 if last else 1)
        assert discount[0] == (0.0 if last and number % 2 == 0 else 1.0)
    assert sorted(found) == wanted, found
    server.stop()
    print(f"{pushed} pairs of {sum(ROWS)} steps pushed, sampled and equal")


def fields(data: Any) -> list[Any]:
    """The columns of an item in the order of the trajectory's fields, nested ones by name."""
    flat = tf.nest.flatten(tuple(data) if not isinstance(data, list) else data)
    assert len(flat) == 7, len(flat)
    return flat


if __name__ == "__main__":
    main()
