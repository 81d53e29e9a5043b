"""`understudy completion`: real shells complete what the commands really take."""

from __future__ import annotations

import contextlib
import os
import pty
import re
import select
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from understudy.cli import main
from understudy.cli.commands import COMMANDS
from understudy.cli.tools.completion import entries

ASKED = [
    ("understudy doc", "doctor"),
    ("understudy train cl", "clone"),
    ("understudy record x --succ", "--successes"),
    ("understudy record x --human brow", "browser"),
    ("understudy record x --env toy:pick_r", "toy:pick_red"),
    ("understudy train rlpd x --intervention.pat", "--intervention.patience-steps"),
    ("understudy train rlpd x --sac.no-lay", "--sac.no-layer-norm"),
    ("understudy env setup meta", "metaworld"),
    ("understudy verify st", "store-of-mine"),  # a file
]


@pytest.fixture(scope="module")
def scripts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("completion")
    (place / "store-of-mine").touch()
    for shell in ("bash", "zsh", "fish"):
        with (place / f"understudy.{shell}").open("w") as file, contextlib.redirect_stdout(file):
            assert main(["completion", shell]) == 0
    return place


def needs(shell: str) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"there is no {shell} here")


class Terminal:
    """A shell that thinks a person sits in front of it."""

    def __init__(self, place: Path, words: list[str]):
        environment = {"PATH": os.environ["PATH"], "HOME": str(place), "TERM": "dumb", "PS1": "$ "}
        self._pid, self._fd = pty.fork()
        if self._pid == 0:
            os.chdir(place)
            os.execvpe(words[0], words, environment)
        self.text = ""

    def send(self, text: str) -> None:
        os.write(self._fd, text.encode())

    def wait_for(self, pattern: str, timeout_s: float = 60.0) -> re.Match[str]:
        """Read until the pattern is there, and take all up to it away."""
        end_s = time.monotonic() + timeout_s
        while not (found := re.search(pattern, self.text)):
            left_s = end_s - time.monotonic()
            assert left_s > 0, f"no {pattern!r} in {self.text!r}"
            if select.select([self._fd], [], [], min(left_s, 0.5))[0]:
                self.text += os.read(self._fd, 4096).decode(errors="replace")
        self.text = self.text[found.end() :]
        return found

    def close(self) -> None:
        os.close(self._fd)
        os.kill(self._pid, 9)
        os.waitpid(self._pid, 0)


def typed(terminal: Terminal, line: str, wanted: str) -> None:
    """Type a line and Tab; then see what stands there, by having the shell say it."""
    terminal.send(f"{line}\t")
    missing = wanted.removeprefix(line.rpartition(" ")[2])
    terminal.wait_for(re.escape(missing))
    terminal.send("\x15")  # take the line back


@pytest.mark.parametrize(
    ("words", "ready"),
    [
        (["bash", "--norc", "--noprofile", "-i"], 'eval "$(cat understudy.bash)"'),
        (["zsh", "-f", "-i"], 'autoload -U compinit; compinit -u -D; eval "$(cat understudy.zsh)"'),
    ],
    ids=["bash", "zsh"],
)
def test_a_shell_completes_what_a_person_types(words: list[str], ready: str, scripts: Path) -> None:
    needs(words[0])
    terminal = Terminal(scripts, words)
    try:
        terminal.send(f'{ready}; echo rea""dy\n')
        terminal.wait_for("ready")
        for line, wanted in ASKED:
            typed(terminal, line, wanted)
    finally:
        terminal.close()


def test_fish_completes_what_a_person_types(scripts: Path) -> None:
    needs("fish")
    for line, wanted in ASKED:
        done = subprocess.run(
            ["fish", "--no-config", "-c", "source understudy.fish; complete -C $argv[1]", line],
            cwd=scripts,
            env={"PATH": os.environ["PATH"], "HOME": str(scripts)},
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )
        assert wanted in done.stdout.split(), line


def options_in_help(path: str, capsys: pytest.CaptureFixture[str]) -> set[str]:
    """What stands on the left of the boxes: the options, and not what is said of them."""
    with pytest.raises(SystemExit):
        main([*path.split(), "--help-all"])
    return set(re.findall(r"^[│ ] {0,2}(?:-h, )?(--[a-z][\w.-]*)", capsys.readouterr().out, re.MULTILINE))


@pytest.mark.parametrize(
    "path", ["record", "evaluate", "train rlpd", "train clone", "serve", "compact", "env list", "doctor"]
)
def test_the_options_are_those_of_the_help(
    path: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    (entry,) = [entry for entry in entries() if entry.path == path]
    assert set(entry.options) == options_in_help(path, capsys)


def test_every_command_is_there() -> None:
    found = entries()
    assert found[0].words == tuple(COMMANDS)
    assert {entry.path.split()[0] for entry in found[1:]} <= set(COMMANDS)
    assert {"train rlpd", "bench store", "robot serve", "doctor"} <= {entry.path for entry in found}


def test_a_command_whose_extra_is_missing_is_still_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "understudy.cli.training.rlpd", raising=False)  # so that it is imported again
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.setitem(sys.modules, "understudy.training.offpolicy.rlpd", None)
    found = {entry.path: entry for entry in entries()}
    assert "train" in found[""].words
    assert "rlpd" in found["train"].words
    assert "train rlpd" not in found
    assert "record" in found


def test_an_unknown_shell_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["completion", "tcsh"])
    assert caught.value.code == 2
    assert "tcsh" in capsys.readouterr().err
