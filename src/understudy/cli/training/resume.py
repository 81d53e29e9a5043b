"""`understudy resume`: a run that was stopped or killed continues."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from understudy.cli.training.cluster_options import DEFAULT_CLUSTER, ClusterOptions, check_cluster_options
from understudy.core import UnderstudyError

if TYPE_CHECKING:
    from understudy.training.runs.run import Run


def command(
    run: Annotated[Path, tyro.conf.Positional],
    *,
    steps: int | None = None,
    iterations: int | None = None,
    ranks: int = 1,
    cluster: str | None = None,
    cluster_config: ClusterOptions = DEFAULT_CLUSTER,
) -> int:
    """Resume a run from its newest checkpoint, as if it had not been stopped, and print what was restored.

    Args:
        run: Directory of the run to resume.
        steps: New number of environment steps of a run of rlpd, to train it for longer; it stays the run's number.
        iterations: New number of iterations of a run of grpo, rloo, reinforce or ppo, to train it for longer.
        ranks: Number of processes that train together, for grpo, rloo, reinforce and ppo; it may differ from before.
        cluster: Address of the Ray cluster to run on: `local` starts one on this machine, `auto` finds the one that
            runs on this machine, and HOST:PORT connects to another.
        cluster_config: Workers of each role on the cluster, and their resources; by default as before.
    """
    from understudy.cluster.status import last_cluster_config
    from understudy.training.runs.run import ON_POLICY, Run

    found = Run(run)
    check_cluster_options(cluster, cluster_config)
    _extend(found, steps=steps, iterations=iterations)
    if cluster is not None and cluster_config == DEFAULT_CLUSTER:
        cluster_config = last_cluster_config(run) or cluster_config
    if found.kind in ON_POLICY:
        from understudy.cli.training import onpolicy

        return onpolicy.run_until_finished(found, ranks, cluster, cluster_config)
    if ranks != 1:
        raise UnderstudyError(f"ranks: a run of {found.kind} has 1 process, got {ranks}; leave --ranks out")
    if cluster is not None and found.kind != "rlpd":
        raise UnderstudyError(f"cluster: a run of {found.kind} has 1 process; leave --cluster out")
    if found.kind == "sft":
        from understudy.cli.training import sft

        return sft.run_until_finished(found)
    if found.kind == "improve":
        from understudy.cli.training import improve

        return improve.run_until_finished(found)
    if found.kind == "cloning":
        from understudy.cli.training import clone

        return clone.run_until_finished(found)
    if found.kind != "rlpd":
        raise UnderstudyError(f"{run}: a run of {found.kind} cannot be resumed by this version of understudy")
    from understudy.cli.training import rlpd

    return rlpd.run_until_finished(found, cluster, cluster_config)


def _extend(run: Run, **numbers: int | None) -> None:
    """Train for longer than the run was created for, where that changes nothing but its end."""
    from understudy.training.runs.run import ON_POLICY

    options = {"rlpd": "steps", **dict.fromkeys(ON_POLICY, "iterations")}
    for option, number in numbers.items():
        if number is None:
            continue
        if options.get(run.kind) != option:
            fits = options.get(run.kind)
            instead = f"use --{fits}" if fits else "start a new run"
            raise UnderstudyError(f"{option}: a run of {run.kind} is not lengthened by --{option}; {instead}")
        if "RANK" in os.environ:  # every process would do it
            raise UnderstudyError(
                f"{option}: is set by one process; use `understudy resume --ranks` instead of torchrun"
            )
        run.extend(option, number)
