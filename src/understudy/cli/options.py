"""How tyro reads and explains a command: options whose value is a dataclass, names of arguments, width of the text."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import json
import shutil
import textwrap
from collections.abc import Callable
from typing import Annotated, Any, get_args, get_type_hints

import tyro

REGISTRY = tyro.constructors.ConstructorRegistry()
MARKERS = (tyro.conf.FlagCreatePairsOff, tyro.conf.AvoidSubcommands)


def with_named_arguments(function: Callable[..., int]) -> Callable[..., int]:
    """The same command, whose help calls an argument by its name (STORE) instead of its type (PATH)."""

    def named(*args: Any, **kwargs: Any) -> int:
        return function(*args, **kwargs)

    functools.update_wrapper(named, function)
    del named.__dict__["__wrapped__"]  # tyro would look at that one
    signature = inspect.signature(function)
    named.__signature__ = signature  # type: ignore[attr-defined]
    hints = get_type_hints(function, include_extras=True)
    for name, hint in hints.items():
        if tyro.conf.Positional in getattr(hint, "__metadata__", ()):
            default = signature.parameters[name].default
            shown = f"{name.upper()} ..." if default == () else name.upper()
            required = default is inspect.Parameter.empty
            hints[name] = Annotated[hint, tyro.conf.arg(metavar=shown if required else f"[{shown}]")]
    named.__annotations__ = hints
    return named


def description(function: Callable[..., int], *, columns: int | None = None) -> str:
    """What the command does, as wide as the terminal; tyro keeps the breaks of lines that begin with a space."""
    text = (function.__doc__ or "").partition("Args:")[0]
    width = min(shutil.get_terminal_size().columns if columns is None else columns, 120) - 1
    paragraphs = [" ".join(part.split()) for part in text.split("\n\n") if part.strip()]
    return "\n\n".join(
        textwrap.fill(part, width, initial_indent=" ", subsequent_indent=" ", break_on_hyphens=False)
        for part in paragraphs
    )


@REGISTRY.primitive_rule
def dataclass_or_none(info: tyro.constructors.PrimitiveTypeInfo) -> Any:
    """A dataclass or None is written as JSON, as in `--sac.actor.gripper '{"values": [-1, 1]}'`; tyro itself would make
    it a subcommand."""
    kinds = [kind for kind in get_args(info.type) if kind is not type(None)]
    if len(kinds) != 1 or len(get_args(info.type)) != 2 or not dataclasses.is_dataclass(kinds[0]):
        return None
    (kind,) = kinds

    def read(words: list[str]) -> Any:
        from understudy.training.runs import config as configs

        return None if words[0] == "None" else configs.from_json(kind, json.loads(words[0]))

    def write(value: Any) -> list[str]:
        from understudy.training.runs import config as configs

        return ["None" if value is None else json.dumps(configs.to_json(value))]

    return tyro.constructors.PrimitiveConstructorSpec(
        nargs=1,
        metavar="JSON",
        instance_from_str=read,
        str_from_instance=write,
        is_instance=lambda value: value is None or isinstance(value, kind),
    )
