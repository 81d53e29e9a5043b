"""A script in the calls of RLinf's replay buffer: rollouts go in, batches and checkpoints come out.

    rlinf_replay.py DIR

It knows nothing of Understudy, and ends with an assertion if a number is not the one that went in.
"""

import sys
from pathlib import Path

import torch
from rlinf.data.embodied_buffer_dataset import ReplayBufferDataset, replay_buffer_collate_fn
from rlinf.data.embodied_io_struct import Trajectory
from rlinf.data.replay_buffer import TrajectoryReplayBuffer
from torch.utils.data import DataLoader

LENGTH, NUM_ENVS = 8, 4


def rollout(number):
    """Every value of a step tells the rollout, the time and the environment."""
    code = number * 1000 + torch.arange(LENGTH)[:, None] * 10 + torch.arange(NUM_ENVS)[None]
    dones = torch.zeros(LENGTH, NUM_ENVS, 1, dtype=torch.bool)
    dones[-1] = True
    return Trajectory(
        max_episode_length=LENGTH,
        model_weights_id=f"weights-{number}",
        actions=code[..., None].float().repeat(1, 1, 7),
        rewards=code[..., None].float(),
        terminations=dones,
        truncations=torch.zeros_like(dones),
        dones=dones,
        prev_logprobs=-code[..., None].float(),
        versions=torch.full((LENGTH, NUM_ENVS, 1), float(number)),
        curr_obs={"states": code[..., None].float(), "main_images": images(code)},
        next_obs={"states": code[..., None].float() + 10, "main_images": images(code + 10)},
    )


def images(code):
    return (code[..., None, None, None] % 256).to(torch.uint8).repeat(1, 1, 8, 8, 3)


def check(batch):
    code = batch["curr_obs"]["states"][:, 0]
    assert torch.equal(batch["next_obs"]["states"][:, 0], code + 10)
    assert torch.equal(batch["actions"], code[:, None].repeat(1, 7))
    assert torch.equal(batch["rewards"][:, 0], code)
    assert torch.equal(batch["prev_logprobs"][:, 0], -code)
    assert torch.equal(batch["curr_obs"]["main_images"][:, 0, 0, 0], (code % 256).to(torch.uint8))
    return code


def concat_batch(first, second):
    return {
        name: concat_batch(value, second[name]) if isinstance(value, dict) else torch.cat([value, second[name]])
        for name, value in first.items()
    }


def main(directory):
    replay_buffer = TrajectoryReplayBuffer(
        seed=1234,
        enable_cache=True,
        cache_size=5,
        sample_window_size=6,
        auto_save=True,
        auto_save_path=str(directory / "replay"),
    )
    demo_buffer = TrajectoryReplayBuffer(seed=1234, enable_cache=True, cache_size=5, sample_window_size=100)
    demo_buffer.add_trajectories([rollout(100)])
    assert not replay_buffer.is_ready(3)
    for number in range(10):
        replay_buffer.add_trajectories([rollout(number)])
    assert replay_buffer.is_ready(3)
    assert replay_buffer.size == len(replay_buffer) == 10

    seen = set()
    for _ in range(40):
        batch = concat_batch(replay_buffer.sample(num_chunks=32), demo_buffer.sample(num_chunks=32))
        seen |= set((check(batch)[:32] // 1000).int().tolist())
        assert (check(batch)[32:] >= 100_000).all()
    assert seen == set(range(4, 10)), seen  # the window of six

    dataset = ReplayBufferDataset(replay_buffer, demo_buffer, 32, 3, 1)
    loader = iter(DataLoader(dataset, batch_size=1, num_workers=0, collate_fn=replay_buffer_collate_fn))
    assert len(check(next(loader))) == 32

    replay_buffer.save_checkpoint(str(directory / "checkpoint"))
    for world_size in (1, 2, 4):
        found = []
        for rank in range(world_size):
            part = TrajectoryReplayBuffer(seed=1234)
            part.load_checkpoint(
                str(directory / "checkpoint"), is_distributed=True, local_rank=rank, world_size=world_size
            )
            assert abs(len(part) - 10 / world_size) < 1, (len(part), world_size)  # shared equally
            codes = torch.cat([check(part.sample(num_chunks=64)) for _ in range(8)])
            found += sorted(set((codes // 1000).int().tolist()))
        assert sorted(found) == list(range(10)), found  # each trajectory is on one rank
    print(replay_buffer.get_stats())
    replay_buffer.close(wait=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
