"""RLinf's data sets: endless batches for a DataLoader, half of them demonstrations, with and without a thread."""

import threading
from typing import Any

import pytest
import torch
from tests.unit.compat.rlinf.test_call_shapes import tensors
from tests.waiting import wait_for
from torch.utils.data import DataLoader

from understudy.compat import rlinf
from understudy.core import StoreError


@pytest.mark.parametrize("name", ["ReplayBufferDataset", "PreloadReplayBufferDataset"])
def test_half_of_each_batch_is_of_each_buffer(name: str) -> None:
    with rlinf.TrajectoryReplayBuffer() as online, rlinf.TrajectoryReplayBuffer() as demos:
        dataset = getattr(rlinf, name)(
            replay_buffer=online,
            demo_buffer=demos,
            batch_size=16,
            min_replay_buffer_size=2,
            min_demo_buffer_size=1,
            prefetch_size=3,
        )
        loader = DataLoader(dataset, batch_size=1, num_workers=0, collate_fn=rlinf.replay_buffer_collate_fn)
        demos.add_trajectories([tensors(9)])
        later = threading.Timer(0.1, lambda: online.add_trajectories([tensors(0), tensors(1)]))
        later.start()  # the loader waits for it
        batches = iter(loader)
        for _ in range(5):
            batch = next(batches)
            assert batch["curr_obs"]["states"].shape == (16, 1)
            assert torch.equal(batch["versions"][:, 0] == 9, torch.arange(16) >= 8)
        later.join()
        dataset.close()
        wait_for(lambda: not any(t.name == "rlinf-preload" and t.is_alive() for t in threading.enumerate()))


def test_an_error_in_the_thread_is_raised_where_batches_are_taken() -> None:
    buffer = rlinf.TrajectoryReplayBuffer()
    buffer.add_trajectories([tensors(0)])
    dataset: Any = rlinf.PreloadReplayBufferDataset(buffer, None, 8, 1, 0)
    batches = iter(dataset)
    next(batches)
    buffer.close()
    with pytest.raises(StoreError, match="the buffer is closed"):
        list(batches)  # those that were sampled before, and then the error


def test_wrong_sizes_and_names() -> None:
    with (
        rlinf.TrajectoryReplayBuffer() as buffer,
        pytest.raises(StoreError, match="batch_size: expected a number from 2"),
    ):
        rlinf.ReplayBufferDataset(buffer, buffer, 1, 1, 1)
    with pytest.raises(AttributeError, match="has no attribute 'Dataset'"):
        rlinf.Dataset  # noqa: B018
