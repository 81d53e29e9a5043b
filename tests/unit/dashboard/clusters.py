"""Clusters for the tests of the page: the files as the driver writes them, by the driver's own code, of any size.

python -m tests.unit.dashboard.clusters RUN --workers 1000      # to look at by hand
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from understudy.cluster.config import ClusterConfig
from understudy.cluster.status import NOW, Event, Journal, NodeNow, RoleNow, ShardNow

HOSTS = ("gpu-a", "gpu-b", "sim-c")
STACK = 'thread MainThread\n  File "collector.py", line 212, in run_ticket\n    outcome = vector.ready(timeout_s=1.0)\n'


def node_id(number: int) -> str:
    return f"{number:02x}" * 28


def make_journal(run: Path, *, num_workers: int = 1000) -> Journal:
    """A cluster in good health: two machines with four GPUs each, one for simulators."""
    run.mkdir(parents=True, exist_ok=True)
    journal = Journal(run, asdict(ClusterConfig()), "10.0.0.1:6379")
    now_s = time.time()
    journal.nodes = [
        NodeNow(
            id=node_id(index),
            host=host,
            address=f"10.0.0.{index + 1}",
            alive=True,
            cpus=512.0,
            free_cpus=150.5,
            gpus=4.0 * (index < 2),
            free_gpus=0.0,
            memory_bytes=256 * 2**30,
            seen_s=now_s,
        )
        for index, host in enumerate(HOSTS)
    ]
    learners = [
        RoleNow(
            role="learner",
            name=f"rank-{rank}",
            state="up",
            node=node_id(rank // 4),
            pid=2000 + rank,
            doing="iteration 17: update 3 of 8",
            since_s=now_s - 3600,
        )
        for rank in range(8)
    ]
    workers = [
        RoleNow(
            role="rollout",
            name=f"rollout-{index % 8}-{index // 8}",
            state="up",
            node=node_id(index % 3),
            pid=10_000 + index,
            doing=f"running ticket {index + 4000}" if index % 9 else "waiting for tickets",
            since_s=now_s - 3000,
            restarts=int(index % 250 == 3),
        )
        for index in range(num_workers)
    ]
    journal.shards = [
        ShardNow(
            name=f"shard-{index}",
            node=node_id(index % 3),
            address=f"10.0.0.{index % 3 + 1}:{7447 + index // 3}",
            path=f"/data/understudy/press/shard-{index}",
            state="up",
            steps=250_000 + index,
            commit=9_000 + index,
        )
        for index in range(4)
    ]
    stores = [
        RoleNow(role="shard", name=shard.name, state="up", node=shard.node, pid=3000, doing=f"serving {shard.address}")
        for shard in journal.shards
    ]
    journal.roles = [*learners, *stores, *workers]
    journal.counts.restarts = sum(role.restarts for role in workers)
    journal.tell(
        [Event(what="began", name="driver", text=f"{len(journal.roles)} roles on 3 nodes", time_s=now_s - 3600)]
    )
    return journal


def break_some(journal: Journal) -> None:
    """The machine of the simulators dies with its shard; one worker hangs; others find no room."""
    now_s = time.time()
    gone = node_id(2)
    journal.nodes[2] = replace(journal.nodes[2], alive=False, seen_s=now_s - 200)
    journal.shards[2] = replace(journal.shards[2], state="lost", lost_steps=journal.shards[2].steps, steps=0)
    journal.roles = [_after(role, gone, now_s) for role in journal.roles]
    hung = next(index for index, role in enumerate(journal.roles) if role.name == "rollout-0-9")
    journal.roles[hung] = replace(
        journal.roles[hung], state="stuck", doing="running ticket 4072", stack=STACK, error=None, node=node_id(0)
    )
    journal.counts.nodes_lost, journal.counts.reissued, journal.counts.fenced = 1, 301, 12
    journal.tell(
        [
            Event(what="node lost", name="sim-c", text="sim-c (10.0.0.3) is gone", time_s=now_s - 190),
            Event(what="tickets reissued", name="rank-0", text="301 tickets were reissued", time_s=now_s - 189),
            Event(what="shard lost", name="shard-2", text="shard-2 is lost with 250,002 steps", time_s=now_s - 130),
            Event(
                what="stuck",
                name="rollout-0-9",
                text="rollout-0-9 got nothing done for 300 s",
                stack=STACK,
                time_s=now_s - 20,
            ),
        ]
    )


def _after(role: RoleNow, gone: str, now_s: float) -> RoleNow:
    if role.node != gone:
        return role
    if role.role == "shard":
        return replace(role, state="lost", error="its node is gone, and no other has its directory")
    return replace(role, state="waiting for room", node=None, pid=None, doing="", since_s=now_s - 180)


def change(run: Path, **said: Any) -> None:
    """Edit the file behind the driver's back."""
    path = run / NOW
    path.write_text(json.dumps({**json.loads(path.read_text()), **said}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path)
    parser.add_argument("--workers", type=int, default=1000)
    parser.add_argument("--healthy", action="store_true")
    parser.add_argument("--every", type=float, help="seconds; go on writing, as a driver does, until killed")
    given = parser.parse_args()
    made = make_journal(given.run, num_workers=given.workers)
    if not given.healthy:
        break_some(made)
    made.write()
    while given.every:
        time.sleep(given.every)
        made.roles[-1] = replace(made.roles[-1], doing=f"running ticket {made.shards[0].commit}")
        made.shards = [replace(shard, steps=shard.steps + 50, commit=shard.commit + 1) for shard in made.shards]
        made.write()


if __name__ == "__main__":
    main()
