"""`understudy train rlpd`: a new run of RLPD, in this process or on a cluster."""

from __future__ import annotations

from collections.abc import Sequence
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
from understudy.cli.training.config_file import (
    ConfigFile,
    StoredEnv,
    say_if_there_are_no_demonstrations,
    with_stored_env,
)
from understudy.cli.training.progress_text import rlpd_progress
from understudy.cluster.config import ClusterConfig
from understudy.processes.stop import stop_on_signals

with needs_extra("train"):
    from understudy.training.offpolicy.rlpd import RLPDConfig

if TYPE_CHECKING:
    from understudy.training.runs.run import Run

DEFAULT = RLPDConfig(env=StoredEnv(RLPDConfig.env))


def command(
    run: Annotated[Path, tyro.conf.Positional],
    config: Annotated[RLPDConfig, tyro.conf.arg(name="")] = DEFAULT,
    *,
    config_file: ConfigFile = None,
    cluster: str | None = None,
    cluster_config: ClusterOptions = DEFAULT_CLUSTER,
) -> int:
    """Train a policy with RLPD: SAC on batches of demonstrations and online experience.

    Args:
        run: Directory of the new run. Demonstrations are in its store (`understudy record RUN/store`), or in --demos.
        config: Options of the run.
        config_file: YAML file with options, or a run to take them from; options in the command line go first.
        cluster: Address of the Ray cluster to run on: `local` starts one on this machine, `auto` finds the one that
            runs on this machine, and HOST:PORT connects to another.
        cluster_config: Workers of each role on the cluster, and their resources.
    """
    from understudy.training.runs.run import Run

    check_cluster_options(cluster, cluster_config)
    say = Console(highlight=False, soft_wrap=True).print
    config = with_stored_env(run, config, say)
    say_if_there_are_no_demonstrations(run, config, config_file, say)
    with Run.create_or_remove(run, "rlpd", config) as created:
        return run_until_finished(created, cluster, cluster_config)


def run_until_finished(run: Run, cluster: str | None, cluster_config: ClusterConfig) -> int:
    """Train until the steps are finished; `understudy resume` calls it too."""
    console = Console(highlight=False)

    def show_restored(lines: Sequence[str]) -> None:
        for text in lines:
            console.print(text, soft_wrap=True)

    with needs_extra("train"):
        from understudy.training.offpolicy.local_run import LocalRun
        from understudy.training.runs.evaluate import last_score

    with rlpd_progress(console, "" if cluster is None else waiting_for_cluster(cluster)) as progress:
        if cluster is not None:
            with needs_extra("cluster"):
                from understudy.cluster.launch import run_rlpd
            run_rlpd(run, cluster_config, address=cluster, on_update=progress, on_messages=show_restored)
        else:
            with stop_on_signals() as stop, LocalRun(run, progress, stop=stop) as local:
                show_restored([str(local.threads), str(local.device), *local.restored])
                local.run()
    console.print(f"{last_score(run)}; {run.policy}", style="green", soft_wrap=True)
    return 0
