"""`understudy sft`: a VLA imitates demonstrations, of one task or many."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console

from understudy.cli.console import needs_extra

with needs_extra("vla"):
    from understudy.training.onpolicy.sft import KIND, SFTConfig, run_sft
    from understudy.training.runs.run import Run

DEFAULT = SFTConfig()


def command(
    run: Annotated[Path, tyro.conf.Positional],
    config: Annotated[SFTConfig, tyro.conf.arg(name="")] = DEFAULT,
) -> int:
    """Teach a vision-language-action policy by demonstrations (supervised fine-tuning).

    Args:
        run: Directory of the run, made if it is not there. Demonstrations are in its store (`understudy record
            RUN/store`), or elsewhere (--demos).
        config: What to do.
    """
    with Run.beginning(run, KIND, config) as begun:
        return work(begun)


def work(run: Run) -> int:
    """Imitate until the updates are done; also for `understudy resume`."""
    console = Console(highlight=False)
    with console.status("imitating") as status:
        policy, found = run_sft(run, lambda text: status.update(f"imitating: {text}"))
    if found is not None:
        console.print(str(found), soft_wrap=True)
    console.print(f"{policy.version:,} updates; {run.policy}", style="green", soft_wrap=True)
    return 0
