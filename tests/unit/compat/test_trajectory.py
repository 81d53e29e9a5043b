"""Trajectories of RLinf: fields [T, B, ...] become steps, and what does not fit is named."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from understudy.compat.trajectory import check_same_fields, parse_trajectory
from understudy.core import Source, SpecError


def fields(length: int = 4, batch: int = 2, **changes: Any) -> dict[str, Any]:
    x = np.arange(length * batch, dtype=np.float32).reshape(length, batch, 1)
    return {
        "curr_obs": {"x": x},
        "next_obs": {"x": x + 1},
        "actions": np.zeros((length, batch, 3), np.float32),
        "rewards": np.ones((length, batch), np.float32),
        "model_weights_id": "w7",
        **changes,
    }


def test_a_trajectory_becomes_steps() -> None:
    flags = np.zeros((4, 2, 1), bool)
    flags[1, 0] = True
    found = parse_trajectory(fields(intervene_flags=flags, versions=np.full((4, 2), 3)), "trajectories[0]")
    assert (found.length, found.batch, found.num_steps, found.labels) == (4, 2, 8, {"model_weights_id": "w7"})
    step = found.step(1, 0)
    assert (step.source, step.policy_version, float(step.reward)) == (Source.HUMAN, 3, 1.0)
    assert found.step(1, 1).source == Source.POLICY
    assert found.next_observation(1, 0)["x"].tolist() == [3.0]
    assert set(found.spec().extras.flat) == {"intervene_flags", "versions"}


@pytest.mark.parametrize(
    ("name", "terminated", "truncated"),
    [("terminations", True, False), ("truncations", False, True), ("dones", True, False)],
)
def test_the_row_of_the_reset_is_left_out_and_ends_are_read(name: str, terminated: bool, truncated: bool) -> None:
    ends = np.zeros((5, 2), bool)  # one row more: the reset, before the steps
    ends[4, 1] = True
    found = parse_trajectory(fields(**{name: ends}), "t")
    step = found.step(3, 1)
    assert (step.terminated, step.truncated) == (terminated, truncated)
    assert not found.step(3, 0).last


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"actions": None}, "t/actions: expected in every trajectory, got nothing"),
        ({"rewards": np.full((4, 2), np.nan)}, "t/rewards: expected finite numbers"),
        ({"rewards": np.ones((3, 2))}, r"t/rewards: expected \[4, 2, ...\] as actions have"),
        ({"next_obs": {"y": np.zeros((4, 2, 1))}}, "t/next_obs/x: expected float32"),
        ({"note": np.array(["a"])}, r"t/note: expected an array \[T, B, ...\]"),
    ],
)
def test_what_does_not_fit_is_named_by_its_path(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(SpecError, match=text):
        parse_trajectory(fields(**changes), "t")


def test_other_fields_than_before_are_refused() -> None:
    first, more = parse_trajectory(fields(), "t").spec(), parse_trajectory(fields(q=np.zeros((4, 2))), "t").spec()
    check_same_fields(first, first, "t")
    with pytest.raises(SpecError, match="t/q: expected no such field as in the first trajectory"):
        check_same_fields(more, first, "t")
