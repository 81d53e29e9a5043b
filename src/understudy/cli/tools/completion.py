"""`understudy completion`: the script with which bash, zsh or fish complete commands, options and their values.

The script holds all of them, so that Tab does not start Python. It is generated from the signatures of the commands.
"""

from __future__ import annotations

import dataclasses
import inspect
import shlex
import types
import typing
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import tyro

from understudy.cli.commands import COMMANDS, all_functions
from understudy.core import UnderstudyError
from understudy.envs.registry import WORLD_REGISTRY
from understudy.envs.toy.world import TASKS

Shell = Literal["bash", "zsh", "fish"]

# Suggested values of text options.
WORLDS = (*(f"toy:{task}" for task in TASKS), *(f"{name}:" for name in WORLD_REGISTRY if name != "toy"))
VALUES: dict[str, tuple[str, ...]] = {"--env": WORLDS}
WORDS: dict[str, tuple[str, ...]] = {
    "env setup": tuple(name for name, entry in WORLD_REGISTRY.items() if entry.packages)
}


def command(shell: Annotated[Shell, tyro.conf.Positional]) -> int:
    """Print the completion script of your shell.

    bash: add `eval "$(understudy completion bash)"` to ~/.bashrc. zsh: add `eval "$(understudy completion zsh)"` to
    ~/.zshrc, below compinit. fish: `understudy completion fish > ~/.config/fish/completions/understudy.fish`.

    Args:
        shell: Name of your shell.
    """
    print({"bash": _bash, "zsh": _zsh, "fish": _fish}[shell](entries()))
    return 0


@dataclass(frozen=True, kw_only=True)
class Entry:
    """What may follow a command: words (subcommands or values), and options with their values."""

    path: str  # "", "train", "train rlpd"
    words: tuple[str, ...] = ()
    options: dict[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)


def entries() -> list[Entry]:
    """The entries of all commands; a command whose extra is not installed has none."""
    found = [Entry(path="", words=tuple(COMMANDS), options={"--help": (), "--version": ()})]
    found += [
        Entry(path=name, words=tuple(command.subcommands), options={"--help": ()})
        for name, command in COMMANDS.items()
        if command.subcommands
    ]
    for path, command in all_functions():
        try:
            function = command.load()
        except (UnderstudyError, ModuleNotFoundError):
            continue
        found.append(_entry(path, function))
    return found


def _entry(path: str, function: Callable[..., int]) -> Entry:
    options: dict[str, tuple[str, ...]] = {"--help": ()}
    words = WORDS.get(path, ())
    hints = typing.get_type_hints(function, include_extras=True)
    for name, parameter in inspect.signature(function).parameters.items():
        hint: Any = hints[name]
        marks: tuple[Any, ...] = ()
        if typing.get_origin(hint) is Annotated:
            hint, *rest = typing.get_args(hint)
            marks = tuple(rest)
        if any(mark is _POSITIONAL for mark in marks):
            words += _choices(hint)
        else:
            # tyro.conf.arg(name=...) is another name; an empty one makes the fields options of the command itself.
            given = [mark.name for mark in marks if getattr(mark, "name", None) is not None]
            options |= dict(_options(given[0] if given else name, hint, parameter.default))
    for option, values in VALUES.items():
        if option in options:
            options[option] = values
    return Entry(path=path, words=words, options=options)


_POSITIONAL = typing.get_args(tyro.conf.Positional[int])[1]


def _options(name: str, hint: Any, default: Any) -> Iterator[tuple[str, tuple[str, ...]]]:
    """An argument, or each field of one that is a dataclass, as tyro names them."""
    if dataclasses.is_dataclass(hint):
        hints = typing.get_type_hints(hint)
        for field in dataclasses.fields(hint):
            inner = f"{name}.{field.name}" if name else field.name
            yield from _options(inner, hints[field.name], getattr(default, field.name, None))
        return
    *parents, last = name.replace("_", "-").split(".")
    if hint is bool and default is True:
        last = f"no-{last}"  # the only form of a flag that is on by default
    yield "--" + ".".join([*parents, last]), _choices(hint)


def _choices(hint: Any) -> tuple[str, ...]:
    """The values of a Literal, also inside a tuple or an option that may be None."""
    if typing.get_origin(hint) is Literal:
        return tuple(map(str, typing.get_args(hint)))
    if typing.get_origin(hint) in (typing.Union, types.UnionType, tuple):
        return tuple(choice for inner in typing.get_args(hint) for choice in _choices(inner))
    return ()


# ---- the shells


def _cases(found: list[Entry], indent: str) -> tuple[str, str]:
    """The cases of a POSIX shell: words by command, and values by command and option."""
    words = [
        f"{indent}{shlex.quote(entry.path)}) words={shlex.quote(' '.join([*entry.words, *entry.options]))} ;;"
        for entry in found
    ]
    values = [
        f"{indent}{shlex.quote(f'{entry.path} {option}')}) words={shlex.quote(' '.join(choices))} ;;"
        for entry in found
        for option, choices in entry.options.items()
        if choices
    ]
    return "\n".join(words), "\n".join(values)


def _groups(found: list[Entry]) -> str:
    """The commands that have subcommands, as a pattern."""
    return "|".join(dict.fromkeys(entry.path.split()[0] for entry in found if " " in entry.path))


def _bash(found: list[Entry]) -> str:
    words, values = _cases(found, " " * 8)
    return f"""_understudy() {{
    # Not $COMP_WORDS: bash takes toy:pick_red for three words.
    local line=${{COMP_LINE:0:COMP_POINT}} words=
    local -a typed
    IFS=' ' read -ra typed <<< "$line"
    local cur= prev path=
    [[ $line == *' ' ]] || {{ cur=${{typed[-1]}}; unset 'typed[-1]'; }}
    prev=${{typed[-1]}}
    case "${{typed[1]}}" in
        {_groups(found)}) path="${{typed[*]:1:2}}" ;;
        *) path=${{typed[1]}} ;;
    esac
    case "$path" in
{words}
    esac
    case "$path $prev" in
{values}
    esac
    COMPREPLY=($(compgen -W "$words" -- "$cur"))
    if [[ ${{#COMPREPLY[@]}} -eq 0 && $cur != -* && -n $path ]]; then
        compopt -o filenames
        COMPREPLY=($(compgen -f -- "$cur"))
    elif [[ $cur == *:* && $COMP_WORDBREAKS == *:* ]]; then
        COMPREPLY=("${{COMPREPLY[@]#"${{cur%"${{cur##*:}}"}}"}}")
    fi
}}
complete -F _understudy understudy"""


def _zsh(found: list[Entry]) -> str:
    words, values = (cases.replace(") words=", ") offered=") for cases in _cases(found, " " * 8))
    return f"""_understudy() {{
    local path offered cur=${{words[CURRENT]}} prev=${{words[CURRENT-1]}}
    (( CURRENT == 2 )) && prev=
    case "${{words[2]}}" in
        {_groups(found)}) path="${{words[2,3]}}"; (( CURRENT == 3 )) && path=${{words[2]}} ;;
        *) path=${{words[2]}} ;;
    esac
    (( CURRENT == 2 )) && path=
    case "$path" in
{words}
    esac
    case "$path $prev" in
{values}
    esac
    compadd -- ${{=offered}} || {{ [[ $cur != -* && -n $path ]] && _files; }}
}}
compdef _understudy understudy"""


def _fish(found: list[Entry]) -> str:
    lines = ["complete -c understudy -n __fish_use_subcommand -f"]
    for entry in found:
        first, _, second = entry.path.partition(" ")
        if not entry.path:
            where = "__fish_use_subcommand"
        elif second:
            where = f"__fish_seen_subcommand_from {first}; and __fish_seen_subcommand_from {second}"
        elif entry.words and any(other.path.startswith(f"{entry.path} ") for other in found):
            where = f"__fish_seen_subcommand_from {first}; and not __fish_seen_subcommand_from {' '.join(entry.words)}"
        else:
            where = f"__fish_seen_subcommand_from {first}"
        start = f"complete -c understudy -n {shlex.quote(where)}"
        if entry.words:
            lines.append(f"{start} -f -a {shlex.quote(' '.join(entry.words))}")
        for option, choices in entry.options.items():
            given = f" -x -a {shlex.quote(' '.join(choices))}" if choices else ""
            lines.append(f"{start} -l {option.removeprefix('--')}{given}")
    return "\n".join(lines)
