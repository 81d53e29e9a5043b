"""`understudy record`: demonstrations of a task into a store."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
import tyro
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from understudy.cli.operator import open_hands, open_pace, open_page
from understudy.core import UnderstudyError
from understudy.envs.registry import open_world
from understudy.envs.teleop.takeover import AlwaysScript, Device, Takeover
from understudy.envs.world import World
from understudy.training import RecordConfig, RecordReport, Rolled, open_target
from understudy.training.data.record import record
from understudy.training.data.run_episode import Show


def command(
    target: Annotated[str, tyro.conf.Positional],
    *,
    env: str = "toy:pick_red",
    human: Literal["script", "browser", "spacemouse"] = "script",
    successes: int = 20,
    noise: float = 0.1,
    operator: str | None = None,
    max_episodes: int | None = None,
    seed: int = 0,
    hz: float | None = None,
    page: str | None = None,
    spool: Path | None = None,
    token_file: Path | None = None,
    tls_cert: Path | None = None,
) -> int:
    """Record demonstrations of a task until enough of them have succeeded, by a script or by a person.

    Failures are kept and marked, and are not in the view `demo`. What was recorded before counts, so an interrupted
    recording goes on where it stopped. Exit code 1 if the successes were not reached.

    Args:
        target: Directory of a store (made if it is not there), or the address of a server (host:port).
        env: The world and its task, such as metaworld:push-v3; `understudy env list` lists the worlds.
        human: Who demonstrates: the world's script, or a person at a browser page or a SpaceMouse.
        successes: Successful demonstrations wanted, those already there included.
        noise: Spread of what is added to the script's speeds, so that no two demonstrations are alike.
        operator: Name of who demonstrates, kept with each episode.
        max_episodes: Give up after so many; by default three times the successes.
        seed: Chooses the start states and the noise.
        hz: Steps a second; by default 10 for a person, and as fast as it goes for a script.
        page: Address (host:port) of the page with live pictures; 127.0.0.1:7448 with a browser, else none.
        spool: With a server: directory on this machine in which steps survive a crash.
        token_file: With a server: file with its token.
        tls_cert: With a server: its certificate.
    """
    console = Console(highlight=False)
    if spool is not None and ":" not in target:
        raise UnderstudyError("spool: a store here needs none; leave it out, or give the address of a server")
    with ExitStack() as undo:
        with console.status(f"{env}: starting"):
            world = undo.enter_context(open_world(env))
        task = world.task.name
        config = RecordConfig(task=task, successes=successes, max_episodes=max_episodes or 3 * successes, seed=seed)
        if human == "script":
            device: Device = _script(world, noise, seed)
            show: Show | None = None if page is None else open_page(undo, console, world, page, watch_only=True).show
        else:
            device, show = open_hands(undo, console, world, human, page, to_the_end=True)
        pace = open_pace(world, hz, person=human != "script")
        takeover = Takeover(device, operator=operator)
        opened = undo.enter_context(open_target(target, spool=spool, token_file=token_file, tls_cert=tls_cert))
        bar = undo.enter_context(_bar(console, task))
        line = bar.add_task(task, total=successes, last="")

        def progress(report: RecordReport, rolled: Rolled) -> None:
            last = f"last: {'success' if rolled.success else 'failure'} in {rolled.num_steps} steps"
            bar.update(line, completed=min(report.num_successes, successes), last=last)

        report = record(world, opened, takeover, config, progress, pace=pace, show=show)
    done = report.num_successes >= successes
    broken = f", {report.num_broken} of them cut because the simulator failed" if report.num_broken else ""
    console.print(
        f"{report.num_successes} successes in {report.num_episodes} episodes of {task}{broken} "
        f"({report.num_steps} steps recorded now)",
        style="green" if done else "red",
        soft_wrap=True,
    )
    kept = pace or getattr(world, "pace", None)  # its own, of a world that lives in real time
    if kept is not None and kept.report.num_ticks:
        console.print(str(kept.report), soft_wrap=True)
    return 0 if done else 1


def _script(world: World, noise: float, seed: int) -> Device:
    if not world.has_expert:
        raise UnderstudyError(f"human: {world.suite.name} has no scripted expert; demonstrate with --human browser")
    rng = np.random.default_rng(seed)
    return AlwaysScript(lambda: world.advise(noise=noise, rng=rng).action)


def _bar(console: Console, task: str) -> Progress:
    return Progress(
        TextColumn(f"{task}:"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("successes"),
        TimeElapsedColumn(),
        TextColumn("{task.fields[last]}"),
        console=console,
        transient=True,
    )
