"""The entry point of the `understudy` command: finds a command, runs it and prints its error as one line.

commands.py lists every command with its line of help and its function, such as

    def command(path: tyro.conf.Positional[Path], *, deep: bool = False) -> int

tyro makes options of its arguments and the help text of its docstring. It returns the exit code, and raises
`UnderstudyError` for what its user can fix. Exit codes: 0 success, 1 the command failed or found a problem, 2 the
command line is not valid, 130 stopped by Ctrl-C, 143 by SIGTERM.
"""

import errno
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence

from understudy import __version__
from understudy.cli.commands import COMMANDS, GROUPS, Command

# Printed after Ctrl-C; {} is the first word after the command, usually a directory.
INTERRUPTED: dict[str, str] = {
    "record": "what was recorded is kept; the same command continues",
    "rollout": "what was recorded is kept; the same command continues",
    "import": "what was imported is kept; the same command continues",
    "export": "nothing was written; run it again",
    "train rlpd": "`understudy resume {}` continues the run",
    "train clone": "`understudy resume {}` continues the run",
    "sft": "`understudy resume {}` continues the run",
    "improve": "`understudy resume {}` continues the run",
    "train grpo": "`understudy resume {}` continues the run",
    "train rloo": "`understudy resume {}` continues the run",
    "train reinforce": "`understudy resume {}` continues the run",
    "train ppo": "`understudy resume {}` continues the run",
    "resume": "`understudy resume {}` continues the run",
    "evaluate": "nothing was written; run it again",
    "actor": "what it wrote is kept; start it again to continue",
    "learner": "start it again to continue from its last checkpoint",
    "verify": "nothing was changed",
    "repair": "nothing was lost; run it again",
    "compact": "the store is intact; run it again for the rest",
    "env setup": "an incomplete installation is never used; run it again",
}

# Errors of the system that any command may meet; other errors of files are handled where they are opened.
REFUSED: dict[int, str] = {
    errno.ENOSPC: "free some space and run it again",
    errno.EDQUOT: "raise the quota or free some space, and run it again",
    errno.EFBIG: "raise the limit on file sizes (ulimit -f) and run it again",
    errno.EROFS: "choose a directory that can be written",
    errno.EACCES: "give this user the permission, or choose another directory",
    errno.EPERM: "give this user the permission, or choose another directory",
    errno.EMFILE: "raise the limit of open files (ulimit -n) and run it again",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` (by default that of the process) and return its exit code.

    Help and errors of the command line raise SystemExit, as in tyro.
    """
    args = list(sys.argv[1:] if argv is None else argv)
    try:
        return _run(args)
    except KeyboardInterrupt as error:
        from understudy.processes.stop import Interrupted, Stopped

        stopped = error if isinstance(error, Interrupted) else Interrupted()
        _print_error(stopped.sentence or _interrupted(args), style="yellow" if isinstance(error, Stopped) else "red")
        return stopped.exit_code
    except BrokenPipeError:  # `understudy info | head`: the pipe is closed
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _run(args: list[str]) -> int:
    if args and args[0] == "--version":
        print(f"understudy {__version__}")
        return 0
    name = _choose("understudy", args, COMMANDS)
    prog, args, command = f"understudy {name}", args[1:], COMMANDS[name]
    if command.subcommands:
        if name == "init" and args and args[0].endswith(".py"):  # a recipe of the user
            name, command = args[0], Command(help="", function=f"training.init:{args[0]}")
        else:
            name = _choose(prog, args, command.subcommands)
            command = command.subcommands[name]
        prog, args = f"{prog} {name}", args[1:]

    # Threads of torch that wait for each other sleep instead of spinning: on a busy machine that is several times as
    # fast. It is read when torch is imported.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")

    # Imported only now, because it imports numpy.
    from understudy.core.errors import UnderstudyError

    if command.runs_script:
        args = with_script_arguments(args)
    try:
        return _call(command.load(), prog, args)
    except UnderstudyError as error:
        if os.environ.get("UNDERSTUDY_DEBUG") == "1":
            raise
        _print_error(f"error: {error}")
        return 1
    except OSError as error:
        if os.environ.get("UNDERSTUDY_DEBUG") == "1" or error.errno not in REFUSED:
            raise
        where = f"{error.filename}: " if error.filename else ""
        _print_error(f"error: {where}{error.strerror}; {REFUSED[error.errno]}")
        return 1


def with_script_arguments(args: list[str]) -> list[str]:
    """Mark what follows the script as its own: options there are not ours."""
    for number, word in enumerate(args, 1):
        if word == "--":
            return args
        if word.endswith(".py"):
            return [*args[:number], "--", *args[number:]]
    return args


def _interrupted(args: list[str]) -> str:
    """The message after Ctrl-C."""
    for number in (2, 1):
        advice = INTERRUPTED.get(" ".join(args[:number]))
        if advice is not None:
            first = next((word for word in args[number : number + 1] if not word.startswith("-")), "RUN")
            if "resume" in advice and not os.path.exists(os.path.join(first, "config.json")):  # noqa: PTH110, PTH118  # pathlib is slow to import
                return "interrupted; the run was not created"
            return f"interrupted; {advice.format(first)}"
    return "interrupted"


def _choose(prog: str, args: list[str], table: Mapping[str, Command]) -> str:
    """Return the command of `table` that `args` begins with, or print help or an error and exit."""
    if not args:
        print(_help(prog, table), file=sys.stderr)
        raise SystemExit(2)
    if args[0] in ("-h", "--help"):
        print(_help(prog, table))
        raise SystemExit(0)
    if args[0] not in table:
        _print_error(_unknown(prog, args[0], table))
        raise SystemExit(2)
    return args[0]


def _call(function: Callable[..., int], prog: str, args: list[str]) -> int:
    import tyro

    from understudy.cli.long_help import print_long_help
    from understudy.cli.options import MARKERS, REGISTRY, description, with_named_arguments

    if any(word.partition("=")[0] == "--config" for word in args):
        from understudy.cli.training.config_file import with_config_file

        function = with_config_file(function, args)
    named, about = with_named_arguments(function), description(function)

    def parse_and_call(words: Sequence[str]) -> int:
        return tyro.cli(named, prog=prog, description=about, args=words, config=MARKERS, registry=REGISTRY)

    print_long_help(parse_and_call, prog, args)
    return parse_and_call(args)


def _help(prog: str, table: Mapping[str, Command]) -> str:
    options = _options(prog)
    width = max(len(name) for name in [*table, *options])
    groups = GROUPS if table is COMMANDS else {"commands": table}
    lines = [f"usage: {prog} <command> [options]"]
    texts = {title: {name: command.help for name, command in group.items()} for title, group in groups.items()}
    for title, group in {**texts, "options": options}.items():
        lines += ["", f"{title}:", *(f"  {name:<{width}}  {text}" for name, text in group.items())]
    return "\n".join(lines)


def _options(prog: str) -> dict[str, str]:
    options = {"--help": "Show this help, or that of a command."}
    if prog == "understudy":
        options["--version"] = "Show the version of Understudy."
    return options


def _unknown(prog: str, given: str, names: Iterable[str]) -> str:
    from understudy.core.suggestion import did_you_mean

    kind = "option" if given.startswith("-") else "command"
    advice = did_you_mean(given, [*names, *_options(prog)], f"`{prog} --help` lists them all")
    return f"unknown {kind} {given!r}; {advice}"


def _print_error(message: str, *, style: str = "red") -> None:
    """Print `message` in a colour on stderr, on one line even in a narrow terminal."""
    from rich.console import Console
    from rich.text import Text

    Console(stderr=True).print(Text(message, style=style), soft_wrap=True)
