"""What the machine says while a study runs: CPU by process and thread, the disk, loopback; and what of it is full.

All is read from /proc, so that nothing that is measured has to help. CPU is in cores (CPU seconds a second).
"""

from __future__ import annotations

import os
import re
import threading
import time
import urllib.request
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

FULL = 0.85  # of a resource: from here on it is what limits
TICK_S = 1 / os.sysconf("SC_CLK_TCK")
SECTOR_BYTES = 512
PROBE_BYTES = 2**20  # of one write of the bare disk; a chunk of ten steps


@dataclass(frozen=True, kw_only=True)
class Reading:
    """Counters at one moment."""

    at_s: float
    busy_s: float  # of all cores, all processes
    cpu_s: Mapping[int, float]  # by process
    threads_s: Mapping[tuple[int, int], float]  # by process and thread
    disk_written_bytes: int
    disk_busy_s: float
    loopback_bytes: int
    metrics: Mapping[str, float]  # of all servers, added up

    @classmethod
    def take(cls, pids: Sequence[int], place: Path, metrics: Sequence[str] = ()) -> Reading:
        """Of these processes, the disk under `place` and the servers with these pages of metrics."""
        written, busy = _disk(place)
        return cls(
            at_s=time.monotonic(),
            busy_s=_busy_s(),
            cpu_s={pid: _cpu_s(Path(f"/proc/{pid}")) for pid in pids},
            threads_s={
                (pid, int(task.name)): _cpu_s(task)
                for pid in pids
                for task in Path(f"/proc/{pid}/task").iterdir()
                if (task / "stat").exists()
            },
            disk_written_bytes=written,
            disk_busy_s=busy,
            loopback_bytes=loopback_bytes(),
            metrics=_added([_metrics(page) for page in metrics]),
        )


@dataclass(frozen=True, kw_only=True)
class Used:
    """Between two readings, a second."""

    seconds: float
    cores: Mapping[str, float]  # by role
    other_cores: float  # of processes that are not ours, and of the kernel's own threads
    busiest_server_thread: float  # cores; at most 1
    busiest_writer_thread: float
    disk_mb_s: float
    disk_busy: float  # share of the time in which it had something to do
    loopback_mb_s: float
    rows_s: float  # made durable
    chunk_mb_s: float  # bytes of chunks that the servers received
    batches_s: float

    @classmethod
    def between(cls, before: Reading, after: Reading, roles: Mapping[str, Sequence[int]]) -> Used:
        """`roles` names the processes: servers, writers, learner."""
        seconds = after.at_s - before.at_s
        spent = {pid: after.cpu_s[pid] - before.cpu_s[pid] for pid in after.cpu_s}
        cores = {role: sum(spent[pid] for pid in pids) / seconds for role, pids in roles.items()}
        threads = {key: (value - before.threads_s.get(key, 0.0)) / seconds for key, value in after.threads_s.items()}

        def busiest(role: str) -> float:
            return max((threads[key] for key in threads if key[0] in roles.get(role, ())), default=0.0)

        def grown(name: str) -> float:
            return (after.metrics.get(name, 0.0) - before.metrics.get(name, 0.0)) / seconds

        return cls(
            seconds=seconds,
            cores=cores,
            other_cores=max((after.busy_s - before.busy_s - sum(spent.values())) / seconds, 0.0),
            busiest_server_thread=busiest("servers"),
            busiest_writer_thread=busiest("writers"),
            disk_mb_s=(after.disk_written_bytes - before.disk_written_bytes) / 1e6 / seconds,
            disk_busy=(after.disk_busy_s - before.disk_busy_s) / seconds,
            loopback_mb_s=(after.loopback_bytes - before.loopback_bytes) / 1e6 / seconds,
            rows_s=grown("understudy_rows_committed_total"),
            chunk_mb_s=grown("understudy_bytes_received_total") / 1e6,
            batches_s=grown("understudy_batches_sent_total"),
        )

    def shares(self, num_cores: int, bare_disk_mb_s: float) -> dict[str, float]:
        """How full each resource is; 1 is full."""
        return {
            "CPU": (sum(self.cores.values()) + self.other_cores) / num_cores,
            "disk": self.disk_mb_s / bare_disk_mb_s,
            "one thread of a server": self.busiest_server_thread,
            "one thread of a writer": self.busiest_writer_thread,
        }


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What limits, and by which figures."""

    limit: str
    share: float
    shares: Mapping[str, float]


def verdict(used: Used, num_cores: int, bare_disk_mb_s: float) -> Verdict:
    """The fullest resource, if it is full; CPU with who takes most of it. Else it is the way there and back."""
    shares = used.shares(num_cores, bare_disk_mb_s)
    name, share = max(shares.items(), key=lambda one: one[1])
    if share < FULL:
        return Verdict(limit=f"waiting ({name} is fullest)", share=share, shares=shares)
    if name == "CPU" and used.other_cores > sum(used.cores.values()):
        name = "CPU, most of it not ours"
    elif name == "CPU":
        name = f"CPU, most of ours in {max(used.cores, key=lambda role: used.cores[role])}"
    return Verdict(limit=name, share=share, shares=shares)


def bare_disk_mb_s(place: Path, *, num_threads: int = 4, seconds: float = 1.0) -> float:
    """What files below `place` take in writes of 1 MiB, each made durable, by several threads at once."""
    block = os.urandom(PROBE_BYTES)
    total = (
        int(seconds * 2**30 / num_threads) // PROBE_BYTES * PROBE_BYTES
    )  # a file is set to its size, as segments are
    begin = threading.Barrier(num_threads + 1)

    def write(number: int) -> int:
        path = place / f"probe-{number}"
        with path.open("wb") as file:
            file.truncate(total)
            begin.wait()
            end, at = time.monotonic() + seconds, 0
            while time.monotonic() < end and at < total:
                os.pwrite(file.fileno(), block, at)
                os.fdatasync(file.fileno())
                at += PROBE_BYTES
        path.unlink()
        return at

    with ThreadPoolExecutor(num_threads) as pool:
        running = [pool.submit(write, number) for number in range(num_threads)]
        begin.wait()
        begun = time.monotonic()
        written = sum(future.result() for future in running)
        return written / 1e6 / (time.monotonic() - begun)


def loopback_bytes(table: Path = Path("/proc/net/dev")) -> int:
    """Received on the loopback interface of this process's network so far, TCP's own included."""
    found = re.search(r"^\s*lo:\s*(\d+)", table.read_text(), re.MULTILINE)
    assert found is not None, f"{table} has no loopback interface"
    return int(found[1])


def _busy_s() -> float:
    """Of all cores: all but idle and waiting for a disk."""
    fields = [int(value) for value in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    return (sum(fields) - fields[3] - fields[4]) * TICK_S


def _cpu_s(place: Path) -> float:
    fields = (place / "stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) * TICK_S


def _disk(place: Path) -> tuple[int, float]:
    """Bytes written to the device under a directory, and seconds in which it was at work; 0 if it is not told."""
    device = place.stat().st_dev
    for line in Path("/proc/diskstats").read_text().splitlines():
        fields = line.split()
        if (int(fields[0]), int(fields[1])) == (os.major(device), os.minor(device)):
            return int(fields[9]) * SECTOR_BYTES, int(fields[12]) / 1e3
    return 0, 0.0


def _metrics(page: str) -> dict[str, float]:
    with urllib.request.urlopen(page, timeout=60) as answer:
        lines = answer.read().decode().splitlines()
    return {name: float(value) for name, _, value in (one.rpartition(" ") for one in lines if not one.startswith("#"))}


def _added(pages: Sequence[Mapping[str, float]]) -> dict[str, float]:
    return {name: sum(page.get(name, 0.0) for page in pages) for name in {name for page in pages for name in page}}
