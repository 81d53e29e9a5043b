"""A run whose process kills itself, with SIGKILL, when it comes to a certain place for the n-th time; for tests.

python -m tests.unit.training.onpolicy.killed RUN PLACE NUMBER
"""

from __future__ import annotations

import functools
import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import torch

from understudy.durable import files
from understudy.replay.write.store import Store
from understudy.training.collection.collector import Collector
from understudy.training.distributed import shard_file
from understudy.training.distributed.engine import Engine
from understudy.training.distributed.sharded_checkpoint import StagedShards
from understudy.training.onpolicy import checkpoint_writer, multi_task_evaluation
from understudy.training.onpolicy.onpolicy_run import OnPolicyRun
from understudy.training.runs import checkpoint
from understudy.training.runs.run import Run

# In the middle of collecting, of writing episodes, of an update, of an evaluation, of a snapshot, of a checkpoint's
# shards, arrays and its last step, which a thread writes, and of the policy behind it.
PLACES: dict[str, tuple[Any, str]] = {
    "collect": (Collector, "_decide"),
    "write": (Store, "commit"),
    "update": (Engine, "step"),
    "evaluate": (multi_task_evaluation, "evaluation_episode"),
    "snapshot": (Engine, "stage"),
    "shards": (StagedShards, "write"),
    "arrays": (files, "write_synced"),
    "rename": (checkpoint, "_remove_old"),
    "policy": (Engine, "parameters"),
    "policy file": (checkpoint_writer, "save_policy"),
}
DURING = "during"  # a place of its own: the updates that the run makes while a shard is being written


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


def kill_during(number: int) -> None:
    """Keep the n-th write of a shard from its end, and kill the process in the first update that is made meanwhile."""
    write, step, writing = shard_file.write_shard, Engine.step, threading.Event()
    writes = 0

    def unended(*args: Any) -> str:
        nonlocal writes
        writes += 1
        done = write(*args)
        if writes == number:
            writing.set()
            threading.Event().wait()
        return done

    def killed(self: Engine) -> float:
        if writes == number:
            assert writing.wait(60)
            os.kill(os.getpid(), signal.SIGKILL)
        return step(self)

    shard_file.write_shard = unended
    Engine.step = killed  # type: ignore[method-assign]


def main(path: str, place: str, number: str) -> None:
    torch.set_num_threads(1)
    if place == DURING:
        kill_during(int(number))
    else:
        kill_at(place, int(number))
    with OnPolicyRun(Run(Path(path))) as local:
        local.run()


if __name__ == "__main__":
    main(*sys.argv[1:])
