"""`understudy resume`: a run that was stopped or killed goes on."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import tyro

from understudy.cli.training import onpolicy, train
from understudy.cli.training.onpolicy import DEFAULT_PLACE
from understudy.cluster.config import ClusterConfig
from understudy.cluster.status import last_cluster_config
from understudy.core import UnderstudyError
from understudy.training.runs.run import Run


def command(
    run: Annotated[Path, tyro.conf.Positional],
    *,
    ranks: int = 1,
    cluster: str | None = None,
    place: ClusterConfig = DEFAULT_PLACE,
) -> int:
    """Go on with a run as if nothing had happened, and say what was restored; or refuse in one sentence.

    Args:
        run: Directory of the run.
        ranks: Processes that train together, for grpo, rloo, reinforce and ppo; not necessarily as many as before.
        cluster: Go on on Ray: `here` starts one on this machine, `auto` finds the one that runs here, HOST:PORT
            another.
        place: How many of each role there are on the cluster, and what each takes; if nothing is said, as before.
    """
    found = Run(run)
    onpolicy.check_place(cluster, place)
    if cluster is not None and place == DEFAULT_PLACE:
        place = last_cluster_config(run) or place
    if found.kind in onpolicy.ESTIMATORS:
        return onpolicy.work(found, ranks, cluster, place)
    if ranks != 1:
        raise UnderstudyError(f"ranks: a run of {found.kind} is trained by 1 process, got {ranks}; leave it out")
    if cluster is not None and found.kind != "rlpd":
        raise UnderstudyError(f"cluster: a run of {found.kind} is trained by 1 process; leave it out")
    if found.kind == "sft":
        from understudy.cli.training import sft  # only now: it needs transformers

        return sft.work(found)
    if found.kind != "rlpd":
        raise UnderstudyError(f"{run}: is a run of {found.kind}, which is short; train it again in another directory")
    return train.work(found, cluster, place)
