"""FactorySpec: names a factory and its options as text, so that any process and any interpreter can call it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from understudy.core import UnderstudyError
from understudy.core.spec import describe


@dataclass(frozen=True, kw_only=True)
class FactorySpec:
    """The call `factory(**options)`, and the interpreter and environment variables of the process that makes it."""

    error: ClassVar[type[UnderstudyError]]  # raised for an invalid spec
    example: ClassVar[str]  # of a factory, for error messages

    factory: str  # "module:name"
    options: Mapping[str, Any] = field(default_factory=dict)  # plain JSON values
    python: str | None = None  # an interpreter, such as envs/libero/bin/python, that has numpy; None: this one
    env: Mapping[str, str] = field(default_factory=dict)  # added to this process's own variables

    def __post_init__(self) -> None:
        module, colon, name = self.factory.partition(":")
        if not (module and colon and name):
            raise self.error(f"factory: expected 'module:name', such as {self.example}, got {self.factory!r}")
        if not all(isinstance(key, str) for key in self.options):
            raise self.error(f"options: expected a dict with names that are text, got {describe(self.options)}")
        try:
            plain = json.loads(json.dumps(dict(self.options)))
        except (TypeError, ValueError) as error:
            raise self.error(
                f"options: expected plain JSON values, got {error}; pass numbers, text and lists"
            ) from None
        object.__setattr__(self, "options", plain)
        if not all(isinstance(x, str) for pair in self.env.items() for x in pair):
            raise self.error(f"env: expected names and values that are text, got {dict(self.env)!r}; convert them")
        object.__setattr__(self, "env", dict(self.env))

    @property
    def label(self) -> str:
        """The short name, for messages."""
        return self.factory.rpartition(":")[2]
