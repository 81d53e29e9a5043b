"""`understudy train clone`: a new run of behaviour cloning, in this process."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console

from understudy.cli.console import needs_extra
from understudy.cli.progress import ProgressLine

with needs_extra("train"):
    from understudy.training.offpolicy.cloning import CloningRunConfig

DEFAULT = CloningRunConfig()


def command(
    run: Annotated[Path, tyro.conf.Positional],
    config: Annotated[CloningRunConfig, tyro.conf.arg(name="")] = DEFAULT,
) -> int:
    """Train a policy with behaviour cloning on demonstrations, and evaluate it; the baseline of RLPD.

    Args:
        run: Directory of the new run. Demonstrations are in its store (`understudy record RUN/store`), or in --demos.
        config: Options of the run.
    """
    with needs_extra("train"):
        from understudy.training.offpolicy.cloning import run_cloning
        from understudy.training.runs.run import Run

    console = Console(highlight=False)
    with ProgressLine(console, "cloning", "updates") as line, Run.create_or_remove(run, "cloning", config) as created:
        found = run_cloning(created, line.say, note=line.note, progress=line)
    console.print(f"{found.success_rate} of held-out episodes succeed; {created.policy}", style="green", soft_wrap=True)
    return 0
