"""`understudy crash-test`: proves on this machine that what was acknowledged is never lost."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.live import Live
from rich.table import Table

from understudy.cli.console import with_remote
from understudy.selftest.crash_test import CrashReport, run_crash_test

if TYPE_CHECKING:
    from understudy.selftest.chain_test import ChainReport


def command(*, kills: int = 100, chain: bool = False, directory: Path | None = None, seed: int = 0) -> int:
    """Kill a writing process with SIGKILL at random instants and prove that nothing acknowledged is lost.

    A process appends, commits, seals, deletes, retains and compacts; it is killed, the store is opened again and
    every row compared with what was written. Exit code 0 if nothing was lost, duplicated or different.

    Args:
        kills: How often to kill.
        chain: Test the whole way of a step instead: two actors, a server and a reader are killed at random, and the
            link between them is cut, shut, slow, frozen, or loses or repeats bytes. `kills` counts all of these.
        directory: Where to put the store (removed if all is well); by default a new directory here.
        seed: Chooses the instants and the data.
    """
    console = Console()
    place = Path(tempfile.mkdtemp(prefix="understudy-crash-test-", dir=directory or Path.cwd()))
    started = time.monotonic()
    with Live(console=console, auto_refresh=False, transient=True) as live:

        def show(number: int) -> None:
            name = "event" if chain else "kill"
            live.update(f"{name} {number} of {kills}, {time.monotonic() - started:.0f} s", refresh=True)

        ok = (_chain if chain else _store)(console, place, kills, seed, show)
    if ok:
        shutil.rmtree(place)
        return 0
    console.print(f"the store is left for a look in {place}", highlight=False)
    return 1


def _store(console: Console, place: Path, kills: int, seed: int, show: Callable[[int], None]) -> bool:
    def progress(report: CrashReport) -> None:
        show(report.kills)

    report = run_crash_test(place / "store", kills=kills, seed=seed, progress=progress)
    console.print(_table(f"{report.kills} kills", "killed during", report.killed_while))
    _verdict(
        console,
        report.ok,
        [f"verify: {problem}" for problem in report.problems],
        f"acknowledged {report.acknowledged}, found {report.found}, lost {report.lost}, "
        f"duplicated {report.duplicated}, different {report.different}",
    )
    return report.ok


def _chain(console: Console, place: Path, kills: int, seed: int, show: Callable[[int], None]) -> bool:
    def progress(report: ChainReport) -> None:
        show(report.num_events)

    run = with_remote("understudy.selftest.chain_test").run_chain_test
    report: ChainReport = run(place, events=kills, seed=seed, progress=progress)
    console.print(_table(f"{report.num_events} events", "event", report.events))
    if report.different:
        report.problems.append(f"{report.different} rows are not what was written")
    _verdict(
        console,
        report.ok,
        report.problems,
        f"recorded {report.recorded}, durable {report.durable}, lost {report.lost}, "
        f"duplicated {report.duplicated}, out of order {report.out_of_order}",
    )
    return report.ok


def _table(title: str, what: str, times: Mapping[str, int]) -> Table:
    table = Table(title=title, title_justify="left")
    table.add_column(what)
    table.add_column("times", justify="right")
    for name, count in sorted(times.items(), key=lambda item: -item[1]):
        table.add_row(name, str(count))
    return table


def _verdict(console: Console, ok: bool, problems: list[str], line: str) -> None:
    console.print(line, style="green" if ok else "red", highlight=False)
    for problem in problems[:5]:
        console.print(problem, style="red", highlight=False)
