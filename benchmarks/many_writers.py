"""A thousand writers at once: what one server takes, and whether its memory and its open files stay as they are.

    python benchmarks/many_writers.py                                     # 1,000 writers for 5 minutes
    python benchmarks/many_writers.py --writers 100 --seconds 20 --out /tmp/results

Each writer has a connection of its own, as a robot has, and appends small steps (four numbers seen, two done) at 10 Hz;
it has no spool, because the disk of this machine would stand for the disks of a thousand robots. The writers live in a
few client processes, in each of which one thread appends for all. Every second the server's memory, open files and
metrics are read. At the end all rows must be there, each once and with its own contents.

Writes `benchmarks/many_writers.json` and `images/many_writers.svg` below `--out`.
"""

from __future__ import annotations

import json
import multiprocessing
import re
import resource
import sys
import tempfile
import time
import urllib.request
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tyro
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich.console import Console

from understudy.core import Step
from understudy.core.examples import small_spec
from understudy.replay import Reader
from understudy.selftest.bench_delivery import Child, start_server
from understudy.service import OutboxConfig, RemoteWriter, connect

EPISODE_STEPS = 200
MAX_GROWTH = 1.2  # of memory, from the second fifth of the run to the last; the first is the beginning
DELIVER_TIMEOUT_S = 300.0


@dataclass(frozen=True, kw_only=True)
class Sample:
    """The server at one moment; rates and latencies are of the time since the sample before."""

    at_s: float
    resident_bytes: int
    num_files: int
    num_streams: int
    rows_per_s: float
    chunks_per_s: float
    commit_mean_ms: float
    commit_p99_ms: float  # the bound of the histogram's bucket
    cpu: float  # cores


def main(
    *,
    writers: int = 1000,
    rate_hz: float = 10.0,
    seconds: float = 300.0,
    clients: int = 4,
    commit_steps: int = 50,
    out: Path = Path("docs"),
    work: Path | None = None,
) -> int:
    """Let many writers append at once; the exit code is 1 if rows are missing, or memory or files grow.

    Args:
        writers: Writers, each with a connection of its own.
        rate_hz: Steps a second of each.
        seconds: How long they append, once all are connected.
        clients: Processes that they share.
        commit_steps: Steps in a chunk.
        out: Where to put the figures and the picture.
        work: Where to put the store, in a new directory that is removed afterwards; by default here.
    """
    console = Console()
    _raise_file_limit()
    num_steps = int(seconds * rate_hz)
    with tempfile.TemporaryDirectory(prefix="many-writers-", dir=work or Path.cwd()) as directory:
        store = Path(directory) / "store"
        with start_server(store) as server:
            shares = [list(range(writers))[number::clients] for number in range(clients)]
            with _Clients(server.address, shares, num_steps, rate_hz, commit_steps) as feeding:
                console.print(f"{writers} writers connected to {server.address}")
                samples = _watch(server, feeding)
            told = feeding.told
        problems = _compare(store, writers, num_steps)
    growth = _growth([sample.resident_bytes for sample in samples])
    num_files = [sample.num_files for sample in samples if sample.num_streams == writers]
    summary: dict[str, Any] = {
        "writers": writers,
        "rate_hz": rate_hz,
        "seconds": seconds,
        "clients": clients,
        "commit_steps": commit_steps,
        "rows_per_s": float(np.median([sample.rows_per_s for sample in samples])),
        "commit_p99_ms": float(np.median([sample.commit_p99_ms for sample in samples])),
        "memory_growth": growth,
        "files": [min(num_files, default=0), max(num_files, default=0)],
        "rows_wrong": len(problems),
        **told,
    }
    _save(out, samples, summary)
    holds = not problems and growth <= MAX_GROWTH
    for problem in problems[:5]:
        console.print(problem, style="red")
    console.print(
        f"{writers * num_steps:,} steps, {len(problems)} writers with wrong rows; {summary['rows_per_s']:,.0f} rows/s, "
        f"memory {samples[0].resident_bytes / 1e6:.0f} to {samples[-1].resident_bytes / 1e6:.0f} MB (last fifth over "
        f"second: {growth:.2f}, at most {MAX_GROWTH}), files {min(num_files, default=0)} to "
        f"{max(num_files, default=0)}; the clients' loops were up to {told['latest_s']:.2f} s late and used "
        f"{told['client_cores']:.2f} cores; delivered {told['catch_up_s']:.1f} s after the last step",
        style="green" if holds else "red",
        highlight=False,
    )
    return 0 if holds else 1


def _raise_file_limit() -> None:
    """As far as this user may; children inherit it."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _growth(values: Sequence[int]) -> float:
    """The last fifth over the second: what grows without end shows here, and what only fills up does not."""
    fifth = max(len(values) // 5, 1)
    return float(np.mean(values[-fifth:]) / np.mean(values[fifth : 2 * fifth] or values))


# ---- clients


class _Clients:
    """Processes of writers, from all of them connected to all of their steps delivered."""

    def __init__(
        self, address: str, shares: Sequence[Sequence[int]], num_steps: int, rate_hz: float, commit_steps: int
    ):
        context = multiprocessing.get_context("spawn")
        self._heard: Any = context.Queue()
        self._go = context.Event()
        self._processes = [
            context.Process(
                target=_feed,
                daemon=True,
                args=(address, share, num_steps, rate_hz, commit_steps, self._heard, self._go),
            )
            for share in shares
        ]
        self.told: dict[str, float] = {}

    def __enter__(self) -> _Clients:
        for process in self._processes:
            process.start()
        for _ in self._processes:
            self._heard.get(timeout=DELIVER_TIMEOUT_S)
        self._go.set()
        return self

    @property
    def alive(self) -> bool:
        return any(process.is_alive() for process in self._processes)

    def __exit__(self, *error: object) -> None:
        for process in self._processes:
            process.join()
            if process.exitcode:
                raise RuntimeError(f"a client ended with {process.exitcode}; its error stands above")
        told = [self._heard.get() for _ in self._processes]
        self.told = {
            "latest_s": max(one["latest_s"] for one in told),
            "catch_up_s": max(one["catch_up_s"] for one in told),
            "client_cores": sum(one["cores"] for one in told),
        }


def _feed(
    address: str, numbers: Sequence[int], num_steps: int, rate_hz: float, commit_steps: int, heard: Any, go: Any
) -> None:
    """One client process: a round through all its writers takes one period."""
    remotes = [connect(address) for _ in numbers]
    config = OutboxConfig(block_timeout_s=DELIVER_TIMEOUT_S)
    writers = [
        remote.writer(f"robot-{number:04d}", small_spec(), commit_steps=commit_steps, config=config)
        for number, remote in zip(numbers, remotes, strict=True)
    ]
    while not all(writer.delivery.connected for writer in writers):
        time.sleep(0.1)
    heard.put("connected")
    go.wait()
    begun, cpu = time.perf_counter(), time.process_time()
    latest_s = 0.0
    gap_s = 1 / rate_hz / len(writers)
    # A writer begins up to one chunk of time after the first, so that they do not all commit at once.
    delays = [int(commit_steps * place / len(writers)) for place in range(len(writers))]
    for tick in range(num_steps + max(delays)):
        for place, (number, writer, delay) in enumerate(zip(numbers, writers, delays, strict=True)):
            due = begun + tick / rate_hz + place * gap_s
            now = time.perf_counter()
            if due > now:
                time.sleep(due - now)
            latest_s = max(latest_s, now - due)
            if 0 <= tick - delay < num_steps:
                _append(writer, number, tick - delay, num_steps)
    ended = time.perf_counter()
    cores = (time.process_time() - cpu) / (ended - begun)
    for writer in writers:
        if not writer.wait_delivered(DELIVER_TIMEOUT_S):
            raise RuntimeError(f"not delivered after {DELIVER_TIMEOUT_S:.0f} s: {writer.delivery}")
    heard.put({"latest_s": latest_s, "catch_up_s": time.perf_counter() - ended, "cores": cores})
    for writer in writers:
        writer.close()
    for remote in remotes:
        remote.close()


def _append(writer: RemoteWriter, number: int, index: int, num_steps: int) -> None:
    """Step `index` of writer `number`, which says so itself."""
    if index % EPISODE_STEPS == 0:
        writer.begin()
    last = (index + 1) % EPISODE_STEPS == 0 or index + 1 == num_steps
    action = np.zeros(2, np.float32)
    writer.append(
        Step(observation=_observe(number, index), action=action, reward=0.0, terminated=False, truncated=last)
    )
    if last:
        writer.end(_observe(number, index + 1))


def _observe(number: int, index: Any) -> np.ndarray[Any, Any]:
    """What a writer sees at a step, or a row for each of several."""
    seen = np.ones((*np.shape(index), 4), np.float32)
    seen[..., 0], seen[..., 1], seen[..., 2] = number, index, number + index
    return seen


# ---- the server


def _watch(server: Child, feeding: _Clients) -> list[Sample]:
    """A sample each second, until the first client has delivered all and leaves."""
    samples: list[Sample] = []
    begun = time.perf_counter()
    before, before_s, before_cpu = _metrics(server), begun, server.cpu_s
    while feeding.alive:
        time.sleep(max(begun + len(samples) + 1 - time.perf_counter(), 0))
        now, now_s, now_cpu = _metrics(server), time.perf_counter(), server.cpu_s
        passed_s = now_s - before_s
        new = {name: value - before.get(name, 0.0) for name, value in now.items()}
        chunks = new["understudy_commit_seconds_count"]
        samples.append(
            Sample(
                at_s=now_s - begun,
                resident_bytes=server.resident_bytes,
                num_files=server.num_files,
                num_streams=int(now.get('understudy_streams{kind="write"}', 0)),
                rows_per_s=new["understudy_rows_committed_total"] / passed_s,
                chunks_per_s=chunks / passed_s,
                commit_mean_ms=1e3 * new["understudy_commit_seconds_sum"] / max(chunks, 1),
                commit_p99_ms=1e3 * _quantile(new, 0.99),
                cpu=(now_cpu - before_cpu) / passed_s,
            )
        )
        before, before_s, before_cpu = now, now_s, now_cpu
    while len(samples) > 1 and samples[-1].num_streams < samples[0].num_streams:  # the writers have left
        samples.pop()
    return samples


def _metrics(server: Child) -> dict[str, float]:
    with urllib.request.urlopen(server.first["metrics"], timeout=30) as answer:
        lines = answer.read().decode().splitlines()
    return {
        name: float(value) for name, _, value in (line.rpartition(" ") for line in lines if not line.startswith("#"))
    }


def _quantile(new: dict[str, float], share: float) -> float:
    """The bound of the bucket of commit times that holds a quantile, in seconds; 0 if there were none."""
    total = new["understudy_commit_seconds_count"]
    for name, count in new.items():
        bound = re.fullmatch(r'understudy_commit_seconds_bucket\{le="(.+)"\}', name)
        if total and bound and count >= share * total:
            return min(float(bound[1]), 10.0)
    return 0.0


# ---- checking


def _compare(store: Path, num_writers: int, num_steps: int) -> list[str]:
    """What is wrong with the rows of each writer; every step must be there once, as it was appended."""
    found: dict[int, list[int]] = {number: [] for number in range(num_writers)}
    problems = []
    with Reader(store) as reader:
        for record in reader.episodes():
            _, columns = reader.rows(record.id)
            seen = columns["observation"]
            number = int(seen[0, 0])
            wanted = _observe(number, int(seen[0, 1]) + np.arange(len(seen)))
            if not np.array_equal(seen, wanted):
                problems.append(f"episode {record.id} of robot {number}: rows that are not as they were appended")
            found[number] += [int(index) for index in seen[columns["is_step"], 1]]
    for number, indices in found.items():
        if sorted(indices) != list(range(num_steps)):
            problems.append(f"robot {number}: {num_steps} steps were appended, {len(indices)} are there")
    return problems


# ---- showing


INK = "#7d8590"  # a grey that is read on white and on black
BLUE, ORANGE = "#3d8bfd", "#e8710a"


def _save(out: Path, samples: list[Sample], summary: dict[str, Any]) -> None:
    for name in ("benchmarks", "images"):
        (out / name).mkdir(parents=True, exist_ok=True)
    content = {"summary": summary, "samples": [asdict(sample) for sample in samples]}
    (out / "benchmarks" / "many_writers.json").write_text(json.dumps(content, indent=2) + "\n")
    _draw(samples, summary).savefig(out / "images" / "many_writers.svg", transparent=True)


def _draw(samples: list[Sample], summary: dict[str, Any]) -> Figure:
    plt.rcParams.update(
        {
            "font.size": 11,
            "text.color": INK,
            "axes.labelcolor": INK,
            "axes.edgecolor": INK,
            "xtick.color": INK,
            "ytick.color": INK,
            "axes.facecolor": "none",
            "axes.spines.top": False,
            "axes.spines.right": False,
        }
    )
    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(12, 3.4), layout="constrained")
    _line(left, samples, [sample.rows_per_s for sample in samples], "rows committed a second", BLUE)
    left.axhline(summary["writers"] * summary["rate_hz"], color=INK, linewidth=1, linestyle="--")
    left.yaxis.set_major_formatter("{x:,.0f}")
    _line(
        middle, samples, [sample.commit_mean_ms for sample in samples], "from arrival to acknowledgement, mean", ORANGE
    )
    middle.yaxis.set_major_formatter("{x:g} ms")
    _line(right, samples, [sample.resident_bytes / 1e6 for sample in samples], "the server's memory", BLUE)
    right.yaxis.set_major_formatter("{x:g} MB")
    files = right.twinx()
    files.plot([sample.at_s for sample in samples], [sample.num_files for sample in samples], color=ORANGE, linewidth=2)
    files.set_ylim(bottom=0)
    files.tick_params(axis="y", colors=ORANGE)
    files.spines["right"].set_visible(True)
    files.set_title("its open files", loc="right", fontsize=12, color=ORANGE)
    return figure


def _line(axes: Axes, samples: list[Sample], values: list[float], title: str, colour: str) -> None:
    axes.set_title(title, loc="left", fontsize=12)
    axes.plot([sample.at_s for sample in samples], values, color=colour, linewidth=2)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("seconds")
    axes.grid(axis="y", color=INK, alpha=0.25, linewidth=0.6)


if __name__ == "__main__":
    sys.exit(tyro.cli(main))
