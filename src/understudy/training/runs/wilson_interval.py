"""Success rates with their 95 % Wilson interval."""

from __future__ import annotations

import math
from dataclasses import dataclass

Z_95 = 1.959963984540054


@dataclass(frozen=True, kw_only=True)
class SuccessRate:
    """The number of successes among a number of episodes."""

    num_successes: int
    num_episodes: int

    @property
    def rate(self) -> float:
        return self.num_successes / self.num_episodes if self.num_episodes else 0.0

    @property
    def interval(self) -> tuple[float, float]:
        """The 95 % Wilson interval of the rate."""
        return wilson_interval(self.num_successes, self.num_episodes)

    def __str__(self) -> str:
        low, high = self.interval
        return f"{100 * self.rate:.0f} % of {self.num_episodes} (95 %: {100 * low:.0f} to {100 * high:.0f})"


def wilson_interval(successes: int, episodes: int, z: float = Z_95) -> tuple[float, float]:
    """The Wilson score interval of a success rate. It also holds near 0 and 1 and for few episodes."""
    if not 0 <= successes <= episodes:
        raise ValueError(f"successes: expected 0 to {episodes}, got {successes}")
    if episodes == 0:
        return 0.0, 1.0
    share = successes / episodes
    centre = share + z * z / (2 * episodes)
    spread = z * math.sqrt(share * (1 - share) / episodes + z * z / (4 * episodes * episodes))
    whole = 1 + z * z / episodes
    low, high = (centre - spread) / whole, (centre + spread) / whole
    return max(min(low, share), 0.0), min(max(high, share), 1.0)  # rounding may put the rate itself outside
