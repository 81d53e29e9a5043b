"""Worlds by their names, and the virtual environments that some of them need."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from understudy.core import SpecError
from understudy.envs.install import install, missing_libraries
from understudy.envs.registry import (
    INSTALLED_FILE,
    WORLD_REGISTRY,
    WorldEntry,
    find_world,
    open_world,
    simulators_directory,
)
from understudy.envs.suite import SuiteError
from understudy.envs.toy import ToyTable
from understudy.envs.world import WorldError


@pytest.fixture(autouse=True)
def _own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UNDERSTUDY_HOME", str(tmp_path / "home"))


def test_a_name_opens_a_world_at_its_task() -> None:
    with open_world("toy:press_button?size=32") as world:
        assert isinstance(world, ToyTable)
        assert world.task.name == "press_button"
        observation, info = world.reset(seed=1)
        assert info["task"] == "press_button"
        assert observation["front"].shape == (32, 32, 3)
    with open_world("toy?task=pick_blue&cameras=false") as world:
        assert world.task.name == "pick_blue"
        assert set(world.reset(seed=1)[0]) == {"state"}
    with open_world("toy") as world:
        assert world.task == world.suite.tasks[0]


def test_a_task_cannot_be_chosen_within_an_episode() -> None:
    with open_world("toy:press_button") as world:
        world.reset(seed=1)
        with pytest.raises(WorldError, match="an episode is running"):
            world.choose("pick_red")


def test_a_world_of_ones_own_is_module_and_factory() -> None:
    with open_world("tests.worlds:CountingWorld?max_steps=3") as world:
        world.reset(seed=1)
        assert world.task.max_steps == 3
    with pytest.raises(WorldError, match="expected it to build a World, got Fraction"):
        open_world("fractions:Fraction?numerator=1")


@pytest.mark.parametrize(
    ("name", "error", "text"),
    [
        ("toyy:pick_red", WorldError, "did you mean 'toy'"),
        ("nowhere", WorldError, "expected one of toy, metaworld, libero, gym, robot, or module:factory"),
        (
            "no.such.module:thing",
            WorldError,
            "no world 'no.such.module', expected one of toy, metaworld, libero, gym, robot. For a world of your own: "
            "there is no module 'no.such.module', neither no/such/module.py in /",
        ),
        ("fractions:pick", SpecError, r"fractions.py has no 'pick'; the worlds of understudy are toy, metaworld, lib"),
        (
            "gym:no_such_module:Thing-v0",
            WorldError,
            "there is no module 'no_such_module', neither no_such",
        ),
        ("tests.worlds:NoWorld", SpecError, r"tests/worlds.py has no 'NoWorld'"),
        ("toy:pik_red", SuiteError, "did you mean 'pick_red'"),
        ("toy:pick_red?task=pick_blue", WorldError, "two tasks, 'pick_red' and 'pick_blue'"),
        ("toy?size", WorldError, "expected option=value"),
        ("toy?colour=red", SpecError, "ToyTable: has no option 'colour'; it has size, cameras, state"),
        ("gym:", WorldError, "expected an id"),
        ("libero", WorldError, "expected a suite"),
        ("metaworld:push-v3", WorldError, "run `understudy env setup metaworld`"),
    ],
)
def test_a_wrong_name_says_what_to_do(name: str, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        open_world(name)


def test_what_a_simulator_needs_is_in_its_source(tmp_path: Path) -> None:
    known = WORLD_REGISTRY["libero"]
    known.venv.mkdir(parents=True)
    (known.venv / INSTALLED_FILE).write_text(json.dumps({"packages": list(known.packages)}))
    named = find_world("libero:libero_goal/open_the_middle_drawer_of_the_cabinet?size=64")
    assert named.isolated
    assert named.task == "open_the_middle_drawer_of_the_cabinet"
    assert named.source.options == {"suite": "libero_goal", "size": 64}
    assert named.source.python == str(tmp_path / "home" / "envs" / "libero" / "bin" / "python")
    assert named.source.env["MUJOCO_GL"] == "egl"


def test_home_is_where_the_variables_say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert simulators_directory() == tmp_path / "home"
    monkeypatch.delenv("UNDERSTUDY_HOME")
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    assert simulators_directory() == tmp_path / "data" / "understudy"
    monkeypatch.delenv("XDG_DATA_HOME")
    assert simulators_directory() == Path.home() / ".local" / "share" / "understudy"


# --- virtual environments, really made ---

SMALL = WorldEntry(
    name="small",
    about="",
    form="small",
    example="small",
    factory="tests.worlds:CountingWorld",
    parse_rest=WORLD_REGISTRY["toy"].parse_rest,
    packages=("six==1.16.0", "packaging"),
)


def test_an_environment_is_made_whole_and_is_known_by_what_is_in_it() -> None:
    said: list[str] = []
    assert not SMALL.ready
    install(SMALL, said.append)
    assert SMALL.ready
    assert "pip install six==1.16.0 packaging" in said
    assert any(line.startswith("Collecting six") for line in said)
    found = subprocess.check_output([SMALL.python, "-c", "import six; print(six.__version__)"], text=True)
    assert found.strip() == "1.16.0"
    assert "six==1.16.0" in json.loads((SMALL.venv / INSTALLED_FILE).read_text())["versions"]
    assert not replace(SMALL, packages=("six==1.17.0",)).ready  # of another version


def test_a_failed_install_says_why_and_is_not_ready() -> None:
    broken = replace(SMALL, packages=("no-such-package-is-there==0.0.1",))
    with pytest.raises(WorldError, match=r"pip failed; the whole output is in .*setup.log(.|\n)*No matching"):
        install(broken, lambda text: None)
    assert not broken.ready
    assert (broken.venv / "setup.log").is_file()


def test_what_is_no_environment_is_not_removed() -> None:
    SMALL.venv.mkdir(parents=True)
    (SMALL.venv / "thesis.txt").write_text("years of work")
    with pytest.raises(WorldError, match="got something else; move it"):
        install(SMALL, lambda text: None)
    assert (SMALL.venv / "thesis.txt").read_text() == "years of work"


def test_libraries_that_the_system_lacks_are_named_with_their_packages() -> None:
    lacking = replace(SMALL, libraries=("libc.so.6", "libnowhere.so.9"), debian=("nowhere9",))
    assert missing_libraries(lacking) == ["libnowhere.so.9"]
    with pytest.raises(WorldError, match=r"lacks libnowhere\.so\.9; run `apt-get install -y nowhere9`"):
        install(lacking, lambda text: None)
    assert not lacking.venv.exists()
    with pytest.raises(WorldError, match="needs no virtual environment"):
        install(WORLD_REGISTRY["toy"], lambda text: None)


def test_a_python_without_wheels_is_refused_before_anything_is_made() -> None:
    old = replace(SMALL, newest_python=(3, 10))
    with pytest.raises(WorldError, match=r"no wheels for Python 3\.\d+; run `.* setup small` in .* Python 3\.10 or"):
        install(old, lambda text: None)
    assert not old.venv.exists()


def test_a_home_that_cannot_be_written_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("UNDERSTUDY_HOME", str(tmp_path / "file"))
    with pytest.raises(WorldError, match="set UNDERSTUDY_HOME to another directory"):
        install(SMALL, lambda text: None)


def test_importing_the_names_needs_no_simulator() -> None:
    code = "import understudy.envs.registry, sys; print(*sys.modules)"
    loaded = subprocess.check_output([sys.executable, "-c", code], text=True)
    assert not {"mujoco", "gymnasium", "metaworld", "fastapi", "torch"} & set(loaded.split())
