"""`understudy train grpo`, `rloo`, `reinforce`, `ppo`: a new on-policy run, on ranks or on a cluster."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro
from rich.console import Console

from understudy.cli.console import needs_extra
from understudy.cli.training.cluster_options import (
    DEFAULT_CLUSTER,
    ClusterOptions,
    check_cluster_options,
    waiting_for_cluster,
)
from understudy.cli.training.config_file import ConfigFile
from understudy.cli.training.progress_text import iteration_progress
from understudy.cluster.config import ClusterConfig
from understudy.core import UnderstudyError
from understudy.processes.stop import Stopped, stop_on_signals

with needs_extra("train"):
    from understudy.training.onpolicy.config import ESTIMATORS, OnPolicyConfig, default_config

if TYPE_CHECKING:
    from understudy.training.distributed.ranks import Ranks
    from understudy.training.runs.run import Run

STOP_S = 600.0  # that ranks have to save after a signal: a large policy takes a while
SUMMARIES = {
    "grpo": "Train a policy with GRPO: advantages are normalized within groups of episodes from the same start.",
    "rloo": "Train a policy with RLOO: the baseline of an episode is the mean return of the others of its group.",
    "reinforce": "Train a policy with REINFORCE++: returns are normalized over the whole batch, without groups.",
    "ppo": "Train a policy with PPO: a value head and generalized advantage estimation.",
}
ARGS = """

    Args:
        run: Directory of the new run, which is created.
        config: Options of the run.
        config_file: YAML file with options, or a run to take them from; options in the command line go first.
        ranks: Number of processes on this machine that train together; above 1, set --engine.parallel to ddp or fsdp.
        cluster: Address of the Ray cluster to run on: `local` starts one on this machine, `auto` finds the one that
            runs on this machine, and HOST:PORT connects to another.
        cluster_config: Workers of each role on the cluster, and their resources.
    """


def _command(kind: str) -> Callable[..., int]:
    default = default_config(kind, policy=tyro.MISSING)

    def command(
        run: Annotated[Path, tyro.conf.Positional],
        config: Annotated[OnPolicyConfig, tyro.conf.arg(name="")] = default,
        *,
        config_file: ConfigFile = None,
        ranks: int = 1,
        cluster: str | None = None,
        cluster_config: ClusterOptions = DEFAULT_CLUSTER,
    ) -> int:
        return _start(kind, run, config, ranks, cluster, cluster_config)

    command.__doc__ = SUMMARIES[kind] + ARGS
    return command


grpo, rloo, reinforce, ppo = (_command(kind) for kind in ("grpo", "rloo", "reinforce", "ppo"))


def _start(
    kind: str,
    path: Path,
    config: OnPolicyConfig,
    num_ranks: int,
    cluster: str | None,
    cluster_config: ClusterConfig,
) -> int:
    expected, got = ESTIMATORS[kind], config.algorithm.adv_estimator
    if got != expected:
        name = next(name for name, estimator in ESTIMATORS.items() if estimator == got)
        raise UnderstudyError(
            f"algorithm.adv-estimator: `train {kind}` expects {expected!r}, got {got!r}; use `train {name}`"
        )
    with needs_extra("train"):
        from understudy.training.distributed.ranks import join
        from understudy.training.runs.run import Run

    config = replace(config, policy=str(Path(config.policy).resolve()))  # ranks may have another working directory
    if "RANK" in os.environ:  # torchrun has started this process
        with join(device=config.device) as ranks:
            run = Run.create(path, kind, config) if ranks.first else Run(path)
            ranks.barrier("the run is created")
            return _run_rank(run, ranks)
    check_cluster_options(cluster, cluster_config)
    num_processes = num_ranks if cluster is None else cluster_config.learner.num
    if num_processes > 1 and config.engine.parallel == "none":
        raise UnderstudyError(f"engine.parallel: 'none' is for 1 process, got {num_processes} ranks; use ddp or fsdp")
    try:
        with Run.create_or_remove(path, kind, config) as run:
            code = run_until_finished(run, num_ranks, cluster, cluster_config)
            if code:
                raise _RanksFailedError(code)  # removes the run if it has not begun
    except _RanksFailedError as error:
        return error.code
    return 0


class _RanksFailedError(Exception):
    """Other processes failed and have printed why."""

    def __init__(self, code: int):
        self.code = code


def run_until_finished(run: Run, num_ranks: int, cluster: str | None, cluster_config: ClusterConfig) -> int:
    """Train until the iterations are finished; `understudy resume` calls it too."""
    if cluster is not None:
        return _run_on_cluster(run, num_ranks, cluster, cluster_config)
    with needs_extra("train"):
        from understudy.training.distributed.launch import launch
        from understudy.training.distributed.ranks import join

    if "RANK" not in os.environ and num_ranks > 1:
        return launch(num_ranks, ["-m", "understudy", "resume", str(run.path)], stop_s=STOP_S)
    with join(device=run.config(OnPolicyConfig).device) as ranks:
        return _run_rank(run, ranks)


def _run_rank(run: Run, ranks: Ranks) -> int:
    from understudy.training.onpolicy.onpolicy_run import OnPolicyRun

    console = Console(highlight=False, quiet=not ranks.first)
    if ranks.first and ranks.device.type == "cuda":
        warn_if_too_large(run.config(OnPolicyConfig), ranks, console)
    try:
        with (
            stop_on_signals() as stop,
            iteration_progress(console) as progress,
            OnPolicyRun(run, progress, ranks, stop=stop) as local,
        ):
            for text in [str(local.threads), str(local.device), *local.restored]:
                console.print(text, soft_wrap=True)
            local.run()
    except Stopped as stopped:
        if ranks.first:
            raise
        return stopped.exit_code  # the first rank says what was saved
    if ranks.first:
        _print_score(run, console)
    return 0


def warn_if_too_large(config: OnPolicyConfig, ranks: Ranks, console: Console) -> None:
    """Say so before the run starts if it is not expected to fit on its GPUs."""
    from understudy.training.gpu_estimate.estimate import memory_warning
    from understudy.training.gpu_estimate.gpus import device_memory

    name, memory = device_memory(ranks.device)
    warning = memory_warning(config, ranks=ranks.size, gpu=name, memory=memory)
    if warning is not None:
        console.print(f"warning: {warning}", style="yellow", soft_wrap=True, markup=False)


def _run_on_cluster(run: Run, num_ranks: int, cluster: str, cluster_config: ClusterConfig) -> int:
    if num_ranks > 1:
        raise UnderstudyError(f"ranks: on a cluster use --cluster.learner.num instead, got --ranks {num_ranks} too")
    with needs_extra("cluster"):
        from understudy.cluster.launch import run_on_policy

    console = Console(highlight=False)

    def show_restored(lines: Sequence[str]) -> None:
        for text in lines:
            console.print(text, soft_wrap=True)

    with iteration_progress(console, waiting_for_cluster(cluster)) as progress:
        run_on_policy(run, cluster_config, address=cluster, on_update=progress, on_messages=show_restored)
    _print_score(run, console)
    return 0


def _print_score(run: Run, console: Console) -> None:
    from understudy.training.runs.evaluate import last_score

    console.print(f"{last_score(run)}; {run.policy}", style="green", soft_wrap=True)
