"""Some updates of OpenVLA's adapter by one process or several; `launch_function` calls `rank` in each."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import numpy as np
import torch
from tests.unit.policies.openvla.make_checkpoint import KEY, SPEC, instructions, observations, rngs

from understudy.policies import Sampling
from understudy.policies.config import LoraConfig
from understudy.policies.lora import add_lora
from understudy.policies.openvla import OpenVLAPolicy
from understudy.training.distributed.config import EngineConfig
from understudy.training.distributed.engine import Engine
from understudy.training.distributed.ranks import Ranks, join

ROWS = 4


def rank(checkpoint: str, place: str) -> None:
    torch.set_num_threads(1)
    with join() as ranks:
        update(Path(checkpoint), Path(place), "fsdp", ranks)


def update(checkpoint: Path, place: Path, parallel: Literal["none", "fsdp"], ranks: Ranks) -> None:
    """Train on this rank's share of the rows; rank 0 writes what is trained, and what the policy then does."""
    policy = OpenVLAPolicy.load(checkpoint, SPEC, unnorm_key=KEY, cameras=("image", "wrist"), value_head=True)
    add_lora(policy.model, LoraConfig(rank=4))
    engine = Engine(
        policy.model, EngineConfig(parallel=parallel, gradient_checkpointing=True, learning_rate=1e-3), ranks
    )
    mine = list(range(ranks.rank, ROWS, ranks.size))
    for number in range(3):
        seen = {name: array[mine] for name, array in observations(ROWS, number).items()}
        rng = np.random.default_rng(number)
        tokens = rng.integers(0, 256, (ROWS, 8, 7), np.int32)[mine]
        numbers = rng.uniform(-1, 1, (ROWS, 8, 7)).astype(np.float32)[mine]  # of a policy with an L1 head
        said = [instructions(ROWS)[row] for row in mine]
        replay = {"tokens": tokens, "numbers": numbers}
        told = policy.evaluate(seen, said, replay, sampling=Sampling(), module=engine.forward)
        assert told.value is not None
        loss = (-told.log_prob.mean(dim=(1, 2)) + (told.value - 1).square()).sum() / ROWS
        engine.backward(loss, last=True)
        engine.step()
    trained = engine.parameters(trainable_only=True)
    with engine.unsharded():
        acted = policy.act(observations(2), instructions(2), rngs=rngs(2), sampling=Sampling())
    if ranks.first:
        np.savez(place, **trained, **{"acted/log_prob": acted.log_prob})
