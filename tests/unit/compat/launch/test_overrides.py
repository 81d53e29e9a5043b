"""Options in the words of Hydra."""

from __future__ import annotations

from typing import Any

import pytest

from understudy.compat.launch.overrides import flatten, parse_overrides
from understudy.core import UnderstudyError


@pytest.mark.parametrize(
    ("word", "value"),
    [
        ("a=8", 8),
        ("a=5e-6", 5e-6),
        ("a=0.", 0.0),
        ("a=True", True),
        ("a=false", False),
        ("a=null", None),
        ("a=", ""),
        ("a=libero_10", "libero_10"),
        ("a='true'", "true"),
        ('a="/x y/z"', "/x y/z"),
        ("a=['console','wandb']", ["console", "wandb"]),
        ("a=[one,2]", ["one", 2]),
        ("a=[]", []),
        ("a=b=c", "b=c"),
        ("a=(1,2)", "(1,2)"),
        ("+a=1", 1),
        ("++a=1", 1),
    ],
)
def test_a_value_is_what_hydra_reads(word: str, value: Any) -> None:
    assert parse_overrides([word]) == {"a": value}


def test_the_last_one_counts_and_a_tilde_removes() -> None:
    assert parse_overrides(["a.b=1", "c=2", "a.b=3", "~c"]) == {"a.b": 3}


@pytest.mark.parametrize("word", ["--help", "alone", "=1"])
def test_what_is_no_option_is_refused(word: str) -> None:
    with pytest.raises(UnderstudyError, match="expected an option of Hydra as NAME=VALUE"):
        parse_overrides([word])


def test_a_nested_config_has_paths() -> None:
    assert flatten({"a": {"b": {"c": 1}, "d": [2]}, "e": None}) == {"a.b.c": 1, "a.d": [2], "e": None}
