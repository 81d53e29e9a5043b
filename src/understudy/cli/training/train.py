"""`understudy train`: a new run, in this process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console

from understudy.cli.console import needs_extra
from understudy.cli.training.progress import run_line
from understudy.training.runs.evaluate import last_score

with needs_extra("train"):
    from understudy.cli.training import onpolicy
    from understudy.cli.training.onpolicy import DEFAULT_PLACE
    from understudy.cluster.config import ClusterConfig
    from understudy.training.offpolicy.cloning import CloningRunConfig, run_cloning
    from understudy.training.offpolicy.local import LocalRun
    from understudy.training.offpolicy.rlpd import RLPDConfig
    from understudy.training.runs.run import Run

DEFAULT_RLPD, DEFAULT_CLONING = RLPDConfig(), CloningRunConfig()


def rlpd(
    run: Annotated[Path, tyro.conf.Positional],
    config: Annotated[RLPDConfig, tyro.conf.arg(name="")] = DEFAULT_RLPD,
    *,
    cluster: str | None = None,
    place: ClusterConfig = DEFAULT_PLACE,
) -> int:
    """Learn from demonstrations and practice (SAC, half of each batch demonstrations).

    Args:
        run: Directory of the run, made if it is not there. Demonstrations are in its store (`understudy record
            RUN/store`), or elsewhere (--demos).
        config: What to do.
        cluster: Run on Ray: `here` starts one on this machine, `auto` finds the one that runs here, HOST:PORT another.
        place: How many of each role there are on the cluster, and what each takes.
    """
    onpolicy.check_place(cluster, place)
    with Run.beginning(run, "rlpd", config) as begun:
        return work(begun, cluster, place)


def clone(
    run: Annotated[Path, tyro.conf.Positional],
    config: Annotated[CloningRunConfig, tyro.conf.arg(name="")] = DEFAULT_CLONING,
) -> int:
    """Imitate demonstrations (behaviour cloning), and evaluate: the baseline of everything else.

    Args:
        run: Directory of the run, made if it is not there.
        config: What to do.
    """
    console = Console(highlight=False)
    with console.status("cloning") as status, Run.beginning(run, "cloning", config) as begun:
        found = run_cloning(begun, lambda text: status.update(f"cloning: {text}"))
    console.print(f"{found.score} of held-out episodes succeed; {run / 'policy.safetensors'}", style="green")
    return 0


COMMANDS: dict[str, Callable[..., int]] = {"rlpd": rlpd, "clone": clone, **onpolicy.COMMANDS}


def work(run: Run, cluster: str | None = None, place: ClusterConfig = DEFAULT_PLACE) -> int:
    """Run until the steps are done; also for `understudy resume`."""
    console = Console(highlight=False)

    def told(lines: Sequence[str]) -> None:
        for text in lines:
            console.print(text, soft_wrap=True)

    with run_line(console) as line:
        if cluster is not None:
            with needs_extra("cluster"):
                from understudy.cluster.launch import run_rlpd
            run_rlpd(run, place, address=cluster, on_update=line, on_messages=told)
        else:
            with LocalRun(run, line) as local:
                told(local.restored)
                local.go()
    console.print(
        f"{last_score(run.metrics)} of held-out episodes succeed; {run.policy}", style="green", soft_wrap=True
    )
    return 0
