"""Configs: frozen dataclasses to plain JSON and back. Errors name the wrong field and suggest the nearest right one."""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Mapping
from typing import Any, TypeVar

from understudy.core import UnderstudyError
from understudy.core.spec import describe
from understudy.core.suggestion import did_you_mean

Config = TypeVar("Config")


class ConfigError(UnderstudyError, ValueError):
    """A config with an unknown option, a missing one or a value that is not allowed."""


def to_json(config: Any) -> dict[str, Any]:
    """A config dataclass, nested ones included, as a dict of JSON values."""
    return dataclasses.asdict(config)


def from_json(kind: type[Config], value: Mapping[str, Any], path: str = "") -> Config:
    """The config dataclass that `to_json` was given; missing fields get their defaults."""
    if not isinstance(value, Mapping):
        raise ConfigError(f"{path or kind.__name__}: expected a dict of options, got {describe(value)}")
    hints = typing.get_type_hints(kind)
    names = [field.name for field in dataclasses.fields(kind)]  # type: ignore[arg-type]  # a dataclass
    for name in value:
        if name not in names:
            advice = did_you_mean(name, names, f"choose one of {', '.join(names)}")
            raise ConfigError(f"{_join(path, name)}: no such option; {advice}")
    found = {name: _read(hints[name], value[name], _join(path, name)) for name in names if name in value}
    try:
        return kind(**found)
    except TypeError as error:
        raise ConfigError(f"{path or kind.__name__}: {error}; give every option that has no default") from None


def _read(hint: Any, value: Any, path: str) -> Any:
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        if value is None and type(None) in inner:
            return None
        return _first(hint, [kind for kind in inner if kind is not type(None)], value, path)
    if origin is typing.Literal:
        if value not in inner:
            raise ConfigError(f"{path}: expected one of {', '.join(map(repr, inner))}, got {value!r}")
        return value
    if origin is tuple:
        if not isinstance(value, list | tuple):
            raise ConfigError(f"{path}: expected a list, got {describe(value)}")
        kinds = [inner[0]] * len(value) if inner[-1] is Ellipsis else list(inner)
        if len(kinds) != len(value):
            raise ConfigError(f"{path}: expected {len(kinds)} values, got {len(value)}")
        return tuple(
            _read(kind, item, f"{path}/{index}") for index, (kind, item) in enumerate(zip(kinds, value, strict=True))
        )
    if dataclasses.is_dataclass(hint):
        return from_json(typing.cast(type[Any], hint), value, path)
    if hint is float and type(value) is int:
        return float(value)
    if type(value) is not hint:
        raise ConfigError(f"{path}: expected {getattr(hint, '__name__', hint)}, got {describe(value)}")
    return value


def _first(hint: Any, kinds: list[Any], value: Any, path: str) -> Any:
    """The value read as the first of the union's types that accepts it."""
    problem = ConfigError(f"{path}: expected {hint}, got {describe(value)}")
    for kind in kinds:
        try:
            return _read(kind, value, path)
        except ConfigError as error:
            problem = error if len(kinds) == 1 else problem
    raise problem


def _join(path: str, name: object) -> str:
    return f"{path}/{name}" if path else str(name)
