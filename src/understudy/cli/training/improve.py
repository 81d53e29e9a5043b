"""`understudy improve`: a policy gets better from recorded experience, without acting."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro
from rich.console import Console
from rich.table import Table

from understudy.cli.console import needs_extra
from understudy.cli.progress import ProgressLine
from understudy.cli.training.config_file import ConfigFile
from understudy.processes.stop import stop_on_signals

with needs_extra("train"):
    from understudy.training.improvement.config import METHODS, ImproveConfig

if TYPE_CHECKING:
    from understudy.training.improvement.improve import Compared
    from understudy.training.runs.run import Run

DEFAULT = ImproveConfig(policy=tyro.MISSING, experience=tyro.MISSING)


def command(
    run: Annotated[Path, tyro.conf.Positional],
    config: Annotated[ImproveConfig, tyro.conf.arg(name="")] = DEFAULT,
    *,
    config_file: ConfigFile = None,
) -> int:
    """Improve a policy from recorded experience: its own episodes, their outcomes and the corrections of humans.

    Args:
        run: Directory of the new run.
        config: Options of the run.
        config_file: YAML file with options, or a run to take them from; options in the command line go first.
    """
    with needs_extra("train"):
        from understudy.training.improvement.improve import KIND, resolved
        from understudy.training.runs.run import Run

    with Run.create_or_remove(run, KIND, resolved(config)) as created:
        return run_until_finished(created)


def run_until_finished(run: Run) -> int:
    """Train until the updates are finished, and compare if asked to; `understudy resume` calls it too."""
    with needs_extra("train"):
        from understudy.training.improvement.improve import run_comparison, run_improve

    console = Console(highlight=False)
    config = run.config(ImproveConfig)
    with stop_on_signals() as stop:
        with ProgressLine(console, config.by, "updates") as line:
            policy, found = run_improve(run, line.say, note=line.note, progress=line, stop=stop)
        console.print(f"{config.by}: {found}", soft_wrap=True)
        if config.compare:
            with ProgressLine(console, "compare", "updates") as line:
                rows = run_comparison(run, line.say, progress=line, stop=stop)
            console.print(_table(rows))
    console.print(f"{policy.version:,} updates; {run.policy}", style="green", soft_wrap=True)
    return 0


def _table(rows: list[Compared]) -> Table:
    table = Table("method", "learns from", "steps", "success on held-out starts")
    for row in rows:
        table.add_row(row.method, METHODS.get(row.method, ""), f"{row.num_steps:,}", str(row.success))
    return table
