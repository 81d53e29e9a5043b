"""Kills workers and nodes of a real small Ray cluster while a run trains on it, and checks that nothing of it shows.

    python benchmarks/cluster_faults.py --nodes 3 --seconds 600            # ten minutes, a kill every 20 s, once a node
    python benchmarks/cluster_faults.py --nodes 2 --seconds 60 --every-s 8

A run of GRPO on a cluster that Ray's own utilities make on this machine, beside the same run in one process. Every
`every_s` a random process of a role is killed with SIGKILL: rollout worker, simulator, learner, shard. Once a whole
node is killed, and a new one joins; once the driver is, and is resumed. Afterwards:

    lost         episodes that were acknowledged and are in no shard
    duplicated   tickets that are in the shards more than once
    groups       that are not whole
    weights      equal to those of the undisturbed run, bit for bit: synchronous, so chance has nowhere to come in

Exit code 1 if any of it is wrong.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tyro

sys.path.insert(0, str(Path(__file__).parents[1]))
os.environ.setdefault("RAY_worker_niceness", "0")
os.environ["OMP_NUM_THREADS"] = "1"  # as Ray gives to an actor of one CPU, so that both runs find the same bits

from tests.unit.training.onpolicy.making import make_config, save_policy

from understudy.cluster.status import EVENTS, NOW
from understudy.replay import Reader
from understudy.training.onpolicy.config import OnPolicyConfig
from understudy.training.runs.run import Run

ROOT = Path(__file__).parents[1]
ITERATION_S = 0.35  # of this run, about
KILLED = ("rollout", "rollout", "simulator", "shard", "learner")


@dataclass
class Faults:
    """What was done to a run."""

    kills: Counter[str] = field(default_factory=Counter)
    nodes: int = 0
    acknowledged: Counter[str] = field(default_factory=Counter)  # the most steps that each shard told of

    def __str__(self) -> str:
        killed = ", ".join(f"{count} x {what}" for what, count in sorted(self.kills.items()))
        return f"killed {killed}; {self.nodes} nodes"


def main(nodes: int = 2, seconds: float = 600.0, every_s: float = 20.0, seed: int = 0, ranks: int = 1) -> int:
    """Train, kill, check.

    Args:
        nodes: Of the cluster, the head included.
        seconds: About how long the undisturbed part of the training is to last; iterations are chosen by it.
        every_s: Between two kills.
        seed: Of what is killed when.
        ranks: Learners.
    """
    with tempfile.TemporaryDirectory(prefix="understudy-faults-") as folder:
        return study(Path(folder), nodes, seconds, every_s, seed, ranks)


def study(folder: Path, nodes: int, seconds: float, every_s: float, seed: int, ranks: int) -> int:
    policy = save_policy(folder / "start.safetensors")
    engine = {"parallel": "ddp"} if ranks > 1 else {}
    config = make_config(policy, iterations=max(int(seconds / ITERATION_S), 6), checkpoint_every=5, engine=engine)
    reference = undisturbed(folder / "undisturbed", config, ranks)
    began = time.monotonic()
    try:
        with cluster(nodes) as (ray_cluster, extra):
            path = folder / "disturbed"
            Run.create(path, "grpo", config)
            options = ("--cluster.learner.num", str(ranks), "--cluster.learner.least", "1")
            faults = disturbed(path, ray_cluster, extra, options, every_s=every_s, seed=seed)
        if reference.wait():
            raise SystemExit(f"the undisturbed run ended with {reference.returncode}")
    finally:
        reference.kill()
        reference.wait()
    print(f"disturbed: {time.monotonic() - began:.0f} s; {faults}", flush=True)
    problems = check(folder / "disturbed", folder / "undisturbed", config)
    for line in problems:
        print(f"WRONG: {line}")
    return 1 if problems else 0


def undisturbed(path: Path, config: OnPolicyConfig, ranks: int) -> subprocess.Popen[bytes]:
    """The same run in plain processes, beside the other."""
    Run.create(path, "grpo", config)
    command = [sys.executable, "-m", "understudy", "resume", str(path), "--ranks", str(ranks)]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, env=environment())


@contextlib.contextmanager
def cluster(nodes: int) -> Any:
    """A Ray of several nodes on this machine; also a function that makes one more node."""
    from ray.cluster_utils import Cluster

    memory = 150 * 2**20
    made = Cluster(
        initialize_head=True, head_node_args={"num_cpus": 3, "object_store_memory": memory, "include_dashboard": False}
    )
    try:
        extra = [made.add_node(num_cpus=3, object_store_memory=memory) for _ in range(nodes - 1)]
        made.wait_for_nodes()
        yield made, extra
    finally:
        made.shutdown()


def disturbed(
    path: Path,
    ray_cluster: Any,
    extra: list[Any],
    options: Sequence[str] = (),
    *,
    every_s: float,
    seed: int,
    killed: Sequence[str] = KILLED,
) -> Faults:
    """Go on with a run until it is done, whatever is killed meanwhile; `extra` are the nodes that may be."""
    faults, chance = Faults(), random.Random(seed)
    driver = start_driver(path, ray_cluster.address, options)
    last, begun = time.monotonic(), time.monotonic()
    while driver.poll() != 0:
        if driver.poll() is not None:
            if driver.returncode != -signal.SIGKILL:
                raise SystemExit(f"the driver ended with {driver.returncode}:\n{(path / 'log').read_text()[-3000:]}")
            driver = start_driver(path, ray_cluster.address, options)
        time.sleep(0.2)
        for shard in now(path).get("shards", []):
            faults.acknowledged[shard["name"]] = max(faults.acknowledged[shard["name"]], shard["steps"])
        if not is_up(path, driver.pid):
            last = max(last, time.monotonic() - every_s / 2)  # let it come to something first
            continue
        if time.monotonic() - last < every_s:
            continue
        last = time.monotonic()
        if faults.nodes and not faults.kills["driver"]:
            driver.kill()
            driver.wait()
            what = "driver"
            faults.kills[what] += 1
        elif extra and not faults.nodes and len(faults.kills) >= 2:
            node = extra.pop(chance.randrange(len(extra)))
            ray_cluster.remove_node(node, allow_graceful=False)
            faults.nodes += 1
            extra.append(ray_cluster.add_node(num_cpus=3, object_store_memory=150 * 2**20))
            what = "a node"
        else:
            what = kill_one(path, chance, killed)
            faults.kills.update([what] if what != "nothing" else [])
        print(f"{time.monotonic() - begun:5.0f} s, iteration {iteration(path)}: killed {what}", flush=True)
    return faults


def start_driver(path: Path, address: str, options: Sequence[str]) -> subprocess.Popen[bytes]:
    command = [
        sys.executable,
        "-m",
        "understudy",
        "resume",
        str(path),
        "--cluster",
        address,
        "--cluster.shards.num",
        "2",
        "--cluster.silent-s",
        "20",
        "--cluster.shard-away-s",
        "3",
        "--cluster.room-s",
        "60",
        *options,
    ]
    with (path / "log").open("ab") as log:
        return subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log, env=environment())


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT)}


def is_up(path: Path, driver: int) -> bool:
    """Whether this driver has learners at work."""
    said = now(path)
    return said.get("pid") == driver and any(r["role"] == "learner" and r["state"] == "up" for r in said["roles"])


def now(path: Path) -> dict[str, Any]:
    try:
        said: dict[str, Any] = json.loads((path / NOW).read_text())
    except FileNotFoundError:
        return {}
    return said


def kill_one(path: Path, chance: random.Random, killed: Sequence[str]) -> str:
    what = chance.choice(killed)
    role = "rollout" if what == "simulator" else what
    pids = [one["pid"] for one in now(path)["roles"] if one["role"] == role and one["pid"] and one["state"] == "up"]
    if what == "simulator":
        pids = [child for pid in pids for child in children(pid)]
    chance.shuffle(pids)
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
            return what
    return "nothing"


def children(pid: int) -> list[int]:
    found = subprocess.run(["pgrep", "-P", str(pid)], capture_output=True, text=True, check=False).stdout
    return [int(line) for line in found.split()]


def iteration(path: Path) -> int:
    return max((line.get("iteration", 0) for line in lines(path) if line["kind"] == "train"), default=0)


def lines(path: Path) -> list[dict[str, Any]]:
    file = path / "metrics.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines() if line.endswith("}")] if file.exists() else []


def check(path: Path, reference: Path, config: OnPolicyConfig) -> list[str]:
    """What is wrong with a run."""
    told = {line["episode"]: line for line in lines(path) if line["kind"] == "episode"}
    kept: Counter[int] = Counter()
    groups: Counter[str] = Counter()
    steps = 0
    for shard in sorted((path / "shards").iterdir()):
        with Reader(shard) as reader:
            for record in reader.catalog.episodes("deleted is null"):
                kept[int(record.info.labels["ticket"])] += 1
                groups[str(record.info.group)] += 1
                steps += record.num_steps
    lost = sorted(told.keys() - kept.keys())
    twice = sorted(number for number, count in kept.items() if count > 1)
    torn = sorted(name for name, count in groups.items() if count != config.plan.n_samples)
    more = sorted(kept.keys() - told.keys())
    same = (path / "policy.safetensors").read_bytes() == (reference / "policy.safetensors").read_bytes()
    events = Counter(json.loads(line)["what"] for line in (path / EVENTS).read_text().splitlines())
    print(
        f"{len(told)} episodes ({steps} blocks) acknowledged; lost {len(lost)}, duplicated {len(twice)}, groups not "
        f"whole {len(torn)}, not learned from {len(more)}; weights {'equal' if same else 'DIFFERENT'}"
    )
    print(f"events: {', '.join(f'{count} x {what}' for what, count in sorted(events.items()))}")
    mine, theirs = (
        [
            {k: v for k, v in line.items() if k in ("kind", "iteration", "loss", "success", "episode")}
            for line in lines(one)
        ]
        for one in (path, reference)
    )
    problems = [
        f"{name}: {found[:10]}"
        for name, found in (("lost", lost), ("twice", twice), ("torn groups", torn), ("unknown", more))
        if found
    ]
    if not same:
        problems.append("the weights differ from those of the undisturbed run")
    if mine != theirs:
        problems.append("losses, successes or episodes differ from those of the undisturbed run")
    return problems


if __name__ == "__main__":
    sys.exit(tyro.cli(main))
