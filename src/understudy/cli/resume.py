"""`understudy resume`: a run that was stopped or killed goes on."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import tyro

from understudy.cli.train import work
from understudy.core import UnderstudyError
from understudy.training.run import Run


def command(run: Annotated[Path, tyro.conf.Positional]) -> int:
    """Go on with a run as if nothing had happened, and say what was restored; or refuse in one sentence.

    Args:
        run: Directory of the run.
    """
    found = Run(run)
    if found.kind != "rlpd":
        raise UnderstudyError(f"{run}: is a run of {found.kind}, which is short; train it again in another directory")
    return work(found)
