"""Rollout: one episode of a world, with whoever acts in it, into a writer.

The writer may be a store's own or a remote one: both have the same calls. What is recorded is what was executed: the
action, who chose it, what the policy had wanted and of which version it was.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from understudy.core import NO_VERSION, EpisodeError, EpisodeInfo, Kind, Source, Step, Tree
from understudy.envs.takeover import Choice, Takeover
from understudy.envs.world import World
from understudy.replay.writer import Writer

# A policy as an episode sees it: an observation to an action and the version of the parameters that gave it.
Act: TypeAlias = Callable[[Tree], tuple[Tree, int]]


@dataclass(frozen=True, kw_only=True)
class Rolled:
    """What came of an episode."""

    num_steps: int
    num_human: int
    num_takeovers: int
    total_reward: float
    success: bool
    info: EpisodeInfo


def run_episode(
    world: World, writer: Writer, *, act: Act | None = None, takeover: Takeover | None = None, kind: Kind = "practice",
    seed: int | None = None, options: Mapping[str, Any] | None = None,
) -> Rolled:  # fmt: skip
    """One episode of `world` into `writer`, by a policy, by whoever holds the device, or by both.

    If anything raises on the way, what was lived so far is kept as an episode that was cut.
    """
    if act is None and takeover is None:
        raise EpisodeError("act, takeover: expected at least one of them, got neither; somebody must act")
    if takeover is not None:
        takeover.begin()
    observation, said = world.reset(seed=seed, options=options)
    info = _begin(writer, said, takeover, kind)
    num_steps, num_human, total, success = 0, 0, 0.0, False
    try:
        while True:
            choice, version = _choose(observation, act, takeover)
            next_observation, reward, terminated, truncated, outcome = world.step(choice.action)
            writer.append(_step(observation, choice, version, reward, terminated, truncated))
            observation = next_observation
            num_steps += 1
            num_human += choice.source == Source.HUMAN
            total += reward
            success = bool(outcome["success"])
            if terminated or truncated:
                break
    except BaseException:
        writer.cut(observation if num_steps else None)
        raise
    labels = {**info.labels, **(takeover.summary.labels() if takeover is not None else {})}
    writer.end(observation, success=success, labels=labels)
    return Rolled(
        num_steps=num_steps, num_human=num_human, total_reward=total, success=success, info=info,
        num_takeovers=takeover.summary.count if takeover is not None else 0,
    )  # fmt: skip


def _begin(writer: Writer, said: Mapping[str, Any], takeover: Takeover | None, kind: Kind) -> EpisodeInfo:
    info = EpisodeInfo(
        task=said["task"], instruction=said["instruction"], init_state=said["start"], seed=said["seed"],
        split=said["split"], actor=writer.name, kind=kind, operator=takeover.operator if takeover is not None else None,
    )  # fmt: skip
    writer.begin(info)
    return info


def _choose(observation: Tree, act: Act | None, takeover: Takeover | None) -> tuple[Choice, int]:
    proposal, version = (None, NO_VERSION) if act is None else act(observation)
    if takeover is not None:
        return takeover.choose(proposal), version
    return Choice(action=proposal, source=Source.POLICY, proposal=proposal), version


def _step(
    observation: Tree, choice: Choice, version: int, reward: float, terminated: bool, truncated: bool
) -> Step:  # fmt: skip
    by_policy = choice.source == Source.POLICY
    return Step(
        observation=observation, action=choice.action, reward=reward, terminated=terminated, truncated=truncated,
        source=choice.source, policy_version=version, proposal=None if by_policy else choice.proposal,
    )  # fmt: skip
