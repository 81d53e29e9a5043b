"""Conditions: a mistake in a condition is named as such, with the column that was meant."""

import pytest

from understudy.core import StoreError
from understudy.replay.format.conditions import check_condition

SCHEMA = "create table episodes (id, kind, task, success); create table spans (episode, num_rows)"


@pytest.mark.parametrize(
    "condition",
    [
        "1",
        "success = 1",
        "kind in ('practice', 'it''s') -- a comment",
        "id in (select episode from spans)",
        "TASK is null",
    ],
)
def test_a_right_condition_passes(condition: str) -> None:
    check_condition(condition, SCHEMA)


@pytest.mark.parametrize(
    ("condition", "problem"),
    [
        ("sucess = 1", "there is no column 'sucess'; did you mean 'success'?"),
        ("sucess = 1 or sucess is null", "there is no column 'sucess'; did you mean 'success'?"),
        ("kind = 'sucess' and taks = 'x'", "there is no column 'taks'; did you mean 'task'?"),
        (
            "kind = demonstration",
            "there is no column 'demonstration'; put text in single quotes; the columns are id, k",
        ),
        ("success = ", "syntax error; the columns are id, kind, task, success"),
        ("lenght(task) > 3", "no such function: lenght; the columns are"),
        ("1) ; drop table episodes; --", "the columns are"),
        ("task = ?", "the columns are"),
    ],
)
def test_a_wrong_condition_says_what_is_wrong(condition: str, problem: str) -> None:
    with pytest.raises(StoreError) as caught:
        check_condition(condition, SCHEMA)
    assert str(caught.value).startswith(f"condition {condition!r}: ")
    assert problem in str(caught.value)


def test_marks_and_values_must_be_as_many() -> None:
    check_condition("task = ? and id > ?", SCHEMA, num_values=2)
    with pytest.raises(StoreError, match=r"condition 'task = \?': "):
        check_condition("task = ?", SCHEMA, num_values=2)
