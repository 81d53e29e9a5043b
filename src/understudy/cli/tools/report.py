"""`understudy report`: writes a report of a run as one HTML file, and its figures for a paper."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console

from understudy.cli.console import with_extra


def command(run: Annotated[Path, tyro.conf.Positional], *, out: Path | None = None) -> int:
    """Write a report of a run, finished or running: one HTML file that opens offline, and its figures.

    It shows the learning curve with its interval, the intervention rate, losses, episode lengths, the last evaluations,
    videos of the worst episodes, the config, and the command that repeats the run.

    Args:
        run: Directory of the run.
        out: Directory for report.html and the figures (SVG, PDF, PNG); by default report/ in the run.
    """
    console = Console(highlight=False)
    written = with_extra("understudy.dashboard.report.report", "plot").write_report(run, out)
    for text in written.missing:
        console.print(text, style="yellow", soft_wrap=True, markup=False)
    console.print(f"{written.html}, {len(written.figures)} figure files", style="green", soft_wrap=True)
    return 0
