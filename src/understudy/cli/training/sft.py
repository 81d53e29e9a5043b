"""`understudy sft`: supervised fine-tuning of a policy on demonstrations, of one task or many."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro
from rich.console import Console

from understudy.cli.console import needs_extra
from understudy.cli.progress import ProgressLine
from understudy.cli.training.config_file import ConfigFile, StoredEnv, with_stored_env
from understudy.processes.stop import stop_on_signals

with needs_extra("train"):
    from understudy.training.onpolicy.sft import SFTConfig

if TYPE_CHECKING:
    from understudy.training.runs.run import Run

DEFAULT = SFTConfig(env=StoredEnv(SFTConfig.env))


def command(
    run: Annotated[Path, tyro.conf.Positional],
    config: Annotated[SFTConfig, tyro.conf.arg(name="")] = DEFAULT,
    *,
    config_file: ConfigFile = None,
) -> int:
    """Train a vision-language-action policy or a flow policy on demonstrations (supervised fine-tuning).

    Args:
        run: Directory of the new run. Demonstrations are in its store (`understudy record RUN/store`), or in --demos.
        config: Options of the run.
        config_file: YAML file with options, or a run to take them from; options in the command line go first.
    """
    with needs_extra("train"):
        from understudy.training.onpolicy.sft import KIND
        from understudy.training.runs.run import Run

    config = with_stored_env(run, config, Console(highlight=False, soft_wrap=True).print)
    with Run.create_or_remove(run, KIND, config) as created:
        return run_until_finished(created)


def run_until_finished(run: Run) -> int:
    """Train until the updates are finished; `understudy resume` calls it too."""
    with needs_extra("train"):
        from understudy.training.onpolicy.sft import run_sft

    console = Console(highlight=False)
    with stop_on_signals() as stop, ProgressLine(console, "fine-tuning", "updates") as line:
        policy, found = run_sft(run, line.say, note=line.note, progress=line, stop=stop)
    if found is not None:
        console.print(str(found), soft_wrap=True)
    console.print(f"{policy.version:,} updates; {run.policy}", style="green", soft_wrap=True)
    return 0
