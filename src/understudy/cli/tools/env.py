"""`understudy env`: lists worlds, installs their simulators, and checks that a world keeps its contract."""

from __future__ import annotations

import time
from typing import Annotated

import tyro
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from understudy.cli.console import size_text
from understudy.cli.progress import ProgressLine
from understudy.core import UnderstudyError
from understudy.core import tree as trees
from understudy.envs.check import check_env
from understudy.envs.install import install, missing_libraries
from understudy.envs.registry import WORLD_REGISTRY, WorldEntry, open_world


def list_(*, tasks: str | None = None) -> int:
    """List the worlds, or the tasks of one world.

    Args:
        tasks: Name of a world whose tasks to list, such as toy or libero:libero_goal.
    """
    console = Console(highlight=False)
    if tasks is not None:
        with open_world(tasks) as world:
            table = Table("task", "instruction", "starts", "steps", title=f"{world.suite.name}: the tasks of {tasks}")
            for task in world.suite.tasks:
                table.add_row(escape(task.name), escape(task.instruction), str(task.num_starts), str(task.max_steps))
    else:
        table = Table("name", "what", "state")
        for entry in WORLD_REGISTRY.values():
            table.add_row(escape(entry.form), entry.about, escape(_state(entry)))
    console.print(table)
    return 0


def setup(name: Annotated[str, tyro.conf.Positional], *, again: bool = False) -> int:
    """Install a world's simulator in a virtual environment, and test it.

    Args:
        name: Name of a world in `understudy env list`.
        again: Install the simulator again even if it is installed.
    """
    console = Console(highlight=False)
    entry = _entry(name)
    if entry.ready and not again:
        console.print(f"{name}: nothing to do; {_state(entry)}. Add --again to install it again", soft_wrap=True)
        return 0
    console.print(f"{name}: {', '.join(entry.packages)} and what they need", soft_wrap=True)
    began = time.monotonic()
    with ProgressLine(console, name) as progress:
        install(entry, progress.say)
        progress.say("testing it")
        seen = _test(entry)
    size = sum(path.lstat().st_size for path in entry.venv.rglob("*"))
    console.print(
        f"{name}: ready after {time.monotonic() - began:.0f} s, {size_text(size)} in {entry.venv}; it shows {seen}",
        style="green",
        soft_wrap=True,
        markup=False,
    )
    return 0


def check(name: Annotated[str, tyro.conf.Positional], *, episodes: int = 3, random_actions: bool = False) -> int:
    """Run episodes of a world with extreme and random actions, and check that it keeps its contract.

    Args:
        name: Name of a world, such as toy:pick_red, gym:CartPole-v1, or your own as module:factory.
        episodes: Number of starts, each of which is run several times.
        random_actions: Send these actions even if the world is not simulated: a real robot moves.
    """
    console = Console(highlight=False)
    with ProgressLine(console, name) as progress:
        progress.say("running episodes")
        report = check_env(lambda: open_world(name), episodes=episodes, random_actions=random_actions)
    console.print(str(report), style="green", soft_wrap=True, markup=False)
    return 0


def _entry(name: str) -> WorldEntry:
    if name not in WORLD_REGISTRY:
        own = [entry.name for entry in WORLD_REGISTRY.values() if entry.packages]
        raise UnderstudyError(f"env: no world {name!r} to set up; there are {', '.join(own)}")
    return WORLD_REGISTRY[name]


def _state(entry: WorldEntry) -> str:
    if not entry.packages:
        return "ready"
    if entry.ready:
        return f"ready, in {entry.venv}"
    lacking = missing_libraries(entry)
    return f"`understudy env setup {entry.name}`" + (f"; the system lacks {', '.join(lacking)}" if lacking else "")


def _test(entry: WorldEntry) -> str:
    """Create the world and begin an episode; returns its observation in words."""
    with open_world(entry.example) as world:
        observation, info = world.reset(seed=0)
        fields = ", ".join(f"{path} {list(leaf.shape)}" for path, leaf in trees.leaves(observation))
        return f"{info['task']!r}: {fields}"
