"""`understudy crash-test`: proves on this machine that what was acknowledged is never lost."""

from __future__ import annotations

import shutil
import tempfile
import time
from pathlib import Path

from rich.console import Console
from rich.live import Live
from rich.table import Table

from understudy.replay.crash_test import CrashReport, run_crash_test


def command(*, kills: int = 100, directory: Path | None = None, seed: int = 0) -> int:
    """Kill a writing process with SIGKILL at random instants and prove that nothing acknowledged is lost.

    A process appends, commits, seals, deletes, retains and compacts; it is killed, the store is opened again and
    every row compared with what was written. Exit code 0 if nothing was lost, duplicated or different.

    Args:
        kills: How often to kill.
        directory: Where to put the store (removed if all is well); by default a new directory here.
        seed: Chooses the instants and the data.
    """
    console = Console()
    place = Path(tempfile.mkdtemp(prefix="understudy-crash-test-", dir=directory or Path.cwd()))
    started = time.monotonic()
    with Live(console=console, auto_refresh=False, transient=True) as live:

        def show(report: CrashReport) -> None:
            live.update(f"kill {report.kills} of {kills}, {time.monotonic() - started:.0f} s", refresh=True)

        report = run_crash_test(place / "store", kills=kills, seed=seed, progress=show)
    console.print(_table(report))
    console.print(
        f"acknowledged {report.acknowledged}, found {report.found}, lost {report.lost}, "
        f"duplicated {report.duplicated}, different {report.different}",
        style="green" if report.ok else "red",
        highlight=False,
    )
    for problem in report.problems[:5]:
        console.print(f"verify: {problem}", style="red")
    if report.ok:
        shutil.rmtree(place)
        return 0
    console.print(f"the store is left for a look in {place}", highlight=False)
    return 1


def _table(report: CrashReport) -> Table:
    table = Table(title=f"{report.kills} kills", title_justify="left")
    table.add_column("killed during")
    table.add_column("times", justify="right")
    for phase, times in sorted(report.killed_while.items(), key=lambda item: -item[1]):
        table.add_row(phase, str(times))
    return table
