"""`understudy train grpo`, `rloo`, `reinforce`, `ppo`: a policy rehearses, and learns from what succeeded."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console

from understudy.cli.progress import iteration_line
from understudy.cli.show import needs_extra
from understudy.core import UnderstudyError
from understudy.training.evaluate import last_score

with needs_extra("train"):
    from understudy.training.onpolicy.config import ESTIMATORS as ESTIMATORS  # for `understudy resume`
    from understudy.training.onpolicy.config import OnPolicyConfig, default_config
    from understudy.training.ranks.launch import launch
    from understudy.training.ranks.ranks import Ranks, join
    from understudy.training.run import Run

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
    """


def _command(kind: str) -> Callable[..., int]:
    default = default_config(kind, policy=tyro.MISSING)

    def command(
        run: Annotated[Path, tyro.conf.Positional],
        config: Annotated[OnPolicyConfig, tyro.conf.arg(name="")] = default,
        *,
        ranks: int = 1,
    ) -> int:
        return _begin(kind, run, config, ranks)

    command.__doc__ = LINES[kind] + ARGS
    return command


COMMANDS: dict[str, Callable[..., int]] = {kind: _command(kind) for kind in ESTIMATORS}


def _begin(kind: str, path: Path, config: OnPolicyConfig, num_ranks: int) -> int:
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
    if num_ranks > 1 and config.engine.parallel == "none":
        raise UnderstudyError(f"engine.parallel: 'none' is for 1 process, got {num_ranks} ranks; use ddp or fsdp")
    try:
        with Run.beginning(path, kind, config) as run:
            code = work(run, num_ranks)
            if code:
                raise _Ended(code)  # ranks have said why; what they did not begin is to be gone
    except _Ended as ended:
        return ended.code
    return 0


class _Ended(Exception):
    """Other processes failed, and said so."""

    def __init__(self, code: int):
        self.code = code


def work(run: Run, num_ranks: int) -> int:
    """Run until the iterations are done, in this process or in several; also for `understudy resume`."""
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
        score = last_score(run.metrics)
        console.print(f"{score} of held-out episodes succeed; {run.policy}", style="green", soft_wrap=True)
    return 0
