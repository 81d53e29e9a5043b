"""Conditions: a mistake in a condition is named as such, with the column that was meant."""

import sqlite3
from contextlib import closing

import pytest

from understudy.core import StoreError
from understudy.replay.format.conditions import Guard, check_condition, guard_problem

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


@pytest.mark.parametrize(
    ("condition", "got"),
    [
        ("1) or (1", "a \\) without its \\("),
        ("(success = 1", "a \\( without its \\)"),
        ("1 /*", "a /\\* without its end"),
        ("task = 'pick", "a ' without its end"),
        ('"task = 1', 'a " without its end'),
        ("1;", "a ;"),
        ("1 -- )\n)", "a \\) without its \\("),
    ],
)
def test_a_condition_is_one_expression(condition: str, got: str) -> None:
    with pytest.raises(StoreError, match=rf"expected one expression, got {got}; the columns are id"):
        check_condition(condition, SCHEMA)


@pytest.mark.parametrize(
    "condition", ["task = ')'", "task = '--' and (id > 1)", "1 /* ( */", 'task = "/*"', "[task] = 1"]
)
def test_marks_in_quotes_and_comments_do_not_count(condition: str) -> None:
    check_condition(condition, SCHEMA)


@pytest.mark.parametrize(
    ("condition", "refused"),
    [
        ("id in (select episode from spans)", "episode"),
        ("(with recursive c(x) as (select 1 union all select x + 1 from c) select count(*) from c)", "count"),
        ("randomblob(9) > ''", "randomblob"),
        ("replace(task, 'a', 'aa') = ''", "replace"),
        ("exists (select 1)", "a select"),
    ],
)
def test_a_view_reads_attributes_and_nothing_else(condition: str, refused: str) -> None:
    with pytest.raises(StoreError, match=f"{refused} is not allowed; the condition of a view may read attributes"):
        check_condition(condition, SCHEMA, of_view=True)


def test_a_view_may_call_simple_functions() -> None:
    check_condition(
        "lower(task) like 'pick%' and coalesce(success, 1) and id between 2 and max(3, 4)", SCHEMA, of_view=True
    )


def test_a_guarded_connection_only_reads_and_not_for_ever() -> None:
    with closing(sqlite3.connect(":memory:")) as db:
        db.executescript(SCHEMA + "; create table writers (incarnation)")
        db.executemany("insert into episodes values (?, null, null, null)", [(number,) for number in range(300)])
        guard = Guard(db)
        for sql in (
            "delete from episodes",
            "select * from writers",
            "pragma user_version",
            "attach ':memory:' as other",
        ):
            with guard.held(of_view=False, num_episodes=0), pytest.raises(sqlite3.DatabaseError) as caught:
                db.execute(sql)
            assert "does more than read episodes" in (guard_problem(caught.value) or "")
        endless = "select count(*) from episodes a, episodes b, episodes c where a.id + b.id + c.id > 0"
        with guard.held(of_view=True, num_episodes=300), pytest.raises(sqlite3.OperationalError) as caught:
            db.execute(endless.replace("count(*)", "1") + " and 0.5 > a.id * b.id * c.id + 1").fetchall()
        assert "took more than 1000 steps" in (guard_problem(caught.value) or "")
        db.execute("delete from episodes where id = 0")  # nobody holds the guard
        assert db.execute("select count(*) from episodes").fetchone() == (299,)
