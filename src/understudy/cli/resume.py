"""`understudy resume`: a run that was stopped or killed goes on."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import tyro

from understudy.cli import onpolicy, train
from understudy.core import UnderstudyError
from understudy.training.run import Run


def command(run: Annotated[Path, tyro.conf.Positional], *, ranks: int = 1) -> int:
    """Go on with a run as if nothing had happened, and say what was restored; or refuse in one sentence.

    Args:
        run: Directory of the run.
        ranks: Processes that train together, for grpo, rloo, reinforce and ppo; not necessarily as many as before.
    """
    found = Run(run)
    if found.kind in onpolicy.ESTIMATORS:
        return onpolicy.work(found, ranks)
    if ranks != 1:
        raise UnderstudyError(f"ranks: a run of {found.kind} is trained by 1 process, got {ranks}; leave it out")
    if found.kind == "sft":
        from understudy.cli import sft  # only now: it needs transformers

        return sft.work(found)
    if found.kind != "rlpd":
        raise UnderstudyError(f"{run}: is a run of {found.kind}, which is short; train it again in another directory")
    return train.work(found)
