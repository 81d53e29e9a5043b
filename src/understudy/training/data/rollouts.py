"""Rollouts: episodes in which a block policy acts and an operator may take over, recorded as experience to learn from.

The store keeps for each step who chose its action, and during a takeover also what the policy would have done.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np

from understudy.core import StoreError, Tree
from understudy.core import tree as trees
from understudy.core.cameras import CodecName
from understudy.envs.pace import Pace
from understudy.envs.teleop.takeover import Takeover
from understudy.envs.world import World
from understudy.policies.protocol import BlockPolicy, Sampling
from understudy.processes.stop import Stopped, StopRequest
from understudy.replay import View
from understudy.replay.read.view import Clause
from understudy.training.data.record import ENV, Attempts, RecordTarget
from understudy.training.data.run_episode import EpisodeResult, Show, run_episode


@dataclass(frozen=True, kw_only=True)
class RolloutConfig:
    """What to record. Start states are of the training split."""

    task: str
    """Name of the task."""
    episodes: int
    """Number of episodes in the target at which recording ends."""
    seed: int = 0
    """Seed that decides the start states, and what the policy samples."""
    sampling: Sampling = field(default_factory=Sampling)
    """How the policy samples its actions."""
    takeover_every: int = 1
    """The operator is there in one of so many episodes; in the others the policy is alone."""
    env: str | None = None
    """Name of the world with its options, which is stored with each episode as the label `env`."""
    codec: CodecName = "auto"
    """How camera frames are stored; see `encode_cameras`."""

    def __post_init__(self) -> None:
        if self.episodes < 1 or self.takeover_every < 1:
            raise StoreError(
                f"rollout: expected episodes and takeover_every from 1, got {self.episodes} and {self.takeover_every}"
            )


@dataclass(frozen=True, kw_only=True)
class RolloutReport:
    """What was recorded. All but `num_episodes` are of this call."""

    num_episodes: int  # in the target, earlier calls included
    num_recorded: int = 0
    num_successes: int = 0
    num_takeovers: int = 0  # episodes with a takeover
    num_corrected: int = 0  # those of them that succeeded
    num_broken: int = 0  # episodes that were cut because the world's process failed
    num_steps: int = 0
    num_human: int = 0  # steps that the operator chose


def rollout(
    world: World,
    target: RecordTarget,
    policy: BlockPolicy,
    config: RolloutConfig,
    *,
    takeover: Takeover | None = None,
    progress: Callable[[RolloutReport, EpisodeResult], None] | None = None,
    pace: Pace | None = None,
    show: Show | None = None,
    stop: StopRequest | None = None,
) -> RolloutReport:
    """Run episodes until the target has `episodes` of the task that are no demonstrations.

    An episode that the operator discards is recorded again, from the same start. If the world's process fails, its
    episode is cut and recording continues, as in `record`. After a `stop` request, the episode in progress ends and
    Stopped is raised.
    """
    task = world.suite.task(config.task)
    quoted = task.name.replace("'", "''")
    others = View(name="recorded", clauses=(Clause(where=f"kind != 'demonstration' and task = '{quoted}'"),))
    report = RolloutReport(num_episodes=target.num_episodes(others))
    writer = target.writer(world.step_spec, config.codec)
    attempts = Attempts(target)
    stop = stop or StopRequest()
    while report.num_episodes < config.episodes:
        number = report.num_episodes
        helped_by = takeover if number % config.takeover_every == 0 else None
        run = partial(
            run_episode,
            world,
            writer,
            act=BlockActor(policy, task.instruction, config.sampling, seed=(config.seed, number), takeover=helped_by),
            takeover=helped_by,
            seed=config.seed + number,
            options={"task": task.name},
            pace=pace,
            show=show,
            stop=stop,
            labels={} if config.env is None else {ENV: config.env},
        )
        try:
            stop.check()
            episode = attempts.run(run)
        except Stopped as stopped:
            stopped.sentence = (
                f"stopped; {number} of {config.episodes} episodes are recorded; the same command continues"
            )
            raise
        num_stored = number + attempts.num_broken - report.num_broken + (episode is not None)
        report = replace(report, num_episodes=num_stored, num_broken=attempts.num_broken)
        if episode is None:
            continue
        report = replace(
            report,
            num_recorded=report.num_recorded + 1,
            num_successes=report.num_successes + episode.success,
            num_takeovers=report.num_takeovers + (episode.num_human > 0),
            num_corrected=report.num_corrected + (episode.num_human > 0 and episode.success),
            num_steps=report.num_steps + episode.num_steps,
            num_human=report.num_human + episode.num_human,
        )
        if progress is not None:
            progress(report, episode)
    return report


class BlockActor:
    """A block policy as an episode calls it: it decides on a block of actions and gives them one by one.

    After a step of the operator the rest of the block is dropped, because it was made for another situation.
    """

    def __init__(
        self,
        policy: BlockPolicy,
        instruction: str,
        sampling: Sampling,
        *,
        seed: tuple[int, ...],
        takeover: Takeover | None = None,
    ):
        self._policy = policy
        self._instruction = instruction
        self._sampling = sampling
        self._rng = np.random.default_rng(seed)
        self._takeover = takeover
        self._block: list[Tree] = []  # actions that are left
        self._human_steps = 0  # of the operator, when the block was made

    def __call__(self, observation: Tree) -> tuple[Tree, int]:
        """The next action and the version of the policy."""
        human_steps = 0 if self._takeover is None else self._takeover.summary.num_steps
        if not self._block or human_steps != self._human_steps:
            self._human_steps = human_steps
            self._block = self._decide(observation)
        return self._block.pop(0), self._policy.version

    def _decide(self, observation: Tree) -> list[Tree]:
        one = trees.map_leaves(lambda leaf: np.asarray(leaf)[None], observation)
        acted = self._policy.act(one, [self._instruction], rngs=[self._rng], sampling=self._sampling)
        return [_action(acted.action, number) for number in range(self._policy.block_steps)]


def _action(block: Tree, number: int) -> Tree:
    """One action of the only block of a batch."""
    return trees.map_leaves(lambda leaf: leaf[0, number], block)
