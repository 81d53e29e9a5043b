"""The three functions of TF-Agents and ours on the same random data, each into a Reverb server of its own.

    PYTHONPATH=src python tests/unit/compat/tf_agents_process.py  # with dm-reverb 0.14, tf-agents 0.19, tensorflow 2.15

Exit code 0 if specs, trajectories and sampled pairs are equal on every data set, and both refuse the wrong ones.
Observations are flat, because TF-Agents gives both steps of a pair as the observation where they are nested, and the
discount is theirs: 0 at the terminal step.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import reverb
import tensorflow as tf
from tf_agents.replay_buffers import reverb_utils, rlds_to_reverb
from tf_agents.specs import tensor_spec

from understudy.compat import rlds as ours
from understudy.core import UnderstudyError

NUM_DATA_SETS = 48
Columns = dict[str, np.ndarray[Any, Any]]


def random_data(seed: int) -> list[Columns]:
    """Some episodes of 1 to 6 steps, with other shapes and dtypes for each seed."""
    rng = np.random.default_rng(seed)
    shape = tuple(int(size) for size in rng.integers(1, 4, size=rng.integers(0, 3)))
    observation_dtype = rng.choice(["float32", "uint8", "int64", "float64"])
    action_shape, action_dtype = (int(rng.integers(1, 4)),), rng.choice(["float32", "int32"])
    return [
        episode(rng, int(rng.integers(1, 7)), shape, observation_dtype, action_shape, action_dtype)
        for _ in range(rng.integers(1, 6))
    ]


def episode(
    rng: np.random.Generator,
    num_steps: int,
    shape: tuple[int, ...],
    observation_dtype: str,
    action_shape: tuple[int, ...],
    action_dtype: str,
) -> Columns:
    last = np.arange(num_steps) == num_steps - 1
    return {
        "observation": rng.integers(0, 200, (num_steps, *shape)).astype(observation_dtype),
        "action": rng.integers(0, 9, (num_steps, *action_shape)).astype(action_dtype),
        "reward": rng.normal(size=num_steps).astype(np.float32),
        "discount": rng.uniform(size=num_steps).astype(np.float32),
        "is_first": np.arange(num_steps) == 0,
        "is_last": last,
        "is_terminal": last & bool(rng.integers(2)),
    }


def as_tensorflow(data: list[Columns]) -> tf.data.Dataset:
    """A data set of episodes, each with a data set of steps."""
    return tf.data.Dataset.from_tensor_slices({"steps": [tf.data.Dataset.from_tensor_slices(one) for one in data]})


def as_given(data: list[Columns]) -> list[dict[str, Columns]]:
    return [{"steps": one} for one in data]


def leaves(nest: Any) -> list[tuple[str, str, Any]]:
    """Shape, dtype and values of each leaf, in one order for both."""
    found = (np.asarray(leaf) for leaf in tf.nest.flatten(tuple(nest)))
    return [(str(leaf.shape), str(leaf.dtype), leaf.tolist()) for leaf in found]


def spec_leaves(spec: Any, dtype: Callable[[Any], str]) -> list[tuple[tuple[int, ...], str]]:
    return [
        (tuple(field.shape), dtype(field))
        for field in (spec.step_type, spec.observation, spec.action, spec.next_step_type, spec.reward, spec.discount)
    ]


@contextmanager
def table(signature: Any) -> Iterator[tuple[Any, Any]]:
    """An observer of a real Reverb server, and a client of it."""
    pairs = reverb.Table(
        name="pairs",
        max_size=1000,
        sampler=reverb.selectors.Fifo(),
        remover=reverb.selectors.Fifo(),
        rate_limiter=reverb.rate_limiters.MinSize(1),
        signature=signature,
        max_times_sampled=1,
    )
    server = reverb.Server([pairs])
    client = reverb.Client(f"localhost:{server.port}")
    observer = reverb_utils.ReverbAddTrajectoryObserver(client, "pairs", sequence_length=2, stride_length=1)
    try:
        yield observer, client
    finally:
        observer.close()
        server.stop()


def sampled(client: Any, observer: Any) -> list[Any]:
    observer.flush()
    size = client.server_info()["pairs"].current_size
    return [leaves(one.data) for one in client.sample("pairs", num_samples=size, emit_timesteps=False)] if size else []


def compare(seed: int) -> tuple[int, int]:
    """Raise if anything differs; returns how many trajectories and pairs were compared."""
    data = random_data(seed)
    theirs_in, ours_in = as_tensorflow(data), as_given(data)
    their_spec = rlds_to_reverb.create_trajectory_data_spec(theirs_in)
    our_spec = ours.create_trajectory_data_spec(ours_in)
    assert spec_leaves(their_spec, lambda leaf: leaf.dtype.name) == spec_leaves(our_spec, lambda leaf: leaf.dtype), seed

    theirs = [leaves(one) for one in rlds_to_reverb.convert_rlds_to_trajectories(theirs_in)]
    found = [leaves(one) for one in ours.convert_rlds_to_trajectories(ours_in, discount="original")]
    assert theirs == found, (seed, theirs, found)

    signature = tensor_spec.add_outer_dim(their_spec)
    with table(signature) as (observer, client):
        rlds_to_reverb.push_rlds_to_reverb(theirs_in, observer)
        their_pairs = sampled(client, observer)
    with table(signature) as (observer, client):
        count = ours.push_rlds_to_reverb(ours_in, observer, discount="original")
        our_pairs = sampled(client, observer)
    assert their_pairs == our_pairs, (seed, their_pairs, our_pairs)
    assert count == len(our_pairs), (seed, count)
    return len(found), len(our_pairs)


# ---- wrong data


def without(name: str) -> Callable[[list[Columns]], None]:
    def change(data: list[Columns]) -> None:
        for one in data:
            del one[name]

    return change


def terminal_in_the_middle(data: list[Columns]) -> None:
    data[0]["is_terminal"][1] = True


def no_last_step(data: list[Columns]) -> None:
    data[0]["is_last"][-1] = data[0]["is_terminal"][-1] = False


def no_first_step(data: list[Columns]) -> None:
    data[1]["is_first"][0] = False


WRONG: Mapping[str, Callable[[list[Columns]], None]] = {
    **{f"no {name}": without(name) for name in ("observation", "action", "reward", "discount", "is_first", "is_last")},
    "no is_terminal": without("is_terminal"),
    "a terminal step that is not the last": terminal_in_the_middle,
    "an episode without a last step": no_last_step,
    "an episode without a first step": no_first_step,
}


def refuses(read: Callable[[], Any], errors: tuple[type[Exception], ...]) -> bool:
    try:
        list(read())
    except errors:
        return True
    return False


def compare_wrong(name: str) -> None:
    rng = np.random.default_rng(7)
    data = [episode(rng, 4, (2,), "float32", (1,), "float32") for _ in range(3)]
    WRONG[name](data)
    by_them = refuses(
        lambda: rlds_to_reverb.convert_rlds_to_trajectories(as_tensorflow(data)),
        (ValueError, tf.errors.InvalidArgumentError),
    )
    by_us = refuses(lambda: ours.convert_rlds_to_trajectories(as_given(data)), (UnderstudyError,))
    assert (by_them, by_us) == (True, True), (name, by_them, by_us)


def main() -> None:
    counts = [compare(seed) for seed in range(NUM_DATA_SETS)]
    for name in WRONG:
        compare_wrong(name)
    trajectories, pairs = (sum(each) for each in zip(*counts, strict=True))
    print(
        f"{NUM_DATA_SETS} data sets, {trajectories} trajectories and {pairs} pairs are equal; "
        f"{len(WRONG)} wrong ones are refused by both"
    )


if __name__ == "__main__":
    sys.exit(main())
