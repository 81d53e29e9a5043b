"""Trajectories as rows: episodes end where they should, in groups that fit, and the way back is exact."""

from __future__ import annotations

import numpy as np
import pytest
from tests.unit.compat.rlinf.test_trajectory import fields

from understudy.compat.rlinf.rows import arrays_of, rows_of
from understudy.compat.rlinf.trajectory import ParsedTrajectory, parse_trajectory
from understudy.core import NO_VERSION, EpisodeInfo, Source

INFO = EpisodeInfo(actor="rlinf", labels={"trajectory": "k"})


def parsed(**changes: object) -> ParsedTrajectory:
    x = np.arange(10, dtype=np.float32).reshape(5, 2, 1)  # each next_obs is the following curr_obs
    found = parse_trajectory(fields(curr_obs={"x": x[:-1]}, next_obs={"x": x[1:]}, **changes), "t")
    assert found is not None
    return found


def test_a_column_is_an_episode_with_its_last_observation() -> None:
    (rows,) = rows_of(parsed(), INFO, {"complete": "yes"}, 2**20)
    assert [(e.num_rows, e.state, e.info.labels) for e in rows.episodes] == [
        (5, "cut", {"trajectory": "k"}),
        (5, "cut", {"trajectory": "k", "complete": "yes"}),
    ]
    assert rows.columns["observation/x"][:, 0].tolist() == [0, 2, 4, 6, 8, 1, 3, 5, 7, 9]
    assert rows.columns["is_step"].tolist() == ([True] * 4 + [False]) * 2


@pytest.mark.parametrize(
    ("name", "terminated", "truncated"),
    [("terminations", True, False), ("truncations", False, True), ("dones", True, False)],
)
def test_the_row_of_the_reset_is_left_out_and_ends_are_read(name: str, terminated: bool, truncated: bool) -> None:
    ends = np.zeros((5, 2), bool)  # one row more: the reset, before the steps
    ends[2, 1] = True  # of the second column, after its second step
    (rows,) = rows_of(parsed(**{name: ends}), INFO, {}, 2**20)
    assert [(e.num_rows, e.state) for e in rows.episodes] == [(5, "cut"), (3, "ended"), (3, "cut")]
    assert (rows.columns["terminated"][6], rows.columns["truncated"][6]) == (terminated, truncated)
    assert rows.columns["terminated"].sum() + rows.columns["truncated"].sum() == 1


def test_humans_and_versions_are_read() -> None:
    flags = np.zeros((4, 2, 3), bool)
    flags[1, 0, 2] = True
    versions = np.array([[[3.0], [3.0]]] * 3 + [[[3.5], [4.0]]])
    (rows,) = rows_of(parsed(intervene_flags=flags, versions=versions), INFO, {}, 2**20)
    assert rows.columns["source"].tolist() == [0, int(Source.HUMAN)] + [0] * 8
    assert rows.columns["policy_version"].tolist() == [3, 3, 3, NO_VERSION, NO_VERSION, 3, 3, 3, 4, NO_VERSION]


@pytest.mark.parametrize("max_bytes", [1, 200, 2**20])
def test_the_way_back_is_exact_whatever_the_groups(max_bytes: int) -> None:
    rng = np.random.default_rng(0)
    given = parsed(dones=rng.random((6, 2, 1)) < 0.4, prev_values=rng.normal(size=(6, 2)))
    groups = list(rows_of(given, INFO, {}, max_bytes))
    assert (len(groups) == 1) == (max_bytes == 2**20)
    episodes = []
    for rows in groups:
        stops = np.cumsum([episode.num_rows for episode in rows.episodes])
        for stop, episode in zip(stops, rows.episodes, strict=True):
            episodes.append({path: c[stop - episode.num_rows : stop] for path, c in rows.columns.items()})
    arrays, edges = arrays_of(given.layout, given.shape, episodes)
    assert arrays.keys() == given.arrays.keys()
    for path, array in given.arrays.items():
        assert np.array_equal(arrays[path], array)
    for path, array in given.edges.items():
        assert np.array_equal(edges[path], array)
