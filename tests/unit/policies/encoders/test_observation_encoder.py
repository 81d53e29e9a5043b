"""ObservationEncoder: features of cameras and state, against loops in numpy."""

from __future__ import annotations

import numpy as np
import torch
from tests.unit.algorithms.batches import CAMERAS, random_tree

from understudy.policies import EncoderConfig, Inputs, Stats
from understudy.policies.encoders.observation_encoder import ObservationEncoder

CPU = torch.device("cpu")
CONFIG = EncoderConfig(filters=(4, 8), latent=6)


def test_features_equal_convolutions_written_out() -> None:
    encoder = ObservationEncoder(CONFIG, CAMERAS.observation, Stats.none(Inputs(CAMERAS.observation)), CPU)
    encoder.init_parameters(torch.Generator().manual_seed(3))
    encoder.requires_grad_(False)
    for name, weight in encoder.named_parameters():
        if name.endswith("bias"):
            weight.copy_(torch.linspace(-0.2, 0.3, len(weight)))
    observation = random_tree(CAMERAS.observation, 2, np.random.default_rng(1))
    found = encoder(encoder.inputs.tensors(observation, CPU)).numpy()
    assert found.shape == (2, encoder.size) == (2, 6 + 6 + 5)
    arrays = {name: weight.numpy().astype(np.float64) for name, weight in encoder.state_dict().items()}
    for row in range(2):
        parts = [latent(arrays, number, observation[camera][row]) for number, camera in enumerate(("front", "wrist"))]
        wanted = np.concatenate([*parts, observation["state"][row]])
        np.testing.assert_allclose(found[row], wanted, rtol=1e-4, atol=1e-5)


def latent(weights: dict[str, np.ndarray], camera: int, image: np.ndarray) -> np.ndarray:  # type: ignore[type-arg]
    x = image.astype(np.float64) / 255 - 0.5
    for number in range(2):
        kernel, bias = (weights[f"images.cameras.{camera}.conv_{number}.{kind}"] for kind in ("weight", "bias"))
        padded = np.pad(x, ((1, 1), (1, 1), (0, 0)))
        height, width = (x.shape[0] + 1) // 2, (x.shape[1] + 1) // 2
        out = np.zeros((height, width, len(bias)))
        for i in range(height):
            for j in range(width):
                window = padded[2 * i : 2 * i + 3, 2 * j : 2 * j + 3]
                out[i, j] = np.einsum("hwc,ochw->o", window, kernel) + bias
        x = np.maximum(out, 0)
    flat = x.transpose(2, 0, 1).ravel()
    y = weights[f"images.cameras.{camera}.latent.weight"] @ flat + weights[f"images.cameras.{camera}.latent.bias"]
    return np.tanh((y - y.mean()) / np.sqrt(y.var() + 1e-5))
