"""`understudy train grpo`, `rloo`, `reinforce`, `ppo`: a policy rehearses, and learns from what succeeded."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console

from understudy.cli.console import needs_extra
from understudy.cli.training.progress import iteration_line
from understudy.core import UnderstudyError
from understudy.training.runs.evaluate import last_score

with needs_extra("train"):
    from understudy.cluster.config import ClusterConfig
    from understudy.training.distributed.launch import launch
    from understudy.training.distributed.ranks import Ranks, join
    from understudy.training.onpolicy.config import ESTIMATORS as ESTIMATORS  # for `understudy resume`
    from understudy.training.onpolicy.config import OnPolicyConfig, default_config
    from understudy.training.runs.run import Run

DEFAULT_PLACE = ClusterConfig()
LINES = {
    "grpo": "Learn from groups of episodes of the same start: better than their mean, by their spread (GRPO).",
    "rloo": "Learn from groups of episodes of the same start: better than the mean of the others (RLOO).",
    "reinforce": "Learn from returns that are whitened over the whole batch, without groups (REINFORCE++).",
    "ppo": "Learn from what a value head did not expect (PPO with generalised advantages).",
}
ARGS = """

    Args:
        run: Directory of the run, made if it is not there.
        config: What to do.
        ranks: Processes that train together on this machine (then --engine.parallel ddp or fsdp).
        cluster: Run on Ray: `here` starts one on this machine, `auto` finds the one that runs here, HOST:PORT another.
        place: How many of each role there are on the cluster, and what each takes.
    """


def _command(kind: str) -> Callable[..., int]:
    default = default_config(kind, policy=tyro.MISSING)

    def command(
        run: Annotated[Path, tyro.conf.Positional],
        config: Annotated[OnPolicyConfig, tyro.conf.arg(name="")] = default,
        *,
        ranks: int = 1,
        cluster: str | None = None,
        place: ClusterConfig = DEFAULT_PLACE,
    ) -> int:
        return _begin(kind, run, config, ranks, cluster, place)

    command.__doc__ = LINES[kind] + ARGS
    return command


COMMANDS: dict[str, Callable[..., int]] = {kind: _command(kind) for kind in ESTIMATORS}


def _begin(
    kind: str, path: Path, config: OnPolicyConfig, num_ranks: int, cluster: str | None, place: ClusterConfig
) -> int:
    wanted, got = ESTIMATORS[kind], config.algorithm.adv_estimator
    if got != wanted:
        name = next(name for name, estimator in ESTIMATORS.items() if estimator == got)
        raise UnderstudyError(f"algorithm.adv-estimator: `train {kind}` is {wanted!r}, got {got!r}; `train {name}` is")
    config = replace(config, policy=str(Path(config.policy).resolve()))  # ranks and resumed runs begin elsewhere
    if "RANK" in os.environ:  # torchrun has started us
        with join() as ranks:
            run = Run.create(path, kind, config) if ranks.first else Run(path)
            ranks.barrier("the run is there")
            return _work(run, ranks)
    check_place(cluster, place)
    most = num_ranks if cluster is None else place.learner.num
    if most > 1 and config.engine.parallel == "none":
        raise UnderstudyError(f"engine.parallel: 'none' is for 1 process, got {most} ranks; use ddp or fsdp")
    try:
        with Run.beginning(path, kind, config) as run:
            code = work(run, num_ranks, cluster, place)
            if code:
                raise _Ended(code)  # ranks have said why; what they did not begin is to be gone
    except _Ended as ended:
        return ended.code
    return 0


def check_place(cluster: str | None, place: ClusterConfig) -> None:
    """Without a cluster there is nothing to place."""
    if cluster is None and place != DEFAULT_PLACE:
        raise UnderstudyError("place: says how a run stands on a cluster, and there is none; add --cluster here")


class _Ended(Exception):
    """Other processes failed, and said so."""

    def __init__(self, code: int):
        self.code = code


def work(run: Run, num_ranks: int, cluster: str | None = None, place: ClusterConfig = DEFAULT_PLACE) -> int:
    """Run until the iterations are done, in this process, in several or on a cluster; also for `understudy resume`."""
    if cluster is not None:
        return _work_on_cluster(run, num_ranks, cluster, place)
    if "RANK" not in os.environ and num_ranks > 1:
        return launch(num_ranks, ["-m", "understudy", "resume", str(run.path)])
    with join() as ranks:
        return _work(run, ranks)


def _work(run: Run, ranks: Ranks) -> int:
    from understudy.training.onpolicy.run import OnPolicyRun  # only now: other runs need none of its engine

    console = Console(highlight=False, quiet=not ranks.first)
    with iteration_line(console) as line, OnPolicyRun(run, line, ranks) as local:
        for text in local.restored:
            console.print(text, soft_wrap=True)
        local.go()
    if ranks.first:
        _say_score(run, console)
    return 0


def _work_on_cluster(run: Run, num_ranks: int, cluster: str, place: ClusterConfig) -> int:
    if num_ranks > 1:
        raise UnderstudyError(f"ranks: on a cluster --place.learner.num says how many, got --ranks {num_ranks} too")
    with needs_extra("cluster"):
        from understudy.cluster.launch import run_on_policy

    console = Console(highlight=False)

    def told(lines: list[str]) -> None:
        for text in lines:
            console.print(text, soft_wrap=True)

    with iteration_line(console) as line:
        run_on_policy(run, place, address=cluster, on_update=line, on_messages=told)
    _say_score(run, console)
    return 0


def _say_score(run: Run, console: Console) -> None:
    score = last_score(run.metrics)
    console.print(f"{score} of held-out episodes succeed; {run.policy}", style="green", soft_wrap=True)
