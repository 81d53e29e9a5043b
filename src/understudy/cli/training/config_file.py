"""`--config FILE`: the options of a command that trains, from a YAML file or from a run; options in the line go first.

The file is read before the command line, and its values become the defaults of the options.
"""

from __future__ import annotations

import copy
import dataclasses
import inspect
import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import FunctionType
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

import tyro

from understudy.cli.console import with_extra
from understudy.core import UnderstudyError

if TYPE_CHECKING:
    from understudy.replay import EpisodeRecord

# The parameter of a command. `with_config_file` reads it; the command gets its options by their names.
ConfigFile: TypeAlias = Annotated[Path | None, tyro.conf.arg(name="config")]

NAME = "--config"
PARAMETER = "config_file"


class StoredEnv(str):
    """The default of --env: the world in which the demonstrations were recorded, or this one if that is not known."""

    __slots__ = ()


def with_config_file(function: Callable[..., int], args: Sequence[str]) -> Callable[..., int]:
    """The command with the values of the file that `args` names as the defaults of its options."""
    given = _given(args)
    if given is None or PARAMETER not in inspect.signature(function).parameters:
        return function
    default = inspect.signature(function).parameters["config"].default
    return with_default(function, read_config(Path(given), default))


def with_default(function: Callable[..., int], config: Any) -> Callable[..., int]:
    """A copy of a command whose options have the values of `config` as defaults."""
    assert isinstance(function, FunctionType)
    parameters = inspect.signature(function).parameters
    positional = [one for one in parameters.values() if one.kind is one.POSITIONAL_OR_KEYWORD]
    defaults = [config if one.name == "config" else one.default for one in positional]
    copied = FunctionType(
        function.__code__,
        function.__globals__,
        function.__name__,
        tuple(value for value in defaults if value is not inspect.Parameter.empty),
        function.__closure__,
    )
    copied.__kwdefaults__ = copy.copy(function.__kwdefaults__)
    copied.__annotations__, copied.__doc__ = function.__annotations__, function.__doc__
    return copied


def _given(args: Sequence[str]) -> str | None:
    for index, word in enumerate(args):
        if word == NAME and index + 1 < len(args):
            return args[index + 1]
        if word.startswith(f"{NAME}="):
            return word.partition("=")[2]
    return None


def read_config(path: Path, default: Any) -> Any:
    """The config in a YAML file, or that of a run; what it leaves out is as in `default`."""
    from understudy.training.runs import config as configs
    from understudy.training.runs.run import CONFIG, Run

    file = path / CONFIG if path.is_dir() else path
    values = _load(file)
    if {"kind", "config", "understudy"} <= values.keys():  # the config.json of a run
        values = Run(file.parent).metadata["config"]
    base = {field.name: getattr(default, field.name) for field in dataclasses.fields(default)}
    lacking = [name for name, value in base.items() if value is tyro.MISSING and name not in values]
    known = configs.to_json(dataclasses.replace(default, **dict.fromkeys(lacking, "")))
    known = {name: str(value) if isinstance(value, StoredEnv) else value for name, value in known.items()}
    try:
        config = configs.from_json(type(default), _merged(known, values))
    except UnderstudyError as error:
        raise UnderstudyError(f"{file}: {error}") from None
    if "env" not in values and isinstance(default.env, StoredEnv):
        config = dataclasses.replace(config, env=default.env)
    return dataclasses.replace(config, **dict.fromkeys(lacking, tyro.MISSING))


def _load(file: Path) -> dict[str, Any]:
    yaml: Any = with_extra("yaml", "train")
    loader: Any = type("Loader", (yaml.SafeLoader,), {})  # that also reads 1e-3 as a number, as Python does
    loader.add_implicit_resolver(
        "tag:yaml.org,2002:float", re.compile(r"^[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)$"), list("-+0123456789.")
    )
    try:
        values = yaml.load(file.read_text(), loader)
    except OSError as error:
        raise UnderstudyError(f"config: {file}: {error.strerror}; expected a YAML file, or a run") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UnderstudyError(f"{file}: is not YAML ({' '.join(str(error).split())})") from None
    if not isinstance(values, dict):
        raise UnderstudyError(f"{file}: expected options as `name: value`, got {json.dumps(values, default=str)[:60]}")
    return {str(name).replace("-", "_"): value for name, value in values.items()}


def _merged(base: Any, values: Any) -> Any:
    """`values`, completed with those of `base`; options may be written with - or _."""
    if not isinstance(base, Mapping) or not isinstance(values, Mapping):
        return values
    given = {str(name).replace("-", "_"): value for name, value in values.items()}
    return {**base, **{name: _merged(base.get(name), value) for name, value in given.items()}}


# ---- the world


def with_stored_env(run: Path, config: Any, say: Callable[[str], None]) -> Any:
    """The config with the world in which the demonstrations of its store were recorded, unless --env was given."""
    if not isinstance(config.env, StoredEnv):
        return config
    from understudy.training.data.record import ENV

    store = run / "store" if config.demos is None else Path(config.demos)
    records = _demonstrations(store)
    if not records:
        raise UnderstudyError(
            f"env: no world was given, and {store} has no demonstrations to take it from; pass --env, or first "
            f"record some with `understudy record {store} --env WORLD`"
        )
    found = sorted({record.info.labels[ENV] for record in records if ENV in record.info.labels})
    if len(found) > 1:
        raise UnderstudyError(
            f"env: {store} has demonstrations of {len(found)} worlds, {', '.join(found)}; choose one with --env"
        )
    if found:
        say(f"env: {found[0]}, in which {store} was recorded; --env changes it")
    else:
        say(f"env: {config.env}, by default, because {store} does not say where it was recorded; --env changes it")
    return dataclasses.replace(config, env=found[0] if found else str(config.env))


def say_if_there_are_no_demonstrations(
    run: Path, config: Any, config_file: Path | None, say: Callable[[str], None]
) -> None:
    """A run may do without, but nobody should find out afterwards: those of the run in --config are not taken over."""
    if config.demos is not None or _demonstrations(run / "store"):
        return
    others = config_file / "store" if config_file is not None else None
    instead = f"pass --demos {others} for those of {config_file}" if others and _demonstrations(others) else ""
    instead = instead or f"record some with `understudy record {run / 'store'}`, or pass --demos"
    say(f"no demonstrations: {run / 'store'} has none, and --demos names no other store; {instead}")


def _demonstrations(store: Path) -> list[EpisodeRecord]:
    from understudy.replay import Reader
    from understudy.replay.format.paths import CATALOG_FILE, no_store

    if not (store / CATALOG_FILE).exists():
        if (store / "store" / CATALOG_FILE).exists():
            raise no_store(store)
        return []
    with Reader(store) as reader:
        return list(reader.episodes("kind = 'demonstration' and deleted is null"))
