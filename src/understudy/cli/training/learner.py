"""`understudy learner`: the half of a run that learns."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console

from understudy.cli.console import needs_extra
from understudy.cli.training.progress import run_line
from understudy.core import UnderstudyError
from understudy.training.runs.evaluate import last_score

with needs_extra("train"):
    from understudy.training.offpolicy.learner_process import run_learner
    from understudy.training.runs.run import Run


def command(
    run: Annotated[Path, tyro.conf.Positional],
    server: Annotated[str, tyro.conf.Positional],
    *,
    here: tuple[str, ...] = (),
    lost: tuple[str, ...] = (),
    token_file: Path | None = None,
    tls_cert: Path | None = None,
) -> int:
    """Learn from what actors write to a server, and publish policies to them; goes on if it was killed.

    Args:
        run: Directory of the run, with its config.json; its store is what the server serves, on this machine
            (`understudy serve RUN/store`).
        server: Address of that server (host:port), or of several shards (shard-0=host:port,shard-1=host:port).
        here: Shards on this machine, which are read without the network (shard-0=DIRECTORY).
        lost: Names of shards that are gone for good and were counted on.
        token_file: File with the server's token.
        tls_cert: The server's certificate.
    """
    console = Console(highlight=False)
    with run_line(console) as line:
        run_learner(
            Run(run),
            server,
            here=read_places(here),
            lost=lost,
            token_file=token_file,
            tls_cert=tls_cert,
            watch=line,
            told=lambda texts: console.print(*texts, sep="\n", soft_wrap=True),
        )
    console.print(f"{last_score(Run(run).metrics)} of held-out episodes succeed", style="green", soft_wrap=True)
    return 0


def read_places(texts: tuple[str, ...]) -> dict[str, Path] | None:
    """Names and directories, from name=directory; None if there are none."""
    found = {}
    for text in texts:
        name, _, path = text.partition("=")
        if not name or not path:
            raise UnderstudyError(f"here: expected name=directory, such as shard-0=/data/shard-0, got {text!r}")
        found[name] = Path(path)
    return found or None
