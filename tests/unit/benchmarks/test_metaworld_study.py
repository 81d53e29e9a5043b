"""The study on Metaworld: the page has the tables that the results give, and unfinished runs give no row."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks.metaworld_study import collect, rate, table, task_table
from tests.docs.pages import DOCS

from understudy.training.runs.wilson_interval import wilson_interval

ROWS = json.loads((DOCS / "benchmarks/metaworld_study.json").read_text())["rows"]


def test_the_page_has_the_tables_of_the_results() -> None:
    page = (DOCS / "study.md").read_text()
    assert table(ROWS) in page
    assert task_table(ROWS) in page


def test_intervals_are_those_of_the_successes() -> None:
    for row in ROWS:
        assert row["success"] == row["successes"] / row["episodes"]
        assert (row["low"], row["high"]) == wilson_interval(row["successes"], row["episodes"])


def test_practice_after_corrections_counts_their_steps() -> None:
    corrected = [row for row in ROWS if row["method"].startswith("hg-dagger + ")]
    assert {row["method"] for row in corrected} == {"hg-dagger + grpo", "hg-dagger + ppo"}
    for row in corrected:
        (first,) = (one for one in ROWS if (one["method"], one["rounds"], one["seed"]) == ("hg-dagger", 1, row["seed"]))
        assert row["curve"][0][0] == first["env_steps"] < row["env_steps"]
        assert row["human_steps"] == first["human_steps"]


def test_a_rate_counts_successes() -> None:
    found = rate([{"success": True}, {"success": False}])
    assert (found["successes"], found["episodes"], found["success"]) == (1, 2, 0.5)


def test_what_has_not_finished_gives_no_row(tmp_path: Path) -> None:
    (tmp_path / "demos-0").mkdir()
    assert list(collect(tmp_path, [0])) == []
