"""Run episode: one episode of a world, by a policy, a human or both, recorded into a writer.

The writer may be a store's own or a remote one: both have the same methods. It records the executed action, who chose
it, the policy's proposal and the policy's version; and what the world says of its sensors (`World.extras`, `labels`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, TypeAlias

from understudy.core import NO_VERSION, AnyTree, EpisodeError, EpisodeInfo, Kind, Source, Step, Tree
from understudy.core.episode import FPS
from understudy.core.times import LATE_STEPS
from understudy.envs.pace import Pace
from understudy.envs.teleop.takeover import Choice, Takeover
from understudy.envs.world import World
from understudy.processes.stop import StopRequest
from understudy.replay.write.writer import Writer

# A policy as an episode calls it: an observation to an action and the version of the policy.
Act: TypeAlias = Callable[[Tree], tuple[Tree, int]]

# A screen: gets the observation, and a status with task, instruction, step, source, reward and success.
Show: TypeAlias = Callable[[Tree, Mapping[str, Any]], None]

DISCARDED = "discarded"  # label of an episode that the operator discarded
IDLE_S = 0.05  # between two polls of an operator who has not started


@dataclass(frozen=True, kw_only=True)
class EpisodeResult:
    """The outcome of an episode."""

    num_steps: int
    num_human: int  # steps that the human chose: the intervention steps
    num_takeovers: int
    total_reward: float
    success: bool
    info: EpisodeInfo
    discarded: bool = False  # by the operator, who wants to record it again; what there is of it is stored as cut


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
    on_reset: Callable[[Mapping[str, Any]], None] | None = None,
    stop: StopRequest | None = None,
    labels: Mapping[str, str] = MappingProxyType({}),
) -> EpisodeResult:
    """Run one episode of `world` and record it into `writer`; a policy acts, or an operator, or both.

    `source` says what `act` is. Without `act` the episode starts with the operator's first input. `pace` keeps a
    control rate from the first action on; `show` is called before each step and at the end; `on_reset` gets what the
    world's reset said, such as `AsyncBlocks.begin`. The episode gets these `labels` besides its own. If anything
    raises, the steps so far are stored as a cut episode. With `stop`, an operator is no longer waited for after a
    request, and an episode that has had its time to end is truncated there.
    """
    if act is None and takeover is None:
        raise EpisodeError("act, takeover: expected at least one of them, got neither; give a policy or a takeover")
    if takeover is not None:
        takeover.begin()
    observation, reset_info = world.reset(seed=seed, options=options)
    extras = world.extras()
    if on_reset is not None:
        on_reset(reset_info)
    status: dict[str, Any] = {
        "task": reset_info["task"],
        "instruction": reset_info["instruction"],
        "step": 0,
        "source": None,
    }

    def update_screen() -> None:
        if show is not None:
            show(observation, status)

    def idle() -> None:
        """While the operator has not acted yet: what is seen, and recorded as the first observation, is of now."""
        nonlocal observation, extras
        if stop is not None:
            stop.check()
        if not world.deterministic:
            world.refresh()
            observation, extras = world.observe(), world.extras()
        update_screen()
        time.sleep(IDLE_S)

    update_screen()
    if act is None and takeover is not None:
        takeover.wait(idle)
    info = _begin(writer, reset_info, takeover, kind, world.hz if pace is None else pace.hz)
    num_steps, num_human, total, success = 0, 0, 0.0, False
    missed_before = 0
    if pace is not None:
        missed_before = pace.num_missed
    try:
        while True:
            choice, version = _choose(observation, act, source, takeover)
            if choice.discard:
                break
            if pace is not None and num_steps == 0:
                pace.begin()  # nothing moves before the first action, so it may take its time
            next_observation, reward, terminated, truncated, outcome = world.step(choice.action)
            success = bool(outcome["success"])
            if choice.verdict is not None:  # the operator's verdict overrides the world's
                terminated, truncated, success = True, False, choice.verdict
                reward = float(success)
            truncated = truncated or (stop is not None and stop.overdue and not terminated)
            writer.append(_step(observation, extras, choice, version, reward, terminated, truncated))
            observation, extras = next_observation, world.extras()
            num_steps += 1
            num_human += choice.source == Source.HUMAN
            total += reward
            status |= {
                "step": num_steps,
                "source": choice.source.name.lower(),
                "action": choice.action,
                "reward": reward,
                "success": success,
            }
            update_screen()
            if terminated or truncated:
                break
            if pace is not None:
                pace.wait()
    except BaseException:
        writer.cut(observation if num_steps else None)
        raise
    labels = {**world.labels(), **labels, **info.labels}
    if takeover is not None and kind != "demonstration":  # in which the operator always drives
        labels |= takeover.summary.labels()
    if pace is not None:
        labels[LATE_STEPS] = str(pace.num_missed - missed_before)
    if choice.discard:
        writer.cut(observation if num_steps else None, success=False, labels={**labels, DISCARDED: "yes"})
    else:
        writer.end(observation, success=success, labels=labels)
    return EpisodeResult(
        num_steps=num_steps,
        num_human=num_human,
        total_reward=total,
        success=success,
        info=info,
        num_takeovers=takeover.summary.count if takeover is not None else 0,
        discarded=choice.discard,
    )


def _begin(
    writer: Writer, reset_info: Mapping[str, Any], takeover: Takeover | None, kind: Kind, hz: float | None
) -> EpisodeInfo:
    info = EpisodeInfo(
        task=reset_info["task"],
        instruction=reset_info["instruction"],
        init_state=reset_info["start"],
        seed=reset_info["seed"],
        split=reset_info["split"],
        actor=writer.name,
        kind=kind,
        operator=takeover.operator if takeover is not None else None,
        labels={} if hz is None else {FPS: f"{hz:g}"},
    )
    writer.begin(info)
    return info


def _choose(observation: Tree, act: Act | None, source: Source, takeover: Takeover | None) -> tuple[Choice, int]:
    proposal: AnyTree = None
    version = NO_VERSION
    if act is not None:
        proposal, version = act(observation)
    if takeover is None:
        return Choice(action=proposal, source=source, proposal=proposal), version
    choice = takeover.choose(proposal)
    return (replace(choice, source=source) if choice.source == Source.POLICY else choice), version


def _step(
    observation: Tree, extras: Tree, choice: Choice, version: int, reward: float, terminated: bool, truncated: bool
) -> Step:
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
        extras=extras,
    )
