"""WorldFactory: a world named by text, so that any process and any interpreter can build it."""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping
from typing import Any

from understudy.core import SpecError
from understudy.processes.child_main import find
from understudy.processes.factory_spec import FactorySpec

MAX_OPTIONS_BYTES = 64 * 2**10  # they are sent before the process can read, so they must fit into its buffer


class WorldFactory(FactorySpec):
    """What builds a world, `factory(**options)`, and the interpreter and variables of the process it lives in."""

    error = SpecError
    example = "understudy.envs.toy:ToyTable"

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(json.dumps(self.options)) > MAX_OPTIONS_BYTES:
            raise SpecError(f"options: expected up to {MAX_OPTIONS_BYTES} bytes of JSON; put the rest into a file")

    def build(self) -> Any:
        """The world, in this process."""
        return build(self.factory, self.options)


def build(factory: str, options: Mapping[str, Any]) -> Any:
    """Call the factory by its name."""
    found = find(factory)
    try:
        inspect.signature(found).bind(**options)
    except TypeError as error:
        raise SpecError(f"options: {factory} cannot be built with {dict(options)!r}: {error}") from None
    return found(**options)
