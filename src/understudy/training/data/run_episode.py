"""Rollout: one episode of a world, with whoever acts in it, into a writer.

The writer may be a store's own or a remote one: both have the same calls. What is recorded is what was executed: the
action, who chose it, what the policy had wanted and of which version it was.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from understudy.core import NO_VERSION, EpisodeError, EpisodeInfo, Kind, Source, Step, Tree
from understudy.envs.pace import Pace
from understudy.envs.teleop.takeover import Choice, Takeover
from understudy.envs.world import World
from understudy.replay.write.writer import Writer

# A policy as an episode sees it: an observation to an action and the version of the parameters that gave it.
Act: TypeAlias = Callable[[Tree], tuple[Tree, int]]

# What a screen is given: what is seen, and what to say about it (task, instruction, step, source, reward, success).
Show: TypeAlias = Callable[[Tree, Mapping[str, Any]], None]

IDLE_S = 0.05  # between two looks at a person who has not begun


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
    world: World,
    writer: Writer,
    *,
    act: Act | None = None,
    takeover: Takeover | None = None,
    kind: Kind = "practice",
    seed: int | None = None,
    options: Mapping[str, Any] | None = None,
    source: Source = Source.POLICY,
    pace: Pace | None = None,
    show: Show | None = None,
) -> Rolled:
    """One episode of `world` into `writer`, by a policy, by whoever holds the device, or by both.

    `source` is who `act` is. Without it the episode begins with the first act of whoever holds the device. `pace` keeps
    a control rate; `show` is given what is seen before each step and at the end. If anything raises on the way, what
    was lived so far is kept as an episode that was cut.
    """
    if act is None and takeover is None:
        raise EpisodeError("act, takeover: expected at least one of them, got neither; somebody must act")
    if takeover is not None:
        takeover.begin()
    observation, said = world.reset(seed=seed, options=options)
    seen: dict[str, Any] = {"task": said["task"], "instruction": said["instruction"], "step": 0, "source": None}

    def tell() -> None:
        if show is not None:
            show(observation, seen)

    tell()
    if act is None and takeover is not None:
        takeover.wait(lambda: _idle(tell))
    info = _begin(writer, said, takeover, kind)
    num_steps, num_human, total, success = 0, 0, 0.0, False
    if pace is not None:
        pace.begin()
    try:
        while True:
            choice, version = _choose(observation, act, source, takeover)
            next_observation, reward, terminated, truncated, outcome = world.step(choice.action)
            success = bool(outcome["success"])
            if choice.verdict is not None:  # a person has the last word
                terminated, truncated, success = True, False, choice.verdict
                reward = float(success)
            writer.append(_step(observation, choice, version, reward, terminated, truncated))
            observation = next_observation
            num_steps += 1
            num_human += choice.source == Source.HUMAN
            total += reward
            seen |= {
                "step": num_steps,
                "source": choice.source.name.lower(),
                "action": choice.action,
                "reward": reward,
                "success": success,
            }
            tell()
            if terminated or truncated:
                break
            if pace is not None:
                pace.wait()
    except BaseException:
        writer.cut(observation if num_steps else None)
        raise
    labels = {**info.labels, **(takeover.summary.labels() if takeover is not None else {})}
    writer.end(observation, success=success, labels=labels)
    return Rolled(
        num_steps=num_steps,
        num_human=num_human,
        total_reward=total,
        success=success,
        info=info,
        num_takeovers=takeover.summary.count if takeover is not None else 0,
    )


def _idle(tell: Callable[[], None]) -> None:
    tell()
    time.sleep(IDLE_S)


def _begin(writer: Writer, said: Mapping[str, Any], takeover: Takeover | None, kind: Kind) -> EpisodeInfo:
    info = EpisodeInfo(
        task=said["task"],
        instruction=said["instruction"],
        init_state=said["start"],
        seed=said["seed"],
        split=said["split"],
        actor=writer.name,
        kind=kind,
        operator=takeover.operator if takeover is not None else None,
    )
    writer.begin(info)
    return info


def _choose(observation: Tree, act: Act | None, source: Source, takeover: Takeover | None) -> tuple[Choice, int]:
    proposal, version = (None, NO_VERSION) if act is None else act(observation)
    if takeover is None:
        return Choice(action=proposal, source=source, proposal=proposal), version
    choice = takeover.choose(proposal)
    return (replace(choice, source=source) if choice.source == Source.POLICY else choice), version


def _step(observation: Tree, choice: Choice, version: int, reward: float, terminated: bool, truncated: bool) -> Step:
    proposal = None if choice.action is choice.proposal else choice.proposal
    return Step(
        observation=observation,
        action=choice.action,
        reward=reward,
        terminated=terminated,
        truncated=truncated,
        source=choice.source,
        policy_version=version,
        proposal=proposal,
    )
