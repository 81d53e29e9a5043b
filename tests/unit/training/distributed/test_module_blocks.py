"""The blocks of a module: what FSDP gathers together."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tests.unit.policies.flow.test_policy import INSTRUCTIONS, SPEC, TINY
from torch import nn

from understudy.policies.flow import FlowPolicy
from understudy.policies.flow.model import FEATURES, NOISY, TIME, TIME_SIZE
from understudy.policies.mlp import MLP
from understudy.training.distributed.config import EngineConfig
from understudy.training.distributed.engine import Engine
from understudy.training.distributed.errors import RanksError
from understudy.training.distributed.module_blocks import find_blocks
from understudy.training.distributed.ranks import single_rank


def test_elements_of_lists_are_blocks_and_a_module_that_computes_itself_is_whole() -> None:
    inner = nn.ModuleList([nn.Linear(2, 2)])
    outer = nn.ModuleList([nn.Sequential(inner), nn.Linear(2, 2)])
    module = nn.ModuleDict({"outer": outer, "mlp": MLP((2, 3, 1))})
    assert find_blocks(module, []) == list(outer)
    assert find_blocks(module, ["Linear"]) == [inner[0], outer[1], module["mlp"][0]]  # type: ignore[index]
    with pytest.raises(RanksError, match="blocks: the module has no part of class 'Linea'; did you mean 'Linear'"):
        find_blocks(module, ["Linea"])


def test_a_flow_policy_with_all_its_heads_is_sharded() -> None:
    """Its value and its noise come from MLPs, which do not call their layers as modules."""
    config = replace(TINY, value_head=True, noise_bounds=(0.1, 0.4))
    plain, sharded = (FlowPolicy.new(config, SPEC, INSTRUCTIONS, seed=0).model for _ in range(2))
    ranks = single_rank()
    try:
        engine = Engine(sharded, EngineConfig(parallel="fsdp"), ranks)
        block = plain.velocity.out_features
        generator = torch.Generator().manual_seed(0)
        given = {
            FEATURES: torch.randn(2, plain.enter.in_features - block - TIME_SIZE, generator=generator),
            NOISY: torch.randn(4, block, generator=generator),
            TIME: torch.rand(4, generator=generator),
        }
        found, expected = engine.forward(given), plain(given)
        for one, other in zip(found, expected, strict=True):
            assert torch.equal(one, other)
        sum(one.sum() for one in found).backward()
        assert all(value.grad is not None for value in (sharded.noise[0].weight, sharded.value[0].weight))
    finally:
        ranks.close()
