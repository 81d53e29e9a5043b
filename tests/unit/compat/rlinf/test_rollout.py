"""Steps become a trajectory that the buffer takes."""

import pytest
import torch

from understudy.compat import TrajectoryReplayBuffer
from understudy.compat.rlinf import ChunkStepResult, EmbodiedRolloutResult
from understudy.core import SpecError


def test_a_rollout_becomes_a_trajectory_and_a_batch() -> None:
    rollout = EmbodiedRolloutResult(max_episode_length=80, model_weights_id="w")
    rollout.append_step_result(ChunkStepResult(dones=torch.zeros(2, 1, dtype=torch.bool)))  # the reset
    for t in range(3):
        now, then = ({"states": torch.full((2, 4), float(t + d)), "wrist_images": None} for d in (0, 1))
        rollout.append_transitions(curr_obs=now, next_obs=then)
        rollout.append_step_result(
            ChunkStepResult(
                actions=torch.full((2, 7), float(t), requires_grad=True),
                rewards=torch.full((2, 1), float(t)),
                dones=torch.full((2, 1), t == 2),
                forward_inputs={"tokens": torch.full((2, 5), t)},
            )
        )
    trajectory = rollout.to_trajectory()
    assert trajectory.actions.shape == (3, 2, 7)
    assert trajectory.dones.shape == (4, 2, 1)
    assert trajectory.curr_obs["wrist_images"] is None
    with TrajectoryReplayBuffer() as buffer:
        buffer.add_trajectories([trajectory])
        batch = buffer.sample(50)
        time = batch["rewards"][:, 0]
        assert set(time.tolist()) == {0.0, 1.0, 2.0}
        assert torch.equal(batch["curr_obs"]["states"][:, 0], time)
        assert torch.equal(batch["next_obs"]["states"][:, 0], time + 1)
        assert torch.equal(batch["forward_inputs"]["tokens"][:, 0], time.long())
        assert torch.equal(batch["dones"][:, 0], time == 2)


def test_steps_with_other_fields_are_refused() -> None:
    rollout = EmbodiedRolloutResult()
    rollout.append_transitions({"a": torch.zeros(1)}, {"a": torch.zeros(1)})
    rollout.append_transitions({"b": torch.zeros(1)}, {"a": torch.zeros(1)})
    with pytest.raises(SpecError, match="curr_obs: expected a dict with a in each step, got a dict with b in step 1"):
        rollout.to_trajectory()
