"""Flow matching: pure functions of tensors. Time t runs from 0, where x is noise, to 1, where x is a block of actions.

    x_t = (1 - t) x_0 + t x_1          on the straight line from noise x_0 to a demonstrated block x_1
    v(x_t, t) is trained to x_1 - x_0  so that v is the mean velocity of all lines through x_t

`num_steps` Euler steps of dx = v dt turn noise into a block. With noise in each step (Flow-SDE, a level a) the same
distributions are passed through, because what the noise spreads the second term of the drift pulls together again:

    dx = (v - sigma^2 / (2 (1 - t)) (x - t v)) dt + sigma dW,   sigma^2 = a^2 (1 - t) / max(t, 1 / num_steps)

Where the noise is learned (Flow-Noise), a step is x + v dt + std noise, and a network gives std within bounds.

x - t v is the noise that v takes x_t to be made of, and -(x - t v) / (1 - t) the gradient of the log-density of x_t.
x + (1 - t) v is the block that it takes x_t to become.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

HALF_LOG_2PI = 0.5 * math.log(2 * math.pi)


def interpolated(noise: Tensor, action: Tensor, time: Tensor) -> Tensor:
    """x_t [B, H, A] on the lines from noise to actions, at times [B]."""
    way = time[:, None, None]
    return (1.0 - way) * noise + way * action


def squared_errors(velocity: Tensor, noise: Tensor, action: Tensor) -> Tensor:
    """[B, H]: squared distances of velocities [B, H, A] from those of the lines, mean over an action's numbers."""
    return (velocity - (action - noise)).square().mean(dim=-1)


def towards_good(plain: Tensor, good: Tensor, guidance: float) -> Tensor:
    """The velocity of a policy that knows what is good: from that without knowing, `guidance` times the way to good."""
    return plain + guidance * (good - plain)


def times(num_steps: int) -> list[float]:
    """The times at which the Euler steps begin."""
    return [step / num_steps for step in range(num_steps)]


def noise_stds(num_steps: int, noise_level: float) -> list[float]:
    """The standard deviation of the noise that each step adds: sigma times the root of the step's length."""
    first = 1.0 / num_steps
    return [noise_level * math.sqrt((1.0 - time) / max(time, first) / num_steps) for time in times(num_steps)]


def step_mean(x: Tensor, velocity: Tensor, num_steps: int, time: Tensor | float, std: Tensor | float) -> Tensor:
    """Where a step that begins at x and adds noise of this standard deviation leads on average."""
    return x + velocity / num_steps - std**2 / (2.0 * (1.0 - time)) * (x - time * velocity)


def sde_steps(before: Tensor, velocity: Tensor, noise_level: float) -> tuple[Tensor, Tensor]:
    """Where K steps from [B, K, H, A] lead on average, and the standard deviations [K, 1, 1] of their noise."""
    num_steps = before.shape[1]
    std = _per_step(noise_stds(num_steps, noise_level), before)
    return step_mean(before, velocity, num_steps, _per_step(times(num_steps), before), std), std


def bounded_std(raw: Tensor, bounds: tuple[float, float]) -> Tensor:
    """Standard deviations between the bounds, from numbers without any; 0 becomes the middle of their logarithms."""
    low, high = math.log(bounds[0]), math.log(bounds[1])
    return torch.exp(low + (high - low) * 0.5 * (1.0 + torch.tanh(raw)))


def guided(velocity: Tensor, x: Tensor, wanted: Tensor, weight: Tensor, time: float, max_weight: float) -> Tensor:
    """The velocity [B, H, A], turned so that the block becomes the wanted one where weights [B, H] are above 0.

    This is the guidance of real-time chunking: the weighted difference from the block that x would become, taken back
    to x by the gradient. `velocity` was computed from `x`, which requires its gradient.
    """
    becomes = x + (1.0 - time) * velocity
    difference = (wanted - becomes.detach()) * weight[..., None]
    (back,) = torch.autograd.grad(becomes, x, difference)
    return velocity.detach() + guidance_weight(time, max_weight) * back


def guidance_weight(time: float, max_weight: float) -> float:
    """(1 - t) / (t r^2) with r^2 = (1 - t)^2 / (t^2 + (1 - t)^2), up to `max_weight`; it has no limit near 0 and 1."""
    if not 0.0 < time < 1.0:
        return max_weight
    return min(max_weight, (time**2 + (1.0 - time) ** 2) / (time * (1.0 - time)))


def step_log_probs(after: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    """[B, H, K]: log-densities of where K steps led, [B, K, H, A], summed over the numbers of an action."""
    each = -0.5 * ((after - mean) / std).square() - torch.log(std) - HALF_LOG_2PI
    return each.sum(dim=-1).transpose(1, 2)


def step_entropies(std: Tensor) -> Tensor:
    """[B, H, K]: entropies of the noise of K steps with standard deviations [B, K, H, A]."""
    return (0.5 + HALF_LOG_2PI + torch.log(std)).sum(dim=-1).transpose(1, 2)


def noise_log_probs(noise: Tensor, temperature: float) -> Tensor:
    """[B, H]: log-densities of the noise [B, H, A] that blocks were made from, summed over the numbers of an action."""
    each = -0.5 * (noise / temperature).square() - math.log(temperature) - HALF_LOG_2PI
    return each.sum(dim=-1)


def _per_step(values: list[float], like: Tensor) -> Tensor:
    """As [K, 1, 1]."""
    return torch.tensor(values, dtype=like.dtype, device=like.device)[:, None, None]
