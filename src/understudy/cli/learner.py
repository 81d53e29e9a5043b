"""`understudy learner`: the half of a run that learns."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console

from understudy.cli.progress import run_line
from understudy.cli.show import needs_extra
from understudy.training.evaluate import last_score

with needs_extra("train"):
    from understudy.training.learner import run_learner
    from understudy.training.run import Run


def command(
    run: Annotated[Path, tyro.conf.Positional],
    server: Annotated[str, tyro.conf.Positional],
    *,
    token_file: Path | None = None,
    tls_cert: Path | None = None,
) -> int:
    """Learn from what actors write to a server on this machine, and publish policies to them; goes on if it was killed.

    Args:
        run: Directory of the run, with its config.json; its store is what the server serves (`understudy serve
            RUN/store`).
        server: Address of that server (host:port).
        token_file: File with the server's token.
        tls_cert: The server's certificate.
    """
    console = Console(highlight=False)
    with run_line(console) as line:
        run_learner(
            Run(run), server, token_file=token_file, tls_cert=tls_cert, watch=line,
            told=lambda texts: console.print(*texts, sep="\n", soft_wrap=True),
        )  # fmt: skip
    console.print(f"{last_score(Run(run).metrics)} of held-out episodes succeed", style="green", soft_wrap=True)
    return 0
