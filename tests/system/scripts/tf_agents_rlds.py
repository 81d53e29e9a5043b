"""A script in the calls of TF-Agents' rlds_to_reverb: RLDS episodes become trajectories, and are pushed to an observer.

    tf_agents_rlds.py NUM_EPISODES

It knows nothing of Understudy, and ends with an assertion if a number is not the one that went in. The observer keeps
what it is given; with Reverb it would write to a table.
"""

import sys

import numpy as np
from tf_agents.replay_buffers import rlds_to_reverb


def episodes(num_episodes):
    """Every observation tells its episode and its row."""
    for number in range(num_episodes):
        rows = 3 + number % 4
        last = np.arange(rows) == rows - 1
        yield {
            "steps": {
                "observation": (100 * number + np.arange(rows, dtype=np.float32))[:, None],
                "action": np.full((rows, 2), number, np.float32),
                "reward": np.arange(rows, dtype=np.float32),
                "discount": np.ones(rows, np.float32),
                "is_first": np.arange(rows) == 0,
                "is_last": last,
                "is_terminal": last & (number % 2 == 0),
            }
        }


class ListObserver:
    """Stands where ReverbAddTrajectoryObserver stands."""

    def __init__(self, signature):
        self.signature = signature
        self.trajectories = []

    def get_table_signature(self):
        return self.signature

    def __call__(self, trajectory):
        self.trajectories.append(trajectory)


class Leaf:
    """A tensor spec of a table: the first dimension is time."""

    def __init__(self, spec):
        self.shape = (None, *spec.shape)
        self.dtype = np.dtype(spec.dtype)


def main(num_episodes):
    data = list(episodes(num_episodes))
    spec = rlds_to_reverb.create_trajectory_data_spec(data)
    assert tuple(spec.observation.shape) == (1,)
    assert tuple(spec.action.shape) == (2,)

    trajectories = list(rlds_to_reverb.convert_rlds_to_trajectories(data))
    num_pairs = sum(len(episode["steps"]["action"]) - 1 for episode in data)
    inner = [one for one in trajectories if one.step_type != 2]
    assert len(inner) == num_pairs, (len(inner), num_pairs)
    for one in inner:
        number, row = divmod(float(one.observation[0]), 100)
        assert one.reward == row
        assert (np.asarray(one.action) == number).all()
        terminal = number % 2 == 0 and row == 1 + number % 4
        assert one.discount == 1.0 - terminal, (number, row, one)

    observer = ListObserver(type(spec)(*(Leaf(leaf) if hasattr(leaf, "shape") else leaf for leaf in spec)))
    pushed = rlds_to_reverb.push_rlds_to_reverb(data, observer)
    assert pushed == num_pairs, (pushed, num_pairs)
    assert len(observer.trajectories) >= num_pairs
    wrong = [data[0], {"steps": {**data[1]["steps"], "is_first": np.zeros(4, bool)}}]
    try:
        rlds_to_reverb.push_rlds_to_reverb(wrong, ListObserver(observer.signature))
    except ValueError as error:
        print(f"refused: {error}")
    else:
        raise AssertionError("an episode that begins wrongly was pushed")
    print(f"{num_episodes} episodes, {pushed} transitions")


if __name__ == "__main__":
    main(int(sys.argv[1]))
