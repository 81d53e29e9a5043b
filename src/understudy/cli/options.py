"""Options whose value is a small dataclass or None, such as `--sac.actor.gripper '{"values": [-1, 1]}'`."""

from __future__ import annotations

import dataclasses
import json
from typing import Any, get_args

import tyro

REGISTRY = tyro.constructors.ConstructorRegistry()
MARKERS = (tyro.conf.FlagCreatePairsOff, tyro.conf.AvoidSubcommands)


@REGISTRY.primitive_rule
def dataclass_or_none(info: tyro.constructors.PrimitiveTypeInfo) -> Any:
    """A dataclass or None is written as JSON; tyro itself would make it a subcommand."""
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
