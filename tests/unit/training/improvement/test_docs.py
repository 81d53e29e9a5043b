"""docs/improve.md knows every option, and says what the defaults are."""

from __future__ import annotations

import re
from dataclasses import fields

import pytest
from tests.docs.pages import DOCS

from understudy.algorithms.recap import ValueTrainingConfig
from understudy.training.improvement.config import METHODS, ImproveConfig, RecapConfig

PAGE = (DOCS / "improve.md").read_text()


@pytest.mark.parametrize("config", [ImproveConfig, RecapConfig, ValueTrainingConfig])
def test_every_option_is_listed(config: type) -> None:
    rows = [row.split("|")[1] for row in PAGE.splitlines() if row.startswith("| `")]
    listed = {name for row in rows for name in re.findall(r"[`.](\w+)`", row)}
    without = {"recap", "value"}  # groups of options, each with a table or rows of its own
    assert {field.name for field in fields(config)} - listed - without == set()


def test_the_defaults_of_recap_are_as_the_page_says() -> None:
    recap, value = RecapConfig(), ValueTrainingConfig()
    for name in ("advantage_steps", "good_share", "guidance"):
        assert f"| `{name}` | {getattr(recap, name)} |" in PAGE
    assert f"| {value.updates}, {value.batch_size} | of the value model |" in PAGE
    assert f"| {value.hidden}, {value.learning_rate}, {value.weight_decay} |" in PAGE


def test_every_method_has_a_row() -> None:
    assert all(f"| `{method}`" in PAGE for method in METHODS)
