"""Trained weights move as torch's own Adam moves them, and critics are what they are one by one."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from understudy.algorithms.offpolicy.critics import critics, init_critics, subset
from understudy.algorithms.offpolicy.flat_adam import Trained

CPU = torch.device("cpu")


def test_steps_are_those_of_adam() -> None:
    generator = torch.Generator().manual_seed(0)
    weights = {"a": torch.randn(3, 4, generator=generator), "b": torch.randn(5, generator=generator)}
    trained = Trained(weights, learning_rate=0.01, device=CPU)
    theirs = {name: weight.clone().requires_grad_() for name, weight in weights.items()}
    adam = torch.optim.Adam(theirs.values(), lr=0.01)
    for step in range(5):
        scale = torch.linspace(0.1, 1.0, 4) * (step + 1)

        def loss(w: dict[str, torch.Tensor], scale: torch.Tensor = scale) -> torch.Tensor:
            return (w["a"].square() @ scale).sum() + w["b"].sin().sum()

        adam.zero_grad()
        loss(theirs).backward()  # type: ignore[no-untyped-call]
        adam.step()
        trained.step(loss(trained.weights))
        norm = torch.cat([weight.grad.reshape(-1) for weight in theirs.values() if weight.grad is not None]).norm()
        torch.testing.assert_close(trained.gradient_norm(), norm)
    for name, weight in theirs.items():
        torch.testing.assert_close(trained.frozen[name], weight.detach(), rtol=1e-6, atol=1e-6)
        assert trained.frozen[name].data_ptr() == trained.weights[name].data_ptr()
    assert trained.tensors()["num_steps"] == 5


def test_a_weight_without_a_part_in_the_loss_is_an_error() -> None:
    trained = Trained({"a": torch.ones(2), "b": torch.ones(2)}, learning_rate=0.1, device=CPU)
    with pytest.raises(RuntimeError, match="not have been used"):
        trained.step(trained.weights["a"].sum())


@pytest.mark.parametrize("layer_norm", [True, False])
def test_an_ensemble_is_its_critics_one_by_one(layer_norm: bool) -> None:
    weights = init_critics(4, (3, 8, 8, 1), torch.Generator().manual_seed(1))
    for name, weight in weights.items():
        if name.endswith("bias"):
            weight.copy_(torch.randn(weight.shape, generator=torch.Generator().manual_seed(2)))
    x = torch.randn(10, 3, generator=torch.Generator().manual_seed(3))
    found = critics(weights, x, 2, layer_norm=layer_norm)
    assert found.shape == (4, 10)
    arrays = {name: weight.numpy().astype(np.float64) for name, weight in weights.items()}
    for e in range(4):
        y = x.numpy().astype(np.float64)
        for layer in range(3):
            y = y @ arrays[f"critic/{layer}/weight"][e] + arrays[f"critic/{layer}/bias"][e]
            if layer < 2:
                if layer_norm:
                    y = (y - y.mean(axis=1, keepdims=True)) / np.sqrt(y.var(axis=1, keepdims=True) + 1e-5)
                y = np.maximum(y, 0)
        np.testing.assert_allclose(found[e].numpy(), y[:, 0], rtol=1e-4, atol=1e-5)
    some = critics(subset(weights, torch.tensor([2, 0])), x, 2, layer_norm=layer_norm)
    torch.testing.assert_close(some, found[[2, 0]])
