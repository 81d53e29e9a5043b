"""The entry point of the `understudy` command: finds a subcommand, runs it and turns its errors into one line.

commands.py lists every command with its line of help and its folder. The module of a command defines one of

    def command(path: tyro.conf.Positional[Path], *, deep: bool = False) -> int

whose arguments become options through tyro, whose docstring becomes the help text, and which returns the exit code; or

    COMMANDS: dict[str, Callable[..., int]] = {"store": store}

a table of such functions, if the subcommand has subcommands of its own (`understudy bench store`). Their line of help
is the first line of their docstring.

A command raises `UnderstudyError` for what its user can mend. Exit codes: 0 done, 1 the command failed or found
something wrong, 2 the command line makes no sense, 130 interrupted.
"""

import difflib
import errno
import importlib
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence

from understudy import __version__
from understudy.cli.commands import COMMANDS, GROUPS, module_of

# What a person who pressed Ctrl-C wants to know; {} is the first word behind the command, mostly a directory.
INTERRUPTED: dict[str, str] = {
    "record": "what was recorded is kept, and the same command goes on",
    "import": "what was imported is kept, and the same command goes on",
    "export": "nothing was written; run it again",
    "train rlpd": "`understudy resume {}` goes on as if nothing had happened",
    "train clone": "nothing is left of it; it is short, so run it again",
    "sft": "`understudy resume {}` goes on as if nothing had happened",
    "train grpo": "`understudy resume {}` goes on as if nothing had happened",
    "train rloo": "`understudy resume {}` goes on as if nothing had happened",
    "train reinforce": "`understudy resume {}` goes on as if nothing had happened",
    "train ppo": "`understudy resume {}` goes on as if nothing had happened",
    "resume": "`understudy resume {}` goes on as if nothing had happened",
    "evaluate": "nothing was written; run it again",
    "actor": "what it wrote is kept; start it again, and it goes on",
    "learner": "start it again, and it goes on from its last checkpoint",
    "verify": "nothing was changed",
    "repair": "nothing was lost; run it again",
    "compact": "the store is whole; run it again for the rest",
    "env setup": "what is half made is never used; run it again",
}

# What the system may refuse anywhere; what else goes wrong with a file is the business of whoever opens it.
REFUSED: dict[int, str] = {
    errno.ENOSPC: "free some space and run it again",
    errno.EDQUOT: "raise the quota or free some space, and run it again",
    errno.EFBIG: "raise the limit on file sizes (ulimit -f) and run it again",
    errno.EROFS: "choose a place that can be written",
    errno.EACCES: "give this user the right to do that, or choose another place",
    errno.EPERM: "give this user the right to do that, or choose another place",
    errno.EMFILE: "raise the limit of open files (ulimit -n) and run it again",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` (default: that of the process) and return its exit code.

    Help and mistakes in the command line end in SystemExit with a code, as they do in tyro.
    """
    args = list(sys.argv[1:] if argv is None else argv)
    try:
        return _run(args)
    except KeyboardInterrupt:
        _complain(_interrupted(args))
        return 130
    except BrokenPipeError:  # `understudy info | head`: nobody reads on
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _run(args: list[str]) -> int:
    if args and args[0] == "--version":
        print(f"understudy {__version__}")
        return 0
    name = _choose("understudy", args, COMMANDS)

    # Imported only now, because it may bring numpy along.
    from understudy.core.errors import UnderstudyError

    try:
        module = importlib.import_module(module_of(name))
        prog, rest = f"understudy {name}", args[1:]
        if not hasattr(module, "COMMANDS"):
            return _call(module.command, prog, rest)
        functions: Mapping[str, Callable[..., int]] = module.COMMANDS
        inner = _choose(prog, rest, {key: _first_line(function) for key, function in functions.items()})
        return _call(functions[inner], f"{prog} {inner}", rest[1:])
    except UnderstudyError as error:
        if os.environ.get("UNDERSTUDY_DEBUG") == "1":
            raise
        _complain(f"error: {error}")
        return 1
    except OSError as error:
        if os.environ.get("UNDERSTUDY_DEBUG") == "1" or error.errno not in REFUSED:
            raise
        where = f"{error.filename}: " if error.filename else ""
        _complain(f"error: {where}{error.strerror}; {REFUSED[error.errno]}")
        return 1


def _interrupted(args: list[str]) -> str:
    """What to say to a person who pressed Ctrl-C."""
    for number in (2, 1):
        advice = INTERRUPTED.get(" ".join(args[:number]))
        if advice is not None:
            first = next((word for word in args[number : number + 1] if not word.startswith("-")), "RUN")
            if "resume" in advice and not os.path.exists(os.path.join(first, "config.json")):  # noqa: PTH110, PTH118  # light
                return "interrupted; nothing was begun"
            return f"interrupted; {advice.format(first)}"
    return "interrupted"


def _choose(prog: str, args: list[str], table: Mapping[str, str]) -> str:
    """Return the command of `table` that `args` opens with, or print help or a complaint and exit."""
    if not args:
        print(_help(prog, table), file=sys.stderr)
        raise SystemExit(2)
    if args[0] in ("-h", "--help"):
        print(_help(prog, table))
        raise SystemExit(0)
    if args[0] not in table:
        _complain(_unknown(prog, args[0], table))
        raise SystemExit(2)
    return args[0]


def _call(function: Callable[..., int], prog: str, args: list[str]) -> int:
    import tyro

    from understudy.cli.options import REGISTRY

    config = (tyro.conf.FlagCreatePairsOff, tyro.conf.AvoidSubcommands)
    return tyro.cli(function, prog=prog, args=args, config=config, registry=REGISTRY)


def _help(prog: str, table: Mapping[str, str]) -> str:
    options = _options(prog)
    width = max(len(name) for name in [*table, *options])
    groups = {**GROUPS, "options": options} if table is COMMANDS else {"commands": table, "options": options}
    lines = [f"usage: {prog} <command> [options]"]
    for title, group in groups.items():
        lines += ["", f"{title}:", *(f"  {name:<{width}}  {line}" for name, line in group.items())]
    return "\n".join(lines)


def _options(prog: str) -> dict[str, str]:
    options = {"--help": "Show this text, or that of a command."}
    if prog == "understudy":
        options["--version"] = "Show the version."
    return options


def _unknown(prog: str, given: str, names: Iterable[str]) -> str:
    kind = "option" if given.startswith("-") else "command"
    nearest = difflib.get_close_matches(given, [*names, *_options(prog)], n=1)
    advice = f"did you mean {nearest[0]!r}?" if nearest else f"`{prog} --help` lists them all"
    return f"unknown {kind} {given!r}; {advice}"


def _first_line(function: Callable[..., int]) -> str:
    return (function.__doc__ or "").strip().partition("\n")[0]


def _complain(message: str) -> None:
    """Print `message` in red on stderr, on one line however narrow the terminal is."""
    from rich.console import Console
    from rich.text import Text

    Console(stderr=True).print(Text(message, style="red"), soft_wrap=True)
