"""WorldSource: a world named by text, so that any process and any interpreter can build it."""

from __future__ import annotations

import importlib
import inspect
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from understudy.core import SpecError
from understudy.core.spec import describe

MAX_OPTIONS_BYTES = 64 * 2**10  # they are sent before the process can read, so they must fit into its buffer


@dataclass(frozen=True, kw_only=True)
class WorldSource:
    """What builds a world, `factory(**options)`, and the interpreter and variables of the process it lives in."""

    factory: str  # "module:name"
    options: Mapping[str, Any] = field(default_factory=dict)  # plain JSON values
    python: str | None = None  # an interpreter, such as envs/libero/bin/python, that has numpy; None: this one
    env: Mapping[str, str] = field(default_factory=dict)  # on top of this process's own variables

    def __post_init__(self) -> None:
        module, colon, name = self.factory.partition(":")
        if not (module and colon and name):
            raise SpecError(
                f"factory: expected 'module:name', such as understudy.envs.toy:ToyTable, got {self.factory!r}"
            )
        if not all(isinstance(key, str) for key in self.options):
            raise SpecError(f"options: expected a dict with names that are text, got {describe(self.options)}")
        try:
            plain = json.loads(json.dumps(dict(self.options)))
        except (TypeError, ValueError) as error:
            raise SpecError(f"options: expected plain JSON values, got {error}; pass numbers, text and lists") from None
        if len(json.dumps(plain)) > MAX_OPTIONS_BYTES:
            raise SpecError(f"options: expected up to {MAX_OPTIONS_BYTES} bytes of JSON; put the rest into a file")
        object.__setattr__(self, "options", plain)
        if not all(isinstance(x, str) for pair in self.env.items() for x in pair):
            raise SpecError(f"env: expected names and values that are text, got {dict(self.env)!r}; convert them")
        object.__setattr__(self, "env", dict(self.env))

    @property
    def label(self) -> str:
        """The short name, for messages."""
        return self.factory.rpartition(":")[2]

    def build(self) -> Any:
        """The world, in this process."""
        return build(self.factory, self.options)


def build(factory: str, options: Mapping[str, Any]) -> Any:
    """Call the factory by its name."""
    module, _, name = factory.partition(":")
    found: Any = importlib.import_module(module)
    for part in name.split("."):
        found = getattr(found, part)
    try:
        inspect.signature(found).bind(**options)
    except TypeError as error:
        raise SpecError(f"options: {factory} cannot be built with {dict(options)!r}: {error}") from None
    return found(**options)
