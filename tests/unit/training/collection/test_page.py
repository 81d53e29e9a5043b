"""The code of docs/collection.md is run as it stands, and its tables name every option."""

from __future__ import annotations

import dataclasses
import inspect
import re

import pytest
from tests.docs.pages import DOCS, run_page

from understudy.training.collection.collector import Collector
from understudy.training.collection.group_filter import FilterConfig
from understudy.training.collection.task_start_plan import PlanConfig
from understudy.training.onpolicy.config import TaskEvaluationConfig

PAGE = DOCS / "collection.md"


def test_the_code_runs(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_page(PAGE) == 1
    said = capsys.readouterr().out.splitlines()
    assert said[0].startswith("iteration 0: 2 of 2 groups after 1 wave, 0 carried over, rejected: none;")
    assert said[1] == "8 (3, 1) [0, 1]"


@pytest.mark.parametrize("config", [PlanConfig, FilterConfig, TaskEvaluationConfig])
def test_every_option_is_told_of_with_its_default(config: type) -> None:
    rows = _rows(config.__name__)
    assert set(rows) == {field.name for field in dataclasses.fields(config)}
    for field in dataclasses.fields(config):
        if isinstance(field.default, int | float) and not isinstance(field.default, bool):
            assert rows[field.name] == str(field.default)


def test_every_option_of_the_collector_is_told_of() -> None:
    parameters = inspect.signature(Collector).parameters
    rows = _rows("Collector")
    assert list(rows) == list(parameters)
    for name, parameter in parameters.items():
        if type(parameter.default) is int:
            assert rows[name] == str(parameter.default)


def _rows(name: str) -> dict[str, str]:
    """The options and defaults in the table whose first column is headed so."""
    table = PAGE.read_text().split(f"| `{name}` |")[1].split("\n\n")[0]
    return {option: default.strip("`") for option, default in re.findall(r"^\| `(\w+)` \| (.*?) ?\|", table, re.M)}
