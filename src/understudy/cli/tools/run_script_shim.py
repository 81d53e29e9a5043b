"""What a shell script of SimpleVLA-RL or RIPT-VLA calls in place of `python` and `torchrun`.

`understudy run-script` puts it first in the PATH of the script. A call that starts a training of the original prints
and runs the `understudy train` that means the same; all other calls go to the real program.
"""

from __future__ import annotations

import os
import sys
from typing import Any

from understudy.cli.console import needs_extra
from understudy.cli.main import main as understudy_main
from understudy.compat.launch import programs, ript_vla, simplevla_rl
from understudy.compat.launch.overrides import flatten, parse_overrides
from understudy.compat.launch.programs import SIMPLEVLA_RL, TrainingCall
from understudy.compat.launch.train_command import TrainCommand, to_shell
from understudy.core import UnderstudyError


def main(arguments: list[str]) -> int:
    project, program, *rest = arguments
    try:
        call = programs.training_call(project, program, rest)
        if call is None:
            words = [*programs.real_program(program), *rest]
            os.execv(words[0], words)
        return _train(_translated(project, call))
    except UnderstudyError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


def _translated(project: str, call: TrainingCall) -> TrainCommand:
    if project == SIMPLEVLA_RL:
        with needs_extra("train"):
            from understudy.training.runs.device import choose_device

        gpu = choose_device("auto").name != "cpu"
        return simplevla_rl.translate(parse_overrides(call.overrides), gpu=gpu, count_tasks=_count_tasks)
    if call.config_name is None or call.config_folder is None:
        raise UnderstudyError("--config-name: expected the name of a config, got none; add it to the script")
    with needs_extra("hydra"):
        options = ript_vla.compose(call.config_folder, call.config_name, call.overrides)
    return ript_vla.translate(options, ranks=call.ranks, overrides=call.overrides)


def _train(command: TrainCommand) -> int:
    from understudy.training.runs.run import Run

    for note in command.notes:
        print(f"understudy: {note}", file=sys.stderr)
    begun = command.kind != "evaluate" and Run.is_at(command.run)
    words = command.resume_words() if begun else command.words(_defaults(command.kind))
    print(to_shell(["understudy", *words]), file=sys.stderr, flush=True)
    return understudy_main(words)


def _defaults(kind: str) -> dict[str, Any]:
    """The options of a command that has no further ones, by their paths."""
    from understudy.policies.openvla.config import OpenVLAConfig
    from understudy.training.onpolicy.config import default_config
    from understudy.training.runs.config import to_json

    if kind == "evaluate":
        return flatten({"openvla": to_json(OpenVLAConfig())})
    return flatten(to_json(default_config(kind, policy="")))


def _count_tasks(world: str) -> int:
    from understudy.envs.registry import open_world

    with open_world(world) as opened:
        return len(opened.suite.tasks)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
