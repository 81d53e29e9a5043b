"""`understudy crash-test`: checks on this machine that no acknowledged step is ever lost."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from understudy.cli.console import with_remote
from understudy.cli.progress import ProgressLine
from understudy.cli.tools.bench import working_directory
from understudy.core import UnderstudyError

if TYPE_CHECKING:
    from understudy.selftest.chain_test import ChainReport
    from understudy.selftest.crash_test import CrashReport


def command(
    *,
    kills: int = 100,
    chain: bool = False,
    damage: bool = False,
    encoded: bool = False,
    directory: Path | None = None,
    seed: int = 0,
) -> int:
    """Kill a writing process with SIGKILL at random times and check that no acknowledged step is lost.

    The process appends, commits, seals, deletes, retains and compacts. After each kill the store is opened again and
    every row is compared with what was written. The exit code is 0 if nothing was lost, duplicated or different.

    Args:
        kills: Number of kills, or of faults with --chain.
        chain: Test the whole path of a step instead: kill two actors, a server and a reader at random, and make the
            connection between them fail, slow, freeze, or lose or repeat bytes.
        damage: After each kill, also flip bits in a file of a copy of the store or cut it short, then open, verify and
            repair the copy and check that no wrong row is served and that all undamaged episodes are there. A new store
            is begun every 20 kills, because each check reads all of it.
        encoded: Write steps with a camera in H.264 and a depth camera in PNG too, which needs the extra "cameras".
        directory: Directory in which the store is made, by default the working directory; the store is removed after
            success.
        seed: Seed of the times of the kills and of the data.
    """
    if chain and damage:
        raise UnderstudyError("expected one of --chain and --damage, got both; run them one after the other")
    if encoded:
        _check_encoder()
    console = Console()
    path = Path(tempfile.mkdtemp(prefix="understudy-crash-test-", dir=working_directory(directory)))
    # Drawn only between two kills: a process with another thread must not fork.
    with ProgressLine(console, "crash-test", "events" if chain else "kills", threaded=False) as progress:

        def show(number: int) -> None:
            progress(number, kills)

        if chain:
            ok = _chain(console, path, kills, seed, show, encoded=encoded)
        else:
            ok = _store(console, path, kills, seed, show, damage=damage, encoded=encoded)
    if ok:
        shutil.rmtree(path)
        return 0
    console.print(f"the store is kept in {path}", highlight=False)
    return 1


def _check_encoder() -> None:
    """An error if the library of H.264 is missing, which the killed processes would only say in their logs."""
    import numpy as np

    from understudy.codecs import encode_frames
    from understudy.core import H264

    encode_frames(H264(), np.zeros((1, 16, 16, 3), np.uint8))


def _store(
    console: Console,
    path: Path,
    kills: int,
    seed: int,
    show: Callable[[int], None],
    *,
    damage: bool,
    encoded: bool,
) -> bool:
    from understudy.selftest.crash_test import run_crash_test

    def progress(report: CrashReport) -> None:
        show(report.kills)

    report = run_crash_test(path / "store", kills=kills, seed=seed, damage=damage, encoded=encoded, progress=progress)
    console.print(_table(f"{report.kills} kills", "killed during", report.killed_while))
    if report.damage is not None:
        found = report.damage
        console.print(_table(f"{found.damaged.total()} damaged copies", "file", found.damaged))
        _print_result(
            console,
            found.problems,
            f"plain open refused {found.num_refused}, repaired {found.num_repaired}; of {found.hit} rows in episodes "
            f"with a damaged segment found {found.hit_found}; of all others lost {found.lost}; "
            f"different {found.different}",
            ok=not (found.lost or found.different or found.problems),
        )
    _print_result(
        console,
        [f"verify: {problem}" for problem in report.problems],
        f"acknowledged {report.acknowledged}, found {report.found}, lost {report.lost}, "
        f"duplicated {report.duplicated}, different {report.different}",
        ok=report.ok,
    )
    return report.ok


def _chain(console: Console, path: Path, kills: int, seed: int, show: Callable[[int], None], *, encoded: bool) -> bool:
    def progress(report: ChainReport) -> None:
        show(report.num_events)

    run = with_remote("understudy.selftest.chain_test").run_chain_test
    report: ChainReport = run(path, events=kills, seed=seed, encoded=encoded, progress=progress)
    console.print(_table(f"{report.num_events} events", "event", report.events))
    if report.different:
        report.problems.append(f"{report.different} rows are not what was written")
    _print_result(
        console,
        report.problems,
        f"recorded {report.recorded}, durable {report.durable}, lost {report.lost}, "
        f"duplicated {report.duplicated}, out of order {report.out_of_order}",
        ok=report.ok,
    )
    return report.ok


def _table(title: str, what: str, times: Mapping[str, int]) -> Table:
    table = Table(title=title, title_justify="left")
    table.add_column(what)
    table.add_column("times", justify="right")
    for name, count in sorted(times.items(), key=lambda item: -item[1]):
        table.add_row(name, str(count))
    return table


def _print_result(console: Console, problems: list[str], line: str, *, ok: bool) -> None:
    console.print(line, style="green" if ok else "red", highlight=False)
    for problem in problems[:5]:
        console.print(problem, style="red", highlight=False)
