"""The list of commands: each with its line of help and the folder of `understudy/cli` that its module is in.

`understudy --help` prints this list and imports none of the modules.
"""

import keyword

GROUPS: dict[str, dict[str, str]] = {
    "begin": {
        "demo": "Teach a gripper a task, from nothing, in a few minutes.",
        "doctor": "Say what is installed, what is missing and how to get it.",
        "env": "List the worlds, install their simulators, check your own.",
        "completion": "Print what makes your shell complete these commands.",
    },
    "demonstrate": {
        "record": "Record demonstrations of a task, until enough have succeeded.",
        "import": "Bring in data sets of other formats.",
        "export": "Write episodes as data sets of other formats.",
        "robot": "Serve an arm, simulated or real.",
    },
    "train": {
        "sft": "Teach a vision-language-action policy by demonstrations.",
        "train": "Train a policy: RLPD, cloning, GRPO, RLOO, REINFORCE++ or PPO.",
        "resume": "Go on with a run as if nothing had happened.",
        "evaluate": "Play held-out episodes with a policy alone.",
        "actor": "Act for a run, and write each step to a server.",
        "learner": "Learn for a run, and publish policies to its actors.",
    },
    "look": {
        "watch": "Watch runs on a page in the browser.",
        "report": "Write a run down as one page that needs nothing else.",
        "info": "Show what a store holds.",
        "film": "Make a moving picture of an episode.",
    },
    "keep": {
        "serve": "Serve a store over the network, to writers and learners.",
        "verify": "Check that every byte of a store is what was written.",
        "repair": "Bring a damaged store back to its last sound state.",
        "compact": "Rewrite a store without the data that nothing refers to.",
    },
    "prove": {
        "crash-test": "Kill a writer again and again and prove that nothing acknowledged is lost.",
        "bench": "Measure speed on this machine.",
    },
}
COMMANDS: dict[str, str] = {name: line for group in GROUPS.values() for name, line in group.items()}

# The command `crash-test` is in tools/crash_test.py, `import` in store/import_.py, and so on for each name.
FOLDERS: dict[str, str] = {
    "demo": "training",
    "doctor": "tools",
    "env": "tools",
    "completion": "tools",
    "record": "store",
    "import": "store",
    "export": "store",
    "robot": "tools",
    "sft": "training",
    "train": "training",
    "resume": "training",
    "evaluate": "training",
    "actor": "training",
    "learner": "training",
    "watch": "tools",
    "report": "tools",
    "info": "store",
    "film": "store",
    "serve": "store",
    "verify": "store",
    "repair": "store",
    "compact": "store",
    "crash-test": "tools",
    "bench": "tools",
}


def module_of(name: str) -> str:
    """The module of a command."""
    return f"understudy.cli.{FOLDERS[name]}.{name.replace('-', '_')}{'_' if keyword.iskeyword(name) else ''}"
