"""`understudy record`: demonstrations of a task into a store."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Annotated

import numpy as np
import tyro
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from understudy.core import UnderstudyError
from understudy.envs.takeover import AlwaysScript, Takeover
from understudy.envs.toy import ToyTable
from understudy.envs.toy_script import script
from understudy.training import RecordConfig, RecordReport, Rolled, open_target, record


def command(
    target: Annotated[str, tyro.conf.Positional],
    *,
    task: str = "pick_red",
    successes: int = 20,
    noise: float = 0.1,
    operator: str | None = None,
    max_episodes: int | None = None,
    seed: int = 0,
    spool: Path | None = None,
    token_file: Path | None = None,
    tls_cert: Path | None = None,
) -> int:
    """Record demonstrations of a task until enough of them have succeeded, by a script in the toy world.

    Failures are kept and marked, and are not in the view `demo`. What was recorded before counts, so an interrupted
    recording goes on where it stopped. Exit code 1 if the successes were not reached.

    Args:
        target: Directory of a store (made if it is not there), or the address of a server (host:port).
        task: Task of the world; a wrong name lists them.
        successes: Successful demonstrations wanted, those already there included.
        noise: Spread of what is added to the script's speeds, so that no two demonstrations are alike.
        operator: Name of who demonstrates, kept with each episode.
        max_episodes: Give up after so many; by default three times the successes.
        seed: Chooses the start states and the noise.
        spool: With a server: directory on this machine in which steps survive a crash.
        token_file: With a server: file with its token.
        tls_cert: With a server: its certificate.
    """
    console = Console(highlight=False)
    config = RecordConfig(task=task, successes=successes, max_episodes=max_episodes or 3 * successes, seed=seed)
    if spool is not None and ":" not in target:
        raise UnderstudyError("spool: a store here needs none; leave it out, or give the address of a server")
    with (
        ToyTable() as table,
        open_target(target, spool=spool, token_file=token_file, tls_cert=tls_cert) as opened,
        Progress(
            TextColumn(f"{task}:"), BarColumn(), MofNCompleteColumn(), TextColumn("successes"), TimeElapsedColumn(),
            TextColumn("{task.fields[last]}"), console=console, transient=True,
        ) as bar,
    ):  # fmt: skip
        line = bar.add_task(task, total=successes, last="")

        def progress(report: RecordReport, rolled: Rolled) -> None:
            last = f"last: {'success' if rolled.success else 'failure'} in {rolled.num_steps} steps"
            bar.update(line, completed=min(report.num_successes, successes), last=last)

        act = functools.partial(script, table, noise=noise, rng=np.random.default_rng(seed))
        report = record(table, opened, Takeover(AlwaysScript(act), operator=operator), config, progress)
    done = report.num_successes >= successes
    console.print(
        f"{report.num_successes} successes in {report.num_episodes} episodes of {task} "
        f"({report.num_steps} steps recorded now)",
        style="green" if done else "red",
    )
    return 0 if done else 1
