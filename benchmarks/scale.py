"""From 1 to 1,000 simulated environments into four shards on this machine: what it carries, what limits, what it loses.

    python benchmarks/scale.py                                # 1 to 1,000 environments, three rounds: 25 minutes, 40 GB
    python benchmarks/scale.py --quick                        # 1, 16 and 64 environments, one round: a minute, 3 GB
    python benchmarks/scale.py --model-only                   # the pictures and the model again, from the figures

Each shard is a process with a store and a gRPC server; an environment is a thread with a writer and a connection of its
own that appends steps of two 128x128x3 cameras, state and action. For each number of environments, in three phases:

- *full*: each lives as fast as its chunks become durable; what the machine then has too little of is what limits.
- *paced*: each at up to `rate-hz`, all together at most `pace-steps-s`, while a learner draws batches from all shards.
- *alone*: the learner draws as fast as it can, and nobody writes.

At the end every step must be in one store, once, bit for bit. Figures go to `benchmarks/scale.json` and pictures to
`images/scale_*.svg` below `--out`. The stores are removed, so that at no time more than some 5 GB are there.
"""

from __future__ import annotations

import json
import math
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tyro
from rich.console import Console

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.scale_machine import Reading, Used, bare_disk_mb_s
from benchmarks.scale_roles import Lived, Phase, Process, compare, environments, learner, processes, raise_file_limit

from understudy.core.examples import robot_spec
from understudy.replay.format.layout import row_bytes_of
from understudy.selftest.bench_delivery import Child, start_server

SETTLE_S = 1.0  # from the beginning of a phase until it is measured
LEAD_S = 0.5  # for all processes to hear of a phase before it begins
PACED_CHUNKS = 1.7  # of each environment in the second phase, at least; the first is not measured
MAX_CLIENTS = 8  # processes that environments share
LARGE_CHUNK_STEPS = 50  # what a writer sends by default; a thousand of them would take 20 GB of memory here


@dataclass(frozen=True, kw_only=True)
class Study:
    """What is the same for every number of environments."""

    shards: int
    commit_steps: int
    full_s: float
    paced_s: float
    alone_s: float
    rate_hz: float
    pace_steps_s: float
    batch_size: int
    batches_hz: float
    size: int  # of pictures
    work: Path

    @property
    def row_bytes(self) -> int:
        return row_bytes_of(robot_spec(self.size))

    @property
    def batch_bytes(self) -> int:
        """Two observations for each item; what is beside them is small."""
        return 2 * self.batch_size * self.row_bytes


@dataclass(frozen=True, kw_only=True)
class Round:
    """One number of environments, once."""

    envs: int
    steps: int
    problems: list[str]
    bare_disk_mb_s: float
    load: float  # average of the machine when it began
    full: Used
    full_commits_s: list[float]
    paced_hz: float
    paced: Used
    paced_commits_s: list[float]
    paced_batches_s: list[float]
    alone: Used
    alone_batches_s: list[float]
    shard_steps: list[int]


def main(
    *,
    envs: tuple[int, ...] = (1, 4, 16, 64, 256, 1000),
    shards: int = 4,
    rounds: int = 3,
    full_s: float = 6.0,
    paced_s: float = 16.0,
    alone_s: float = 4.0,
    rate_hz: float = 10.0,
    pace_steps_s: float = 300.0,
    commit_steps: int = 10,
    batch_size: int = 256,
    batches_hz: float = 2.0,
    size: int = 128,
    quick: bool = False,
    model_only: bool = False,
    out: Path = Path("docs"),
    work: Path | None = None,
) -> int:
    """Measure; the exit code is 1 if a step is missing, there twice or not as it was.

    Args:
        envs: Numbers of environments.
        shards: Servers, each with a store.
        rounds: How often all numbers are measured, in turns.
        full_s: Seconds of the first phase.
        paced_s: Seconds of the second.
        alone_s: Seconds of the third.
        rate_hz: Steps a second of each environment in the second phase, at most.
        pace_steps_s: Steps a second of all of them together, at most.
        commit_steps: Steps in a chunk.
        batch_size: Transitions in a batch of the learner.
        batches_hz: Batches a second that it asks for in the second phase.
        size: Of a picture, in pixels.
        quick: Three small numbers of environments, one short round.
        model_only: Measure nothing; draw and extrapolate from the figures that are there.
        out: Where the figures and pictures go.
        work: Where the stores go, in a new directory that is removed; by default here.
    """
    from benchmarks.scale_report import report  # it draws: the processes that environments live in need none of it

    console = Console(highlight=False, width=150)
    figures = out / "benchmarks" / "scale.json"
    if model_only:
        report(json.loads(figures.read_text()), out, console)
        return 0
    if quick:
        envs, rounds, full_s, paced_s, alone_s = (1, 16, 64), 1, 3.0, 6.0, 2.0
    raise_file_limit()
    study = Study(
        shards=shards,
        commit_steps=commit_steps,
        full_s=full_s,
        paced_s=paced_s,
        alone_s=alone_s,
        rate_hz=rate_hz,
        pace_steps_s=pace_steps_s,
        batch_size=batch_size,
        batches_hz=batches_hz,
        size=size,
        work=work or Path.cwd(),
    )
    measured: list[Round] = []
    for number in range(rounds):
        for count in envs:
            measured.append(measure(study, count))
            last = measured[-1]
            console.print(
                f"round {number + 1}, {count} environments: {last.full.rows_s:,.0f} steps/s at full speed, "
                f"{last.steps:,} in all, {len(last.problems)} wrong; {last.full.other_cores:.1f} cores are not ours"
            )
    one_shard = [summary(one) for one in _one_shard(study, rounds)] if shards > 1 else []
    content = {
        "study": {
            **asdict(study),
            "work": "",
            "row_bytes": study.row_bytes,
            "batch_bytes": study.batch_bytes,
            "rounds": rounds,
            "cores": os.cpu_count(),
        },
        "points": [_point(study, [one for one in measured if one.envs == count]) for count in envs],
        "one_shard": one_shard,
    }
    figures.parent.mkdir(parents=True, exist_ok=True)
    figures.write_text(json.dumps(content, indent=1) + "\n")
    report(content, out, console)
    problems = [problem for one in measured for problem in one.problems]
    for problem in problems[:5]:
        console.print(problem, style="red")
    return 1 if problems else 0


def _one_shard(study: Study, rounds: int) -> list[Round]:
    """What one server takes when it has the machine to itself and its writers: at least this much is in it."""
    alone = Study(**{**asdict(study), "shards": 1, "paced_s": 2.0, "alone_s": 2.0, "commit_steps": LARGE_CHUNK_STEPS})
    return [measure(alone, 8) for _ in range(rounds)]


# ---- one number of environments


def measure(study: Study, num_envs: int) -> Round:
    """All phases with this number of environments, and the check."""
    with tempfile.TemporaryDirectory(prefix="scale-", dir=study.work) as directory, ExitStack() as undo:
        place = Path(directory)
        load = os.getloadavg()[0]
        bare = bare_disk_mb_s(place, num_threads=study.shards, seconds=min(study.full_s / 6, 1.0))
        stores = [place / f"shard-{number}" for number in range(study.shards)]
        serving = ExitStack()
        undo.callback(serving.close)
        servers = [serving.enter_context(start_server(store)) for store in stores]
        addresses = ",".join(server.address for server in servers)
        clients = min(MAX_CLIENTS, num_envs)
        shares = [list(range(num_envs))[number::clients] for number in range(clients)]
        with processes(
            (learner, addresses, study.batch_size),
            *((environments, addresses, share, study.commit_steps, study.size) for share in shares),
        ) as (drawing, *living):
            at = _Stage(servers, drawing, living, place)
            at.play(0.0, None)  # a chunk each, which is not measured: memory is touched for the first time
            full, lived, _ = at.play(study.full_s, None)
            full_commits = [latency for one in lived for latency in one.latencies_s]
            rate_hz = min(study.rate_hz, study.pace_steps_s / num_envs)
            chunk_s = study.commit_steps / rate_hz
            paced_s = max(study.paced_s, PACED_CHUNKS * chunk_s)
            paced, lived, paced_batches = at.play(paced_s, rate_hz, settle_s=chunk_s, batches_hz=study.batches_hz)
            alone, _, alone_batches = at.play(study.alone_s, None, write=False, batches_hz=math.inf)
        serving.close()
        told = {one.number: one.num_steps for one in lived}
        problems = compare(stores, told, study.size)
        return Round(
            envs=num_envs,
            steps=sum(told.values()),
            problems=problems,
            bare_disk_mb_s=bare,
            load=load,
            full=full,
            full_commits_s=full_commits,
            paced_hz=rate_hz,
            paced=paced,
            paced_commits_s=[latency for one in lived for latency in one.latencies_s],
            paced_batches_s=paced_batches,
            alone=alone,
            alone_batches_s=alone_batches,
            shard_steps=at.shard_rows,
        )


class _Stage:
    """Servers, environments and the learner, and what the machine does while they play."""

    def __init__(self, servers: Sequence[Child], drawing: Process, living: Sequence[Process], place: Path):
        self._drawing, self._living, self._place = drawing, living, place
        self._roles = {
            "servers": [server.pid for server in servers],
            "writers": [one.pid for one in living],
            "learner": [drawing.pid],
        }
        self._pages = [server.first["metrics"] for server in servers]
        self.shard_rows: list[int] = []

    def play(
        self,
        seconds: float,
        rate_hz: float | None,
        *,
        settle_s: float = SETTLE_S,
        write: bool = True,
        batches_hz: float = 0.0,
    ) -> tuple[Used, list[Lived], list[float]]:
        """A phase; what was used, what each environment lived, how long the learner waited for each batch."""
        start_s = time.monotonic() + LEAD_S
        if write:
            for process in self._living:
                process.tell(Phase(start_s=start_s, seconds=seconds, rate_hz=rate_hz))
        if batches_hz:
            pace = None if math.isinf(batches_hz) else batches_hz
            begin_s = min(settle_s, seconds / 2)
            self._drawing.tell(Phase(start_s=start_s + begin_s, seconds=seconds - begin_s, rate_hz=pace))
        time.sleep(max(start_s + min(settle_s, seconds / 2) - time.monotonic(), 0))
        before = self._read()
        time.sleep(max(start_s + seconds - time.monotonic(), 0))
        after = self._read()
        waited = self._drawing.hear() if batches_hz else []
        lived = [one for process in self._living for one in process.hear()] if write else []
        self.shard_rows = [
            int(Reading.take([], self._place, [page]).metrics["understudy_rows_committed_total"])
            for page in self._pages
        ]
        return Used.between(before, after, self._roles), lived, waited

    def _read(self) -> Reading:
        pids = [pid for pids in self._roles.values() for pid in pids]
        return Reading.take(pids, self._place, self._pages)


# ---- figures


def summary(one: Round) -> dict[str, Any]:
    """A round without its single latencies."""
    lists = ("full_commits_s", "paced_commits_s", "paced_batches_s", "alone_batches_s")
    quantiles = {name.replace("_s", "_ms"): quantiles_ms(getattr(one, name)) for name in lists}
    return {**{name: value for name, value in asdict(one).items() if name not in lists}, **quantiles}


def quantiles_ms(seconds: Sequence[float]) -> dict[str, float]:
    if not seconds:
        return {"p50": 0.0, "p99": 0.0, "max": 0.0, "count": 0}
    p50, p99 = (1e3 * float(value) for value in np.quantile(seconds, [0.5, 0.99]))
    return {"p50": p50, "p99": p99, "max": 1e3 * max(seconds), "count": len(seconds)}


def _point(study: Study, rounds: Sequence[Round]) -> dict[str, Any]:
    """Latencies of all rounds together; the round of the median speed for what is read from the machine."""
    middle = sorted(rounds, key=lambda one: one.full.rows_s)[len(rounds) // 2]

    def together(name: str) -> dict[str, float]:
        return quantiles_ms([value for one in rounds for value in getattr(one, name)])

    return {
        **summary(middle),
        "steps": sum(one.steps for one in rounds),
        "problems": [problem for one in rounds for problem in one.problems],
        "full_rows_s_of_rounds": [one.full.rows_s for one in rounds],
        "full_commits_ms": together("full_commits_s"),
        "paced_commits_ms": together("paced_commits_s"),
        "paced_batches_ms": together("paced_batches_s"),
        "alone_batches_ms": together("alone_batches_s"),
        "alone_batches_per_s": len(middle.alone_batches_s) / (study.alone_s - min(SETTLE_S, study.alone_s / 2)),
        "rounds": [summary(one) for one in rounds],
    }


if __name__ == "__main__":
    sys.exit(tyro.cli(main))
