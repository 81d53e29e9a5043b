"""AsyncBlocks: a block policy as the function that a control loop calls at each step, which never waits for long.

| loop | takes from | blocks on | woken by |
|---|---|---|---|
| `__call__`, in the caller | the current block | the next block, once the current one has run out | the thread |
| the thread | one request at a time | the next request; the policy | `__call__`, `close` |

The first block of an episode is computed while the world stands still. Afterwards, each time `n_action_steps` actions
have been executed since the last observation that was acted on, the next block is requested from the thread. Until it
is there the current one goes on, and the new one takes over at the action that is then due. With an `inference_delay`
it takes over after exactly so many actions, and is waited for if it is not there.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np

from understudy.core import AnyTree, Tree
from understudy.core import tree as trees
from understudy.core.closeable import Closeable
from understudy.policies.protocol import Acted, BlockPolicy, PolicyError, Sampling
from understudy.policies.rtc.config import RTCConfig
from understudy.policies.rtc.continuation import Continuation

NUM_DELAYS = 10  # of the last blocks; the largest is expected of the next one


@dataclass(frozen=True, kw_only=True)
class AsyncReport:
    """What happened since the beginning, first blocks of episodes not counted."""

    num_blocks: int
    num_waits: int  # steps at which the next block was due and not there
    mean_delay: float  # steps that were executed while a block was computed
    max_delay: int

    def __str__(self) -> str:
        return (
            f"{self.num_blocks} blocks while acting; delay mean {self.mean_delay:.1f}, max {self.max_delay} steps; "
            f"{self.num_waits} steps waited for a block"
        )


class AsyncBlocks(Closeable):
    """The policy is used by one thread at a time. Close it, or use it as a context manager."""

    def __init__(self, policy: BlockPolicy, config: RTCConfig, *, sampling: Sampling, seed: int = 0):
        """The random numbers of episode n are those of `default_rng([seed, n])`."""
        self.continuation = Continuation(policy, config)
        self.seams: list[int] = []  # of this episode: the steps of the first actions that the old blocks did not have
        self._sampling, self._seed = sampling, seed
        self._delay = config.inference_delay
        self._delays: deque[int] = deque(maxlen=NUM_DELAYS)
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="rtc")
        self._num_episodes = self._num_blocks = self._num_waits = self._sum_delays = self._max_delay = 0
        self._instruction: str | None = None
        self._rng = np.random.default_rng()
        self._is_warm = False
        self._block: AnyTree = None  # [H, ...]
        self._version = 0
        self._at = 0  # the action of the block that is due
        self._step = 0  # of the episode
        self._pending: Future[Acted] | None = None
        self._requested_at = 0  # the action that was due when the block was requested
        self._expected = 0  # the delay that it was requested with

    def begin(self, info: Mapping[str, Any], rng: np.random.Generator | None = None) -> None:
        """Begin an episode with what the world's reset returned; a block that is under way is dropped."""
        if self._pending is not None:
            self._pending.result()
            self._pending = None
        self._rng = rng or np.random.default_rng([self._seed, self._num_episodes])
        self._num_episodes += 1
        self._instruction = info["instruction"] or ""
        self._block, self._at, self._step, self.seams = None, 0, 0, []

    def __call__(self, observation: Tree) -> tuple[Tree, int]:
        """The action for this step and the version of the policy that chose it."""
        if self._instruction is None:
            raise PolicyError("begin: expected it before the first action of an episode; call it with reset's info")
        if self._block is None:
            self._use(self._compute(observation, None, 0, 0, self._rng), 0)
            if not self._is_warm:  # the first call with guidance is slow: nothing moves yet
                self._is_warm = True
                most = self.continuation.max_delay
                self._compute(observation, self._block, self.continuation.n_action_steps, most, np.random.default_rng())
        else:
            self._take_over()
            if self._pending is None and self._at >= self.continuation.n_action_steps:
                self._request(observation)
                self._take_over()
        at, self._at, self._step = self._at, self._at + 1, self._step + 1
        return trees.map_leaves(lambda leaf: leaf[at].copy(), self._block), self._version

    @property
    def report(self) -> AsyncReport:
        return AsyncReport(
            num_blocks=self._num_blocks,
            num_waits=self._num_waits,
            mean_delay=self._sum_delays / max(self._num_blocks, 1),
            max_delay=self._max_delay,
        )

    def close(self) -> None:
        """End the thread, after the block that it computes."""
        self._thread.shutdown(wait=True, cancel_futures=True)

    def _request(self, observation: Tree) -> None:
        most = self.continuation.max_delay
        self._expected = max(self._delays, default=most) if self._delay is None else self._delay
        observed = trees.map_leaves(np.array, observation)  # the caller may reuse its memory
        self._requested_at = self._at
        self._pending = self._thread.submit(self._compute, observed, self._block, self._at, self._expected, self._rng)

    def _compute(self, observation: Tree, previous: AnyTree, used: int, delay: int, rng: np.random.Generator) -> Acted:
        return self.continuation.act(
            trees.map_leaves(lambda leaf: np.asarray(leaf)[None], observation),
            [self._instruction or ""],
            [previous],
            used=used,
            delay=delay,
            rngs=[rng],
            sampling=self._sampling,
        )

    def _take_over(self) -> None:
        """Replace the current block by the requested one, if it is time."""
        if self._pending is None:
            return
        passed = self._at - self._requested_at
        has_ended = self._at >= self.continuation.block_steps
        is_due = has_ended or (self._delay is not None and passed >= self._delay)
        if not is_due and (self._delay is not None or not self._pending.done()):
            return
        self._num_waits += passed > 0 and not self._pending.done()
        acted, self._pending = self._pending.result(), None
        self._num_blocks += 1
        self._delays.append(passed)
        self._sum_delays += passed
        self._max_delay = max(self._max_delay, passed)
        self.seams.append(self._step + max(0, self._expected - passed))
        self._use(acted, passed)

    def _use(self, acted: Acted, at: int) -> None:
        self._block = trees.map_leaves(lambda leaf: leaf[0], acted.action)
        self._version = acted.version
        self._at = at
