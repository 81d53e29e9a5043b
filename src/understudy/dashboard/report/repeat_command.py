"""The command that repeats a run, with every option that is not the default."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from typing import Any

from understudy.training.runs.config import to_json
from understudy.training.runs.run import ON_POLICY

COMMANDS = {  # by the kind of the run
    "rlpd": "train rlpd",
    "cloning": "train clone",
    "sft": "sft",
    "improve": "improve",
    **{kind: f"train {kind}" for kind in ON_POLICY},
}


def command_of(kind: str, config: Mapping[str, Any]) -> str:
    """The `understudy train` or `understudy sft` command; the new run is called `again`."""
    if kind not in COMMANDS:
        return f"# a run of {kind} is made in Python"
    words = ["understudy", *COMMANDS[kind].split(), "again"]
    defaults = dict(options_of(_defaults(kind)))
    for path, value in changed_options(kind, config):
        words += _option(path, value, flag=isinstance(defaults.get(path, value), bool))
    return shlex.join(words)


def evaluation_of(kind: str, config: Mapping[str, Any]) -> str:
    """The command that evaluates the policy as the run itself did."""
    words = ["understudy", "evaluate", "again"]
    if kind in (*ON_POLICY, "sft", "improve") and "evaluation" in config:
        asked = config["evaluation"]
        words += ["--episodes", str(asked["episodes"])]
        words += ["--sampled", "--temperature", str(asked["temperature"])] if asked["sampling"] == "sampled" else []
        words += ["--split", asked["split"] or "all"] if asked["protocol"] == "benchmark" else []
    return shlex.join(words)


def changed_options(kind: str, config: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """The options that are not the default, as pairs of dotted name and value."""
    defaults = dict(options_of(_defaults(kind)))
    for path, value in options_of(config):
        if path not in defaults or _plain(value) != _plain(defaults[path]):
            yield path, value


def options_of(config: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    """All options, as pairs of dotted name and value."""
    for name, item in config.items():
        there = f"{path}.{name}" if path else name
        if isinstance(item, Mapping):
            yield from options_of(item, there)
        else:
            yield there, item


def _defaults(kind: str) -> Mapping[str, Any]:
    """The default config; empty if torch or transformers is not installed, so that every option is listed."""
    if kind not in COMMANDS:
        return {}
    try:
        return to_json(_default_config(kind))
    except ModuleNotFoundError:
        return {}


def _default_config(kind: str) -> Any:
    if kind in ON_POLICY:
        from understudy.training.onpolicy.config import default_config

        return default_config(kind, policy="")
    if kind == "sft":
        from understudy.training.onpolicy.sft import SFTConfig

        return SFTConfig()
    if kind == "improve":
        from understudy.training.improvement.config import ImproveConfig

        return ImproveConfig(policy="", experience=("",))
    from understudy.training.offpolicy.cloning import CloningRunConfig
    from understudy.training.offpolicy.rlpd import RLPDConfig

    return {"rlpd": RLPDConfig, "cloning": CloningRunConfig}[kind]()


def _plain(value: Any) -> Any:
    """Lists instead of tuples, so that equal ones compare equal."""
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value


def _option(path: str, value: Any, *, flag: bool) -> list[str]:
    """The words of one option. A `flag` takes no value; an optional bool takes True or False."""
    name = path.replace("_", "-")
    if isinstance(value, bool) and flag:
        head, _, last = name.rpartition(".")
        return [f"--{name}" if value else f"--{head + '.' if head else ''}no-{last}"]
    if isinstance(value, list | tuple):
        return [f"--{name}", *map(str, value)]
    return [f"--{name}", str(value)]
