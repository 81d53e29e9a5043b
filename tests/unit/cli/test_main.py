import errno
import os
import subprocess
import sys
import types
from pathlib import Path

import pytest

import understudy
from understudy.cli.commands import COMMANDS, GROUPS, Command, all_functions
from understudy.cli.main import INTERRUPTED, main
from understudy.core.errors import SpecError, UnderstudyError


@pytest.fixture(autouse=True)
def plain_terminal(monkeypatch):
    """A narrow terminal without colours, so that a line that can be broken will be."""
    for name in ("FORCE_COLOR", "TTY_COMPATIBLE", "UNDERSTUDY_DEBUG"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("COLUMNS", "20")


@pytest.fixture
def add(monkeypatch):
    """Adds a command, or one with subcommands, for the time of one test."""

    def add(name, **functions):
        module = types.ModuleType("understudy.cli.throw_away")
        vars(module).update(functions)
        monkeypatch.setitem(sys.modules, module.__name__, module)
        found = {
            inner: Command(help=(function.__doc__ or "").partition("\n")[0], function=f"throw_away:{inner}")
            for inner, function in functions.items()
        }
        command = found.get("command") or Command(help=f"What {name} does.", subcommands=found)
        monkeypatch.setitem(COMMANDS, name, command)

    return add


def exit_code(*argv):
    """The code of the SystemExit that a command line ends in."""
    with pytest.raises(SystemExit) as caught:
        main(argv)
    return caught.value.code


# --- finding a command -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("option", ["-h", "--help"])
def test_help_lists_every_command(option, capsys):
    assert exit_code(option) == 0
    out, err = capsys.readouterr()
    assert err == ""
    options = {"--help": "Show this help, or that of a command.", "--version": "Show the version of Understudy."}
    width = max(map(len, [*COMMANDS, *options]))
    wanted = ["usage: understudy <command> [options]"]
    texts = {title: {name: command.help for name, command in group.items()} for title, group in GROUPS.items()}
    for title, group in [*texts.items(), ("options", options)]:
        wanted += ["", f"{title}:", *(f"  {name:<{width}}  {text}" for name, text in group.items())]
    assert out.splitlines() == wanted
    assert [name for group in GROUPS.values() for name in group] == list(COMMANDS)


@pytest.mark.parametrize(("words", "command"), list(all_functions()))
def test_every_command_has_a_function_in_a_folder(words, command):
    assert callable(command.load())
    folder, module = command.function.partition(":")[0].split(".")
    assert (Path(understudy.__file__).parent / "cli" / folder / f"{module}.py").exists()


def test_a_command_has_a_function_or_subcommands():
    assert all(bool(command.function) != bool(command.subcommands) for command in COMMANDS.values())
    assert "train rlpd" in dict(all_functions())


def test_no_command_shows_the_help_as_a_mistake(capsys):
    assert exit_code() == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("usage: understudy <command> [options]\n")


def test_version(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"understudy {understudy.__version__}\n"


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ("verfy", "unknown command 'verfy'; did you mean 'verify'?"),
        ("crash_test", "unknown command 'crash_test'; did you mean 'crash-test'?"),
        ("help", "unknown command 'help'; did you mean '--help'?"),
        ("--verison", "unknown option '--verison'; did you mean '--version'?"),
        ("--quiet", "unknown option '--quiet'; `understudy --help` lists them all"),
        ("juggle", "unknown command 'juggle'; `understudy --help` lists them all"),
        ("", "unknown command ''; `understudy --help` lists them all"),
    ],
)
def test_an_unknown_command_is_answered_with_the_nearest(given, text, capsys):
    assert exit_code(given) == 2
    assert capsys.readouterr() == ("", text + "\n")


def test_the_command_line_of_the_process_is_the_default(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["understudy", "--version"])
    assert main() == 0
    assert capsys.readouterr().out.startswith("understudy ")


# --- running a command -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("code", [0, 1, 3])
def test_the_command_gives_the_exit_code(add, code):
    add("throw-away", command=lambda: code)
    assert main(["throw-away"]) == code


def test_arguments_become_options(add):
    def command(*, times: int = 1, deep: bool = False) -> int:
        """Do it."""
        return 10 * times + deep

    add("throw-away", command=command)
    assert main(["throw-away"]) == 10
    assert main(["throw-away", "--times", "4", "--deep"]) == 41


def test_help_and_mistakes_of_a_command(add, capsys):
    def command(*, deep: bool = False) -> int:
        """Look at every byte."""
        raise AssertionError("not to be run")

    add("throw-away", command=command)
    assert exit_code("throw-away", "--help") == 0
    out = capsys.readouterr().out
    assert "understudy throw-away" in " ".join(out.split())
    assert "Look at every" in out
    assert "--deep" in out
    assert "--no-deep" not in out
    assert exit_code("throw-away", "--no-deep") == 2
    assert exit_code("throw-away", "--depth", "3") == 2


def test_a_command_may_have_commands(add, capsys):
    def store(*, size: int) -> int:
        """Measure a store.

        At length.
        """
        return size

    add("throw-away", store=store, bare=lambda: 0)
    assert main(["throw-away", "store", "--size", "7"]) == 7
    assert exit_code("throw-away") == 2
    capsys.readouterr()
    assert exit_code("throw-away", "--help") == 0
    assert capsys.readouterr().out == (
        "usage: understudy throw-away <command> [options]\n\n"
        "commands:\n  store   Measure a store.\n  bare    \n\n"
        "options:\n  --help  Show this help, or that of a command.\n"
    )
    assert exit_code("throw-away", "stoer") == 2
    assert exit_code("throw-away", "--version") == 2
    assert capsys.readouterr().err == (
        "unknown command 'stoer'; did you mean 'store'?\n"
        "unknown option '--version'; `understudy throw-away --help` lists them all\n"
    )


# --- errors ------------------------------------------------------------------------------------------------------

LONG = "observation/wrist_1: expected uint8 [128, 128, 3], got float32 [128, 128, 3]; convert it first [red]"


@pytest.fixture
def failing(add):
    """Adds a command that raises what it is given."""

    def failing(error):
        def command() -> int:
            raise error

        add("throw-away", command=command)

    return failing


@pytest.mark.parametrize("kind", [UnderstudyError, SpecError])
@pytest.mark.parametrize("debug", [None, "0", ""])
def test_an_error_is_one_line(failing, capsys, monkeypatch, kind, debug):
    if debug is not None:
        monkeypatch.setenv("UNDERSTUDY_DEBUG", debug)
    failing(kind(LONG))
    assert main(["throw-away"]) == 1
    assert capsys.readouterr() == ("", f"error: {LONG}\n")


def test_an_error_keeps_its_traceback_for_the_debugger(failing, monkeypatch, capsys):
    monkeypatch.setenv("UNDERSTUDY_DEBUG", "1")
    failing(SpecError(LONG))
    with pytest.raises(SpecError) as caught:
        main(["throw-away"])
    assert str(caught.value) == LONG
    assert capsys.readouterr().err == ""


def test_a_bug_is_not_dressed_up_as_an_error(failing):
    failing(ZeroDivisionError("a bug"))
    with pytest.raises(ZeroDivisionError, match=r"^a bug$"):
        main(["throw-away"])


@pytest.mark.parametrize("debug", ["0", "1"])
def test_an_interrupt_is_130(failing, capsys, monkeypatch, debug):
    monkeypatch.setenv("UNDERSTUDY_DEBUG", debug)
    failing(KeyboardInterrupt())
    assert main(["throw-away"]) == 130
    assert capsys.readouterr() == ("", "interrupted\n")


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["record", "x"], "interrupted; what was recorded is kept; the same command continues"),
        (["train", "rlpd", "here"], "interrupted; `understudy resume here` continues the run"),
        (["train", "rlpd", "nowhere"], "interrupted; the run was not created"),
        (["train", "clone", "here"], "interrupted; `understudy resume here` continues the run"),
    ],
)
def test_an_interrupt_says_how_to_continue(words, text, monkeypatch, tmp_path, capsys):
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "config.json").touch()
    monkeypatch.chdir(tmp_path)

    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(sys.modules["understudy.cli.main"], "_call", interrupted)
    assert main(words) == 130
    assert capsys.readouterr() == ("", f"{text}\n")


def test_every_advice_is_for_a_command_that_exists():
    assert INTERRUPTED.keys() <= dict(all_functions()).keys()


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (errno.ENOSPC, "error: store/x: No space left on device; free some space and run it again\n"),
        (
            errno.EACCES,
            "error: store/x: Permission denied; give this user the permission, or choose another directory\n",
        ),
    ],
)
def test_what_the_system_refuses_is_one_line(failing, capsys, monkeypatch, number, text):
    failing(OSError(number, os.strerror(number), "store/x"))
    assert main(["throw-away"]) == 1
    assert capsys.readouterr() == ("", text)
    monkeypatch.setenv("UNDERSTUDY_DEBUG", "1")
    with pytest.raises(OSError, match="store/x"):
        main(["throw-away"])


def test_another_error_of_the_system_is_a_bug(failing):
    failing(OSError(errno.EIO, "Input/output error"))
    with pytest.raises(OSError, match="Input/output"):
        main(["throw-away"])


# --- in a process of its own -------------------------------------------------------------------------------------


def run(code):
    source = str(Path(understudy.__file__).parents[1])
    return subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"PYTHONPATH": source},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.mark.parametrize("words", [["--help"], ["--version"], ["train", "--help"], ["bench", "--help"]])
def test_help_and_version_import_nothing_heavy(words):
    """Lists of commands do not wait for numpy."""
    done = run(f"""
import sys
from understudy.cli import main
try:
    main({words!r})
finally:
    heavy = [name for name in ("numpy", "tyro", "rich", "understudy.core") if name in sys.modules]
    sys.stderr.write(f"heavy: {{heavy}}")
""")
    assert done.returncode == 0
    assert "understudy" in done.stdout
    assert done.stderr == "heavy: []"


def test_the_exit_code_reaches_the_shell():
    done = run("import sys; from understudy.cli import main; sys.exit(main(['juggle']))")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("unknown command 'juggle'; ")


def test_a_reader_who_goes_away_is_no_error():
    done = subprocess.run(
        f"{sys.executable} -m understudy --help | true",
        shell=True,
        capture_output=True,
        text=True,
        timeout=60,
        env=os.environ | {"PYTHONPATH": str(Path(understudy.__file__).parents[1])},
        check=False,
    )
    assert done.stderr == ""
