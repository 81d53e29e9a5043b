"""Trajectories of RLinf: fields [T, B, ...] and what stands beside them; what does not fit is named."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from understudy.compat.rlinf.trajectory import Layout, build, check_same_fields, parse_trajectory
from understudy.core import SpecError


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


def test_a_trajectory_is_parsed() -> None:
    found = parse_trajectory(fields(versions=np.full((4, 2), 3), note=["a", (1, None)]), "trajectories[0]")
    assert found is not None
    assert (found.length, found.batch, found.num_steps, found.labels) == (4, 2, 8, {"model_weights_id": "w7"})
    assert found.layout.paired
    assert set(found.layout.spec.extras.flat) == {"versions"}
    assert set(found.layout.spec.observation.flat) == {"x"}
    assert found.values == {"model_weights_id": "w7", "note": ["a", {"$tuple": [1, None]}]}


def test_a_layout_is_read_again_from_its_text() -> None:
    found = parse_trajectory(fields(dones=np.zeros((6, 2, 1), bool)), "t")
    assert found is not None
    assert found.layout.by_path["dones"].num_edges == 2
    assert Layout.from_json(json.loads(found.layout.to_json())) == found.layout


def test_observations_without_their_next_are_kept_apart() -> None:
    found = parse_trajectory(fields(next_obs={}), "t")
    assert found is not None
    assert not found.layout.paired
    assert set(found.layout.spec.extras.flat) == {"curr_obs/x"}
    assert set(found.layout.spec.observation.flat) == {"step"}


def test_one_without_steps_is_none() -> None:
    assert parse_trajectory({"max_episode_length": 3, "curr_obs": {}}, "t") is None


def test_rows_between_epochs_are_split_off_and_joined_again() -> None:
    flags = np.arange(12).reshape(6, 2) % 3 == 0  # two epochs of two steps, each with the row of its reset
    values = np.arange(12.0).reshape(6, 2)
    found = parse_trajectory(fields(dones=flags, prev_values=values), "t")
    assert found is not None
    assert np.array_equal(found.arrays["dones"], flags[[1, 2, 4, 5]])
    assert np.array_equal(found.edges["dones"], flags[[0, 3]])
    assert np.array_equal(found.arrays["prev_values"], values[[0, 1, 3, 4]])
    again = build(found.layout, found.arrays, found.edges, found.values)
    assert np.array_equal(again["dones"], flags)
    assert np.array_equal(again["prev_values"], values)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"rewards": None}, "t: expected rewards or prev_logprobs, which tell its length"),
        ({"rewards": np.full((4, 2), np.nan)}, "t/rewards: expected finite numbers"),
        ({"rewards": np.ones((3, 2))}, r"t/curr_obs/x: expected \[3, 2, ...\] as its length has"),
        ({"rewards": np.ones((0, 2))}, r"t: expected at least one step, got \[0, 2\]"),
        ({"note": np.array([["a"]])}, "t/note: expected an array of numbers"),
        ({"curr_obs": {"a/b": np.zeros((4, 2))}}, "t/curr_obs: field names are text without '/', got 'a/b'"),
    ],
)
def test_what_does_not_fit_is_named_by_its_path(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(SpecError, match=text):
        parse_trajectory(fields(**changes), "t")


def test_fields_may_come_and_go_and_not_change() -> None:
    first, more, other = (
        parse_trajectory(fields(**changes), "t")
        for changes in ({}, {"q": np.zeros((4, 2))}, {"rewards": np.ones((4, 2, 1), np.float32)})
    )
    assert first is not None and more is not None and other is not None  # noqa: PT018
    check_same_fields(more.layout, first.layout.by_path, "t")
    check_same_fields(first.layout, more.layout.by_path, "t")
    with pytest.raises(SpecError, match=r"t/rewards: expected float32 \[\] as in the .* before, got float32 \[1\]"):
        check_same_fields(other.layout, first.layout.by_path, "t")
