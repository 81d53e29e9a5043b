"""Sources of worlds and of policies refuse the same things, each with its own error."""

from __future__ import annotations

from typing import Any

import pytest

from understudy.core import SpecError
from understudy.envs.world_factory import MAX_OPTIONS_BYTES, WorldFactory
from understudy.policies.protocol import PolicyError
from understudy.policies.subprocess import PolicyFactory
from understudy.processes.factory_spec import FactorySpec


@pytest.mark.parametrize(
    ("kind", "error", "example"),
    [(WorldFactory, SpecError, "understudy.envs.toy:ToyTable"), (PolicyFactory, PolicyError, "my_vla:Policy")],
)
def test_sources_that_make_no_sense(kind: type[FactorySpec], error: type[Exception], example: str) -> None:
    told: dict[str, dict[str, Any]] = {
        f"^factory: expected 'module:name', such as {example}, got 'toy'$": {"factory": "toy"},
        "^options: expected a dict with names that are text, got ": {"options": {1: 2}},
        "^options: expected plain JSON values, got .*; pass numbers": {"options": {"x": object()}},
        "^env: expected names and values that are text, got {'x': 1}": {"env": {"x": 1}},
    }
    for text, options in told.items():
        with pytest.raises(error, match=text):
            kind(**{"factory": "a:b", **options})


def test_options_of_a_world_have_a_limit() -> None:
    with pytest.raises(SpecError, match=f"options: expected up to {MAX_OPTIONS_BYTES} bytes of JSON"):
        WorldFactory(factory="a:b", options={"x": "y" * MAX_OPTIONS_BYTES})
    PolicyFactory(factory="a:b", options={"x": "y" * MAX_OPTIONS_BYTES})
