"""WorldFactory: describes a world in text, so that any process and any interpreter can build it."""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping
from typing import Any

from understudy.core import SpecError
from understudy.core.suggestion import did_you_mean
from understudy.processes.factory_spec import FactorySpec
from understudy.processes.python_path import import_object

MAX_OPTIONS_BYTES = 64 * 2**10  # they are sent before the process reads, so they must fit into the socket's buffer


class WorldFactory(FactorySpec):
    """Builds a world with `factory(**options)`; also names the interpreter and variables of its process."""

    error = SpecError
    example = "understudy.envs.toy:ToyTable"

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(json.dumps(self.options)) > MAX_OPTIONS_BYTES:
            raise SpecError(f"options: expected up to {MAX_OPTIONS_BYTES} bytes of JSON; put the rest into a file")

    def build(self) -> Any:
        """Build the world in this process."""
        return build(self.factory, self.options)


def build(factory: str, options: Mapping[str, Any]) -> Any:
    """Call the factory by its name."""
    found = import_object(factory, SpecError)
    try:
        signature = inspect.signature(found)
        _check_names(factory, options, signature)
        signature.bind(**options)
    except TypeError as error:
        raise SpecError(f"options: {factory} cannot be built with {dict(options)!r}: {error}") from None
    return found(**options)


def _check_names(factory: str, options: Mapping[str, Any], signature: inspect.Signature) -> None:
    """Refuse options that the factory does not have; one with **options is asked nothing."""
    parameters = signature.parameters.values()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return
    known = [parameter.name for parameter in parameters if parameter.kind is not parameter.VAR_POSITIONAL]
    for name in options:
        if name not in known:
            advice = did_you_mean(name, known, f"it has {', '.join(known) or 'none'}")
            raise SpecError(f"{factory}: has no option {name!r}; {advice}")
