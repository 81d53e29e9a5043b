"""RLDS steps: columns and sequences of dicts give the same columns, and what does not fit is named."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from understudy.compat.rlds_steps import open_episodes
from understudy.core import EpisodeError, SpecError


def columns(length: int = 3) -> dict[str, Any]:
    flags = np.zeros(length, bool)
    first, last = flags.copy(), flags.copy()
    first[0], last[-1] = True, True
    return {
        "observation": {"x": np.arange(length, dtype=np.float32)},
        "action": np.zeros((length, 2), np.float32),
        "reward": np.ones(length, np.float32),
        "discount": np.ones(length, np.float32),
        "is_first": first,
        "is_last": last,
        "is_terminal": flags,
    }


def rows(given: dict[str, Any]) -> list[dict[str, Any]]:
    return [
        {
            **{n: v[i] for n, v in given.items() if n != "observation"},
            "observation": {"x": given["observation"]["x"][i]},
        }
        for i in range(len(given["is_first"]))
    ]


def test_columns_and_rows_are_the_same() -> None:
    spec, episodes = open_episodes([{"steps": columns()}])
    other, others = open_episodes([{"steps": rows(columns())}])
    (one,), (two,) = episodes, others
    assert spec.flat == other.flat
    assert one.keys() == two.keys() == spec.flat.keys()
    for path, column in one.items():
        assert np.array_equal(column, two[path]), path


def test_no_episode_and_missing_fields_are_refused() -> None:
    with pytest.raises(EpisodeError, match="rlds_data: expected episodes, got none"):
        open_episodes([])
    without = {name: column for name, column in columns().items() if name != "discount"}
    with pytest.raises(SpecError, match="steps/discount: expected steps with observation, action"):
        open_episodes([{"steps": without}])
    with pytest.raises(SpecError, match="episode 0: expected a dict with the steps of an RLDS episode"):
        open_episodes([{"more": 1}])


def test_a_later_episode_of_other_fields_or_lengths_is_named() -> None:
    _, episodes = open_episodes([{"steps": columns()}, {"steps": {**columns(), "extra": np.zeros(3)}}])
    next(episodes)
    with pytest.raises(SpecError, match="episode 1/steps/extra: expected the fields of the first episode"):
        next(episodes)
    _, episodes = open_episodes([{"steps": {**columns(), "reward": np.ones(2, np.float32)}}])
    with pytest.raises(SpecError, match="episode 0/steps/reward: expected 3 rows, got 2"):
        next(episodes)
