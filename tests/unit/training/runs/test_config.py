"""Configs go to JSON and back equal, and a wrong one says where."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any, Literal

import pytest

from understudy.training.runs.config import ConfigError, from_json, to_json


@dataclass(frozen=True, kw_only=True)
class Inner:
    sizes: tuple[int, ...] = (8, 8)
    pair: tuple[float, float] = (-1.0, 1.0)


@dataclass(frozen=True, kw_only=True)
class Outer:
    name: str
    rate: float = 0.5
    number: int | None = None
    mode: Literal["fast", "slow"] = "fast"
    on: bool = False
    inner: Inner = field(default_factory=Inner)
    other: Inner | None = None


def test_there_and_back_is_equal() -> None:
    for config in (
        Outer(name="a"),
        Outer(name="b", number=3, on=True, inner=Inner(sizes=()), other=Inner(pair=(0, 2))),
    ):
        assert from_json(Outer, json.loads(json.dumps(to_json(config)))) == config


def test_what_is_left_out_has_its_default() -> None:
    assert from_json(Outer, {"name": "a", "inner": {}}) == Outer(name="a")


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"nam": "x"}, "nam: no such option; did you mean 'name'?"),
        ({"zzz": 1}, "zzz: no such option; choose one of name, rate"),
        ({"inner": {"size": [1]}}, "inner/size: no such option; did you mean 'sizes'?"),
        ({"inner": {"sizes": [1, "two"]}}, "inner/sizes/1: expected int, got str 'two'"),
        ({"inner": {"pair": [1.0]}}, "inner/pair: expected 2 values, got 1"),
        ({"inner": 3}, "inner: expected a dict of options"),
        ({"inner": {"sizes": 3}}, "inner/sizes: expected a list"),
        ({"mode": "medium"}, "mode: expected one of 'fast', 'slow', got 'medium'"),
        ({"number": "3"}, "number: expected int"),
        ({"on": 1}, "on: expected bool"),
        ({"rate": True}, "rate: expected float"),
    ],
)
def test_a_wrong_field_is_named(change: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        from_json(Outer, {"name": "a", **change})


def test_an_option_without_a_default_is_asked_for() -> None:
    with pytest.raises(ConfigError, match=r"Outer: .*'name'.*give every option that has no default"):
        from_json(Outer, {})
