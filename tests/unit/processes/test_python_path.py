"""Names with a colon: files of the current directory are found, never before what is installed; errors say where."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.docs.pages import DOCS, blocks

from understudy.core import UnderstudyError
from understudy.processes.python_path import find_module, import_object


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A current directory that is not on the import path, as for the installed command."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry not in ("", ".")])
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        if getattr(sys.modules[name], "__file__", None) and str(tmp_path) in str(sys.modules[name].__file__):
            del sys.modules[name]


def test_a_file_of_the_current_directory_is_found_last(here: Path) -> None:
    before = list(sys.path)
    assert not find_module("own_thing")
    assert sys.path == before  # nothing is added for what is not there
    (here / "own_thing.py").write_text("class Outer:\n    value = 3\n")
    assert import_object("own_thing:Outer.value", UnderstudyError) == 3
    assert sys.path == [*before, str(here)]


def test_a_folder_with_modules_is_found(here: Path) -> None:
    (here / "own_folder").mkdir()
    (here / "own_folder" / "inner.py").write_text("value = 4\n")
    assert import_object("own_folder.inner:value", UnderstudyError) == 4
    assert not find_module("own_folder.other")


def test_a_file_never_replaces_what_is_installed(here: Path) -> None:
    (here / "fractions.py").write_text("mine = 1\n")
    with pytest.raises(UnderstudyError, match=r"fractions.py has no 'mine'; .*fractions.py has the same name"):
        import_object("fractions:mine", UnderstudyError)
    assert str(here) not in sys.path


@pytest.mark.parametrize(
    ("text", "path", "says"),
    [
        (None, "own_bad:x", r"there is no module 'own_bad', neither own_bad.py in /.* nor on Python's import path"),
        ("x = 1", "own_bad:y", r"/own_bad.py has no 'y'"),
        ("import no_such", "own_bad:x", "own_bad cannot be imported .ModuleNotFoundError: No module named 'no_such'"),
        ("def x(:", "own_bad:x", r"own_bad cannot be imported .SyntaxError: invalid syntax .own_bad.py, line 1"),
        ("x = 1", "own_bad", "expected module:name, such as my_file:my_function"),
        ("x = 1", "../own_bad:x", "there is no module"),
    ],
)
def test_an_error_says_where_it_looked(here: Path, text: str | None, path: str, says: str) -> None:
    if text is not None:
        (here / "own_bad.py").write_text(text)
    with pytest.raises(UnderstudyError, match=says):
        import_object(path, UnderstudyError)


WORKERS = """
from understudy.envs import IsolatedWorld
from understudy.envs.registry import find_world
with IsolatedWorld(find_world("line:Line").source) as world:
    world.reset(seed=1)
"""


def test_the_command_and_its_workers_find_it(tmp_path: Path) -> None:
    """The installed command, whose directory is that of the environment, and a world in a process of its own."""
    (world,) = blocks((DOCS / "guides" / "simulator.md").read_text())
    (tmp_path / "line.py").write_text(world)
    understudy = Path(sysconfig.get_path("scripts")) / "understudy"
    checked = run(understudy, "env", "check", "line:Line", cwd=tmp_path)
    assert checked.returncode == 0, checked.stderr
    assert "Line: 11 checks passed" in checked.stdout
    elsewhere = tmp_path / "workers" / "main.py"  # the import path begins with the folder of the script, not with here
    elsewhere.parent.mkdir()
    elsewhere.write_text(WORKERS)
    worked = run(sys.executable, elsewhere, cwd=tmp_path)
    assert worked.returncode == 0, worked.stderr


def run(*command: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)
