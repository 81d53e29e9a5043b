"""CriticEnsemble: the same as its critics one by one."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from understudy.algorithms.offpolicy.critics import CriticEnsemble


@pytest.mark.parametrize("layer_norm", [True, False])
def test_an_ensemble_is_its_critics_one_by_one(layer_norm: bool) -> None:
    critics = CriticEnsemble(4, (3, 8, 8), layer_norm=layer_norm)
    critics.init_parameters(torch.Generator().manual_seed(1))
    critics.requires_grad_(False)
    for name, weight in critics.named_parameters():
        if name.endswith("bias"):
            weight.copy_(torch.randn(weight.shape, generator=torch.Generator().manual_seed(2)))
    x = torch.randn(10, 3, generator=torch.Generator().manual_seed(3))
    found = critics(x)
    assert found.shape == (4, 10)
    arrays = {name: weight.numpy().astype(np.float64) for name, weight in critics.state_dict().items()}
    for e in range(4):
        y = x.numpy().astype(np.float64)
        for layer in range(3):
            y = y @ arrays[f"{layer}.weight"][e] + arrays[f"{layer}.bias"][e]
            if layer < 2:
                if layer_norm:
                    y = (y - y.mean(axis=1, keepdims=True)) / np.sqrt(y.var(axis=1, keepdims=True) + 1e-5)
                y = np.maximum(y, 0)
        np.testing.assert_allclose(found[e].numpy(), y[:, 0], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(critics(x, torch.tensor([2, 0])), found[[2, 0]])
