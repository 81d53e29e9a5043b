"""Optimizers: a step is plain Adam's, also for convolutions, and touches nothing but the optimizer's own parameters."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch import nn

from understudy.algorithms.optimizers import AdamW, FlatAdam


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 5, 3), nn.ReLU(), nn.Flatten(), nn.Linear(5 * 6 * 6, 7))


def test_steps_are_those_of_plain_adam_also_if_images_are_channels_last() -> None:
    """A convolution of channels-last images has a gradient in that layout; fused Adam must not mix up its numbers."""
    ours, theirs = network(), network()
    mine, plain = FlatAdam(ours.parameters(), learning_rate=0.01), torch.optim.Adam(theirs.parameters(), lr=0.01)
    for step in range(5):
        images = torch.randn(4, 8, 8, 3, generator=torch.Generator().manual_seed(step)).permute(0, 3, 1, 2)
        mine.descend(ours(images).square().sum())
        plain.zero_grad()
        torch.autograd.backward(theirs(images.contiguous()).square().sum())
        plain.step()
        norm = torch.cat([p.grad.reshape(-1) for p in theirs.parameters() if p.grad is not None]).norm()
        torch.testing.assert_close(mine.gradient_norm(), norm)
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
    assert all(state["step"] == 5 for state in mine.state.values())


def test_moments_are_there_before_the_first_step_and_for_trained_parameters_only() -> None:
    model = network()
    model[0].requires_grad_(False)
    adam = FlatAdam(model.parameters(), learning_rate=0.1)
    assert [set(moments) for moments in adam.state_dict()["state"].values()] == [{"step", "exp_avg", "exp_avg_sq"}]
    assert adam.flat.numel() == model[3].weight.numel() + model[3].bias.numel()


def test_others_get_no_gradient() -> None:
    first, second = nn.Linear(2, 2), nn.Linear(2, 2)
    before = second.weight.clone()
    FlatAdam(first.parameters(), learning_rate=0.1).descend(second(first(torch.ones(1, 2))).sum())
    assert second.weight.grad is None
    assert torch.equal(second.weight, before)


def test_a_parameter_that_the_loss_does_not_depend_on_is_an_error() -> None:
    first, second = nn.Linear(2, 2), nn.Linear(2, 2)
    before = first.weight.clone()
    adam = FlatAdam([*first.parameters(), *second.parameters()], learning_rate=0.1)
    with pytest.raises(RuntimeError, match="not have been used"):
        adam.descend(first(torch.ones(1, 2)).sum())
    assert torch.equal(first.weight, before)


def test_adamw_is_that_of_torch() -> None:
    ours, theirs = network(), network()
    mine, plain = AdamW(ours.parameters(), lr=0.01), torch.optim.AdamW(theirs.parameters(), lr=0.01)
    for step in range(5):
        images = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(step))
        for model, optimizer in ((ours, mine), (theirs, plain)):
            optimizer.zero_grad()
            torch.autograd.backward(model(images).square().sum())
            optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(ours.parameters(), theirs.parameters(), strict=True))


def test_a_process_that_learns_does_not_import_the_compiler() -> None:
    code = """
import sys, torch
from understudy.algorithms.optimizers import AdamW, FlatAdam
from understudy.training.distributed.config import EngineConfig
from understudy.training.distributed.engine import Engine
from understudy.training.distributed.ranks import single_rank
net = torch.nn.Linear(2, 2)
FlatAdam(net.parameters(), learning_rate=0.1).descend(net(torch.ones(1, 2)).sum())
engine = Engine(torch.nn.Linear(2, 2), EngineConfig(), single_rank())
engine.backward(engine.forward(torch.ones(1, 2)).sum(), last=True)
engine.step()
print([name for name in ("torch._dynamo", "torch.distributed.tensor") if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
