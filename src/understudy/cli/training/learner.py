"""`understudy learner`: the process of an RLPD run that learns."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console

from understudy.cli.console import needs_extra
from understudy.cli.training.progress_text import rlpd_progress
from understudy.core import UnderstudyError
from understudy.processes.stop import stop_on_signals


def command(
    run: Annotated[Path, tyro.conf.Positional],
    server: Annotated[str, tyro.conf.Positional],
    *,
    local_shards: tuple[str, ...] = (),
    lost_shards: tuple[str, ...] = (),
    token_file: Path | None = None,
    tls_cert: Path | None = None,
) -> int:
    """Learn from the steps that actors write to a server, and publish policies to them; resumes if it was killed.

    Args:
        run: Directory of the run with its config.json; the server must serve its store from this machine
            (`understudy serve RUN/store`).
        server: Address of that server as HOST:PORT, or of several shards as shard-0=HOST:PORT,shard-1=HOST:PORT.
        local_shards: Shards on this machine as NAME=DIRECTORY, which are read from disk instead of the network.
        lost_shards: Names of shards whose disk is lost for good; the learner no longer waits for them.
        token_file: File with the server's token, if it needs one.
        tls_cert: File with the server's TLS certificate in PEM format, if it uses one.
    """
    with needs_extra("train"):
        from understudy.training.offpolicy.learner_process import run_learner
        from understudy.training.runs.evaluate import last_score
        from understudy.training.runs.run import Run

    console = Console(highlight=False)
    console.print(f"learns from the steps that actors write to {server}, and publishes policies there", soft_wrap=True)
    with stop_on_signals() as stop, rlpd_progress(console) as progress:
        run_learner(
            Run(run),
            server,
            here=shard_directories(local_shards),
            lost=lost_shards,
            token_file=token_file,
            tls_cert=tls_cert,
            watch=progress,
            on_restored=lambda texts: console.print(*texts, sep="\n", soft_wrap=True),
            stop=stop,
        )
    console.print(last_score(Run(run)), style="green", soft_wrap=True)
    return 0


def shard_directories(texts: tuple[str, ...]) -> dict[str, Path] | None:
    """Directories by shard, from NAME=DIRECTORY; None if there are none."""
    found = {}
    for text in texts:
        name, _, path = text.partition("=")
        if not name or not path:
            raise UnderstudyError(f"local-shards: expected NAME=DIRECTORY, such as shard-0=/data/shard-0, got {text!r}")
        found[name] = Path(path)
    return found or None
