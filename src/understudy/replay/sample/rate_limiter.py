"""RateLimiter: holds the ratio of samples to inserts inside a window. It counts and answers yes or no; it never blocks.

With `ins` steps inserted, `smp` sampled, `size` steps in the store, and `diff = ins * samples_per_insert - smp`:

    may sample k:  size >= min_size  and  diff - k >= min_diff
    may insert k:  size < min_size   or   diff + k * samples_per_insert <= max_diff

`min_diff` and `max_diff` lie `error_window` below and above `min_size * samples_per_insert`. A window that is too small
for `max_insert` and `max_sample` could leave both sides waiting for each other, so it is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace

from understudy.core import StoreError


@dataclass(frozen=True, kw_only=True)
class RateLimiter:
    """An immutable value: `inserted`, `sampled` and `removed` return a new one."""

    samples_per_insert: float
    min_size: int
    error_window: float
    max_insert: int = 1  # steps that are inserted at once, at most
    max_sample: int = 1  # steps that are sampled at once, at most
    num_inserted: int = 0
    num_sampled: int = 0
    num_removed: int = 0

    def __post_init__(self) -> None:
        if self.samples_per_insert <= 0 or self.min_size < 1 or self.max_insert < 1 or self.max_sample < 1:
            raise StoreError(
                f"rate limiter: expected samples_per_insert above 0 and sizes of at least 1, "
                f"got {self.samples_per_insert}, min_size {self.min_size}, max_insert {self.max_insert}, "
                f"max_sample {self.max_sample}"
            )
        min_window = (self.max_sample + self.max_insert * self.samples_per_insert) / 2
        if self.error_window < min_window:
            raise StoreError(
                f"error_window: expected at least {min_window:g} for samples of {self.max_sample} and inserts of "
                f"{self.max_insert}, got {self.error_window:g}; with less, both sides could wait for each other"
            )

    @property
    def size(self) -> int:
        return self.num_inserted - self.num_removed

    @property
    def diff(self) -> float:
        return self.num_inserted * self.samples_per_insert - self.num_sampled

    def may_sample(self, count: int) -> bool:
        """Whether `count` samples may be drawn now."""
        self._check(count, self.max_sample, "max_sample")
        low = self.min_size * self.samples_per_insert - self.error_window
        return self.size >= self.min_size and self.diff - count >= low

    def may_insert(self, count: int) -> bool:
        """Whether `count` steps may be inserted now."""
        self._check(count, self.max_insert, "max_insert")
        high = self.min_size * self.samples_per_insert + self.error_window
        return self.size < self.min_size or self.diff + count * self.samples_per_insert <= high

    def inserted(self, count: int) -> RateLimiter:
        return replace(self, num_inserted=self.num_inserted + count)

    def sampled(self, count: int) -> RateLimiter:
        return replace(self, num_sampled=self.num_sampled + count)

    def removed(self, count: int) -> RateLimiter:
        return replace(self, num_removed=self.num_removed + count)

    def to_json(self) -> dict[str, float]:
        return asdict(self)

    @staticmethod
    def from_json(value: Mapping[str, float]) -> RateLimiter:
        return RateLimiter(**value)  # type: ignore[arg-type]

    def _check(self, count: int, limit: int, name: str) -> None:
        if count > limit:
            raise StoreError(f"rate limiter: asked about {count} at once, and {name} is {limit}; raise {name}")
