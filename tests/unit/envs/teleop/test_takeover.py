"""Takeover: who chose each action, what the policy had wanted, and the counts that people look at."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest
from tests.worlds import CountingWorld

from understudy.core import Source
from understudy.envs.teleop.takeover import AlwaysScript, Reading, ScriptedHuman, Takeover, TakeoverError, TakeoverWorld

POLICY, HUMAN = np.float32([0.0]), np.float32([1.0])


class Planned:
    """A person who is active in the steps of a plan."""

    source = Source.HUMAN

    def __init__(self, plan: list[bool], reason: str = "", since_s: float | None = None):
        self._plan = plan
        self._reason, self._since_s = reason, since_s
        self._at = 0
        self.closed = False

    def begin(self) -> None:
        self._at = 0

    def read(self) -> Reading:
        active = self._plan[self._at]
        self._at += 1
        return Reading(action=HUMAN, reason=self._reason, since_s=self._since_s) if active else Reading()

    def close(self) -> None:
        self.closed = True


def test_the_person_acts_when_active_and_the_proposal_is_kept() -> None:
    takeover = Takeover(Planned([False, True, True, False, True]))
    takeover.begin()
    choices = [takeover.choose(POLICY) for _ in range(5)]
    assert [c.source for c in choices] == [Source.POLICY, Source.HUMAN, Source.HUMAN, Source.POLICY, Source.HUMAN]
    assert [float(c.action[0]) for c in choices] == [0, 1, 1, 0, 1]
    assert all(c.proposal is POLICY for c in choices)
    assert [c.began for c in choices] == [False, True, False, False, True]
    assert (takeover.summary.count, takeover.summary.num_steps) == (2, 3)


def test_counts_begin_anew_with_each_episode() -> None:
    takeover = Takeover(Planned([True, True]))
    takeover.begin()
    takeover.choose(POLICY)
    takeover.begin()
    assert takeover.summary.labels() == {}
    takeover.choose(POLICY)
    assert takeover.summary.count == 1  # the same hold of the device, and a new episode


def test_reasons_and_latency_are_told() -> None:
    takeover = Takeover(Planned([True, True], reason="stuck", since_s=time.monotonic() - 0.25), operator="ada")
    takeover.begin()
    takeover.choose(POLICY)
    takeover.choose(POLICY)
    labels = takeover.summary.labels()
    assert labels["takeover_reasons"] == "stuck"
    assert (labels["intervention_count"], labels["intervention_steps"]) == ("1", "2")
    assert 250 <= float(labels["takeover_latency_ms"]) < 5000


def test_without_a_policy_somebody_must_act() -> None:
    takeover = Takeover(Planned([False]))
    takeover.begin()
    with pytest.raises(TakeoverError, match="use a device that acts to the end"):
        takeover.choose(None)


def test_the_world_with_takeovers_says_what_hil_serl_says() -> None:
    device = Planned([False, True, True, False])
    world = TakeoverWorld(CountingWorld(max_steps=4), Takeover(device))
    world.reset(seed=1)
    infos: list[dict[str, Any]] = []
    for _ in range(4):
        *_, info = world.step(POLICY)
        infos.append(info)
    assert ["intervene_action" in info for info in infos] == [False, True, True, False]
    assert infos[1]["intervene_action"] is HUMAN
    assert all(info["proposal"] is POLICY for info in infos)
    assert (infos[-1]["intervention_count"], infos[-1]["intervention_steps"]) == (1, 2)
    assert world.world.executed == [0.0, 1.0, 1.0, 0.0]  # type: ignore[attr-defined]
    world.close()
    assert device.closed


def test_an_expert_drives_all_the_way() -> None:
    takeover = Takeover(AlwaysScript(lambda: HUMAN))
    takeover.begin()
    assert [takeover.choose(None).source for _ in range(3)] == [Source.SCRIPT] * 3


def drive(human: ScriptedHuman, progress: list[float]) -> list[bool]:
    """Whether the human acts, as a list of progress goes by."""
    now = iter(progress)
    human._progress = lambda: next(now)
    human.begin()
    return [human.read().action is not None for _ in progress]


def test_a_scripted_human_takes_over_when_nothing_moves_and_lets_go_again() -> None:
    human = ScriptedHuman(lambda: HUMAN, lambda: 0.0, patience_steps=3, burst_steps=2)
    assert drive(human, [0, 0, 0, 0, 0, 0, 0, 0, 0, 0]) == [0, 0, 0, 1, 1, 0, 0, 1, 1, 0]


def test_a_scripted_human_leaves_a_policy_alone_that_gets_on() -> None:
    human = ScriptedHuman(lambda: HUMAN, lambda: 0.0, patience_steps=3, burst_steps=2)
    assert not any(drive(human, [0.1 * step for step in range(20)]))


def test_progress_below_the_margin_is_none() -> None:
    slow = [0.01 * step for step in range(6)]
    for margin, acts in ((0.005, False), (0.5, True)):
        human = ScriptedHuman(lambda: HUMAN, lambda: 0.0, patience_steps=3, margin=margin)
        assert any(drive(human, slow)) == acts


def test_a_scripted_human_may_drive_to_the_end() -> None:
    human = ScriptedHuman(lambda: HUMAN, lambda: 0.0, patience_steps=2, burst_steps=None)
    assert drive(human, [0] * 6) == [0, 0, 1, 1, 1, 1]


def test_a_scripted_human_is_refused_what_makes_no_sense() -> None:
    with pytest.raises(TakeoverError, match="from 1, got 0, 10"):
        ScriptedHuman(lambda: HUMAN, lambda: 0.0, patience_steps=0)
