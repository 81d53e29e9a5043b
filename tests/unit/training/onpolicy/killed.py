"""A run whose process kills itself, with SIGKILL, when it comes to a certain place for the n-th time; for tests.

python -m tests.unit.training.onpolicy.killed RUN PLACE NUMBER
"""

from __future__ import annotations

import functools
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch

from understudy.durable import files
from understudy.replay.write.store import Store
from understudy.training.collection.collector import Collector
from understudy.training.distributed.engine import Engine
from understudy.training.onpolicy import multi_task_evaluation
from understudy.training.onpolicy.onpolicy_run import OnPolicyRun
from understudy.training.runs import checkpoint
from understudy.training.runs.run import Run

# In the middle of collecting, of writing episodes, of an update, of an evaluation, of a checkpoint's shards, arrays
# and its last step, and behind it.
PLACES: dict[str, tuple[Any, str]] = {
    "collect": (Collector, "_decide"),
    "write": (Store, "commit"),
    "update": (Engine, "step"),
    "evaluate": (multi_task_evaluation, "evaluation_episode"),
    "shards": (Engine, "save"),
    "arrays": (files, "write_synced"),
    "rename": (checkpoint, "_remove_old"),
    "policy": (Engine, "parameters"),
}


def kill_at(place: str, number: int) -> None:
    """Wrap what is at the place."""
    owner, name = PLACES[place]
    original = getattr(owner, name)
    calls = 0

    @functools.wraps(original)
    def counted(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == number:
            os.kill(os.getpid(), signal.SIGKILL)
        return original(*args, **kwargs)

    setattr(owner, name, counted)


def main(path: str, place: str, number: str) -> None:
    torch.set_num_threads(1)
    kill_at(place, int(number))
    with OnPolicyRun(Run(Path(path))) as local:
        local.run()


if __name__ == "__main__":
    main(*sys.argv[1:])
