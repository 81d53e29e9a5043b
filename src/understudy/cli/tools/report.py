"""`understudy report`: a run as one HTML file, and its figures for a paper."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console

from understudy.cli.console import with_extra


def command(run: Annotated[Path, tyro.conf.Positional], *, out: Path | None = None) -> int:
    """Write a report of a run, finished or at work: one HTML file that opens offline, and its figures.

    In it: the learning curve with its interval, the human's share, losses, lengths of episodes, the last evaluations
    with what they were measured on, the worst episodes as films, the config, and the command that repeats the run.

    Args:
        run: Directory of the run.
        out: Directory for report.html and the figures (SVG, PDF, PNG); by default report/ in the run.
    """
    console = Console(highlight=False)
    written = with_extra("understudy.dashboard.report.report", "plot").write_report(run, out)
    for text in written.missing:
        console.print(text, style="yellow", soft_wrap=True, markup=False)
    console.print(f"{written.html}, {len(written.figures)} files of figures", style="green", soft_wrap=True)
    return 0
