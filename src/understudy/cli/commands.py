"""The list of commands: each with its line of help and the function that runs it.

`understudy --help` and `understudy train --help` print this list and import none of the functions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib import import_module


@dataclass(frozen=True, kw_only=True)
class Command:
    """A command, or a group of subcommands."""

    help: str  # one sentence
    function: str = ""  # FOLDER.MODULE:FUNCTION in understudy/cli; empty if it has subcommands
    subcommands: Mapping[str, Command] = field(default_factory=dict)
    runs_script: bool = False  # what follows a script on its command line belongs to the script

    def load(self) -> Callable[..., int]:
        """Import the function. Its arguments are the options, and it returns the exit code."""
        module, _, name = self.function.partition(":")
        try:
            found: Callable[..., int] = getattr(import_module(f"understudy.cli.{module}"), name)
        except ModuleNotFoundError as error:
            if error.name is None or error.name.startswith("understudy"):
                raise
            from understudy.core.errors import UnderstudyError

            raise UnderstudyError(
                f"{error.name}: this package is needed and not installed; `understudy doctor` says how to install it"
            ) from error
        return found


def _command(function: str, text: str) -> Command:
    return Command(help=text, function=function)


TRAIN: dict[str, Command] = {
    "rlpd": _command("training.rlpd:command", "Train with RLPD: SAC on demonstrations and online experience."),
    "clone": _command("training.clone:command", "Train with behaviour cloning: imitate demonstrations."),
    "grpo": _command("training.onpolicy:grpo", "Train with GRPO: advantages are normalized within groups of episodes."),
    "rloo": _command(
        "training.onpolicy:rloo", "Train with RLOO: the baseline is the mean of a group's other episodes."
    ),
    "reinforce": _command(
        "training.onpolicy:reinforce", "Train with REINFORCE++: returns are normalized over the batch."
    ),
    "ppo": _command("training.onpolicy:ppo", "Train with PPO: a value head and generalized advantage estimation."),
}
INIT: dict[str, Command] = {
    **{
        kind: _command(f"training.init:{kind}", f"Make a run of {name} without starting it.")
        for kind, name in {
            "rlpd": "RLPD",
            "clone": "behaviour cloning",
            "sft": "supervised fine-tuning",
            "grpo": "GRPO",
            "rloo": "RLOO",
            "reinforce": "REINFORCE++",
            "ppo": "PPO",
        }.items()
    },
    "toy": _command("training.init:toy", "Make a run of the recipe toy: RLPD on a toy task."),
    "toy-vla": _command("training.init:toy-vla", "Make a run of fine-tuning a very small VLA on a toy task."),
    "toy-vla-grpo": _command("training.init:toy-vla-grpo", "Make a run of GRPO that goes on from toy-vla."),
    "toy-flow": _command("training.init:toy-flow", "Make a run of fine-tuning a small flow policy on a toy task."),
    "toy-flow-grpo": _command("training.init:toy-flow-grpo", "Make a run of GRPO that goes on from toy-flow."),
    "metaworld-state": _command("training.init:metaworld-state", "Make a run of RLPD on Metaworld from its state."),
    "metaworld-camera": _command("training.init:metaworld-camera", "Make a run of RLPD on Metaworld from a camera."),
    "libero-vla": _command("training.init:libero-vla", "Make a run of fine-tuning a VLA on LIBERO."),
    "libero-openvla-grpo": _command("training.init:libero-openvla-grpo", "Make a run of GRPO with OpenVLA on LIBERO."),
    "your-robot": _command("training.init:your-robot", "Make a run of RLPD on your own arm."),
}
ENV: dict[str, Command] = {
    "list": _command("tools.env:list_", "List the worlds, or the tasks of one world."),
    "setup": _command("tools.env:setup", "Install a world's simulator in a virtual environment, and test it."),
    "check": _command("tools.env:check", "Run episodes of a world and check that it keeps its contract."),
}
ROBOT: dict[str, Command] = {
    "simulate": _command("tools.robot:simulate", "Serve a simulated Franka arm with cameras and a cube."),
    "serve": _command("tools.robot:serve", "Serve your own arm through its Python class."),
}
BENCH: dict[str, Command] = {
    "store": _command("tools.bench:store", "Compare durable commits with a bare pwrite and fdatasync."),
    "sample": _command("tools.bench:sample", "Compare sampling with numpy.take and with bare threaded reads."),
    "deliver": _command("tools.bench:deliver", "Compare durable delivery to a server with a bare gRPC stream."),
    "control-loop": _command("tools.bench:control_loop", "Measure how long append takes in a control loop."),
    "remote-sample": _command("tools.bench:remote_sample", "Compare remote sampling with a bare gRPC stream."),
    "parameters": _command("tools.bench:parameters", "Measure how long a policy takes to reach its actors."),
}
GROUPS: dict[str, dict[str, Command]] = {
    "start here": {
        "demo": _command("tools.demo:command", "Train a gripper on a small task in a few minutes."),
        "doctor": _command("tools.doctor:command", "Show what is installed, what is missing and how to install it."),
        "env": Command(help="List worlds, install their simulators, and check your own world.", subcommands=ENV),
        "completion": _command("tools.completion:command", "Print the completion script of your shell."),
    },
    "data": {
        "record": _command("store.record:command", "Record demonstrations of a task until enough have succeeded."),
        "rollout": _command("store.rollout:command", "Record episodes of a policy, in which a human may take over."),
        "import": _command("store.import_:command", "Import a dataset of another format into a store."),
        "export": _command("store.export:command", "Export episodes as a dataset of another format."),
        "trim": _command("store.episode_parts:trim", "Keep a part of an episode as a new episode."),
        "split": _command("store.episode_parts:split", "Split an episode into several new ones."),
        "merge": _command("store.episode_parts:merge", "Merge episodes that follow each other into a new one."),
        "robot": Command(help="Serve a robot arm, simulated or real.", subcommands=ROBOT),
    },
    "training": {
        "sft": _command("training.sft:command", "Fine-tune a vision-language-action policy on demonstrations."),
        "improve": _command("training.improve:command", "Improve a policy from its episodes and human corrections."),
        "train": Command(
            help="Train a policy with RLPD, behaviour cloning, GRPO, RLOO, REINFORCE++ or PPO.", subcommands=TRAIN
        ),
        "init": Command(help="Make a run from a recipe, a config or options, without starting it.", subcommands=INIT),
        "recipes": _command(
            "training.recipes:command", "List the recipes, which are tested starting points of runs, or copy one."
        ),
        "plan": _command("tools.plan:command", "Estimate memory, time and cost of an on-policy run on GPUs."),
        "resume": _command("training.resume:command", "Resume a run from its newest checkpoint."),
        "evaluate": _command("training.evaluate:command", "Evaluate a policy on held-out episodes."),
        "actor": _command("training.actor:command", "Run the actor of an RLPD run, which writes steps to a server."),
        "learner": _command("training.learner:command", "Run the learner of an RLPD run, which publishes policies."),
        "run-script": Command(
            help="Run a script of HIL-SERL, RLinf, TF-Agents, SimpleVLA-RL or RIPT-VLA unedited.",
            function="tools.run_script:command",
            runs_script=True,
        ),
    },
    "inspection": {
        "watch": _command("tools.watch:command", "Show runs and stores on a live web page."),
        "report": _command("tools.report:command", "Write a report of a run as one HTML file."),
        "info": _command("store.info:command", "Show what a store contains."),
        "film": _command("store.film:command", "Write an episode as a video, GIF or MP4."),
    },
    "stores": {
        "serve": _command("store.serve:command", "Serve a store over the network to actors and learners."),
        "verify": _command("store.verify:command", "Check that every byte of a store is as it was written."),
        "repair": _command("store.repair:command", "Restore a damaged store to its last valid state."),
        "compact": _command("store.compact:command", "Free the disk space of deleted episodes."),
    },
    "self-tests": {
        "crash-test": _command("tools.crash_test:command", "Kill a writer many times and check that no data is lost."),
        "bench": Command(help="Measure the speed of this machine.", subcommands=BENCH),
    },
}
COMMANDS: dict[str, Command] = {name: command for group in GROUPS.values() for name, command in group.items()}


def all_functions() -> Iterator[tuple[str, Command]]:
    """Every command and subcommand that has a function, by its words: "info", "train rlpd"."""
    for name, command in COMMANDS.items():
        if command.function:
            yield name, command
        for inner, subcommand in command.subcommands.items():
            yield f"{name} {inner}", subcommand
