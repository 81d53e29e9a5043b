"""Report repeat: the command that asks for a run again, with every option that is not the default."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from typing import Any

from understudy.training.config import to_json

NAMES = {"rlpd": "rlpd", "cloning": "clone"}  # of a run's kind, as a command


def command_of(kind: str, config: Mapping[str, Any]) -> str:
    """As `understudy train` takes it; the run is called `again`."""
    if kind not in NAMES:
        return f"# a run of {kind} is made in Python"
    words = ["understudy", "train", NAMES[kind], "again"]
    for path, value in changed_options(kind, config):
        words += _option(path, value)
    return shlex.join(words)


def changed_options(kind: str, config: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """The options that are not the default, by their path."""
    defaults = dict(options_of(_defaults(kind)))
    for path, value in options_of(config):
        if path not in defaults or _plain(value) != _plain(defaults[path]):
            yield path, value


def options_of(config: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    """All options, those of parts by a path with dots."""
    for name, item in config.items():
        there = f"{path}.{name}" if path else name
        if isinstance(item, Mapping):
            yield from options_of(item, there)
        else:
            yield there, item


def _defaults(kind: str) -> Mapping[str, Any]:
    """None are known where torch is not installed; every option is then one that is not the default."""
    try:
        from understudy.training.cloning import CloningRunConfig
        from understudy.training.rlpd import RLPDConfig
    except ModuleNotFoundError:
        return {}
    return to_json({"rlpd": RLPDConfig, "cloning": CloningRunConfig}[kind]()) if kind in NAMES else {}


def _plain(value: Any) -> Any:
    """Lists and tuples that hold the same are the same."""
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value


def _option(path: str, value: Any) -> list[str]:
    name = path.replace("_", "-")
    if isinstance(value, bool):
        head, _, last = name.rpartition(".")
        return [f"--{name}" if value else f"--{head + '.' if head else ''}no-{last}"]
    if isinstance(value, list | tuple):
        return [f"--{name}", *map(str, value)]
    return [f"--{name}", str(value)]
