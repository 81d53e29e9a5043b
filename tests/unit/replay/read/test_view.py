"""Views: which steps are in, now and as of a past commit; and conditions that are refused."""

from pathlib import Path

import numpy as np
import pytest

from understudy.core import StoreError
from understudy.replay import Reader, Store
from understudy.replay.read.step_index import StepIndex
from understudy.replay.read.view import DEMO, ONLINE, Clause, View, ViewIndex, count_views

ALL = View(name="all", clauses=(Clause(),))


def test_a_condition_on_something_that_is_no_attribute_is_refused() -> None:
    with pytest.raises(StoreError, match=r"view 'x': condition 'num_human > 0': there is no column 'num_human'; "):
        View(name="x", clauses=(Clause(where="num_human > 0"),))


def test_a_typo_in_a_view_names_the_attribute() -> None:
    with pytest.raises(StoreError, match=r"view 'x': condition 'sucess = 1': .* did you mean 'success'\?"):
        View(name="x", clauses=(Clause(), Clause(where="sucess = 1")))


def test_a_comment_in_a_clause_ends_with_it(reader: Reader) -> None:
    """The three clauses would read the whole catalog if the comments took what follows them."""
    hidden = "'\n and ((select count(*) from sqlite_master) > 5) and --'"
    view = View(name="x", clauses=tuple(Clause(where=where) for where in ("0 --", hidden, "0 or\n 0")))
    assert count_views(reader, [view]) == [(0, 0)]
    for where in ("1) or (1", "1 /*", "(select 1 from writers)"):
        with pytest.raises(StoreError, match="view 'x': condition"):
            View(name="x", clauses=(Clause(where=where),))


def test_a_view_is_counted_now_and_as_of_a_commit(reader: Reader) -> None:
    everything, demo, online = count_views(reader, [ALL, DEMO, ONLINE])
    assert everything == (60, 6)
    assert demo == (17, 2)
    assert online == (43, 4)
    assert count_views(reader, [ALL], until=2) == [(3, 1)]


def test_positions_are_those_of_the_rows_after_the_steps(reader: Reader) -> None:
    steps = StepIndex(reader)
    steps.follow()
    index = ViewIndex(steps, DEMO)
    index.follow()
    span, offset = index.find(np.arange(len(index)))
    episode, row = steps.identity(span, offset)
    assert list(zip(episode.tolist(), (row - 1).tolist(), strict=True)) == [(2, i) for i in range(10)] + [
        (5, i) for i in range(7)
    ]
    assert index.episodes().tolist() == [2, 5]
    assert index.episode_counts(np.array([2, 5])).tolist() == [10, 7]
    found = index.find_in_episodes(np.array([5]), np.array([3]))
    assert [int(part[0]) for part in steps.identity(*found)] == [5, 4]
    assert index.row_mask().sum() == 17
    assert index.position_of_row(int(steps.row_number(span, offset)[12])) == 12


def test_a_step_needs_as_many_rows_after_it_as_are_asked_for(reader: Reader) -> None:
    steps = StepIndex(reader)
    steps.follow()
    for lookahead, expected in ((1, 60), (3, 60 - 2 * 5 - 1), (26, 0)):
        index = ViewIndex(steps, ALL, lookahead=lookahead)
        index.follow()
        assert len(index) == expected


def test_a_deleted_episode_leaves_and_comes_back(path: Path) -> None:
    with Store.open(path) as store, Reader(path) as reader:
        steps = StepIndex(reader)
        index = ViewIndex(steps, ALL)

        def num_steps() -> int:
            steps.follow()
            index.follow()
            return len(index)

        assert num_steps() == 20
        store.delete([2])
        assert num_steps() == 15
        deleted = store.last_commit
        store.restore([2])
        assert num_steps() == 20
        assert count_views(reader, [ALL], until=deleted) == [(15, 3)]
