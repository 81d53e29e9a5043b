"""Threads: how many CPU threads torch uses, chosen by what pays on a machine that others may use too.

A small network, one that sees no camera, gains nothing from a second thread, and on a busy machine loses most of its
time, because each of its many short operations waits for all threads. A network with cameras and a VLA gain nearly a
core for a core. The choice depends on nothing that changes while the machine runs, because the number of threads
changes the last bits of a sum, and a resumed run must compute the same bits.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from understudy.training.runs.config import ConfigError

MAX_THREADS = 8  # that are chosen unasked; more have not been measured to pay
VARIABLE = "OMP_NUM_THREADS"
CGROUPS = Path("/sys/fs/cgroup")


@dataclass(frozen=True, kw_only=True)
class Threads:
    """How many threads torch uses, and why."""

    num: int
    reason: str

    def __str__(self) -> str:
        return f"torch uses {self.num} CPU thread{'s' if self.num > 1 else ''}: {self.reason}"


def use_threads(asked: int | None, *, large: bool) -> Threads:
    """Make torch use as many threads as `choose_threads` says; returns the choice, to be shown to the user."""
    import torch  # only now: reading a run needs no torch

    chosen = choose_threads(asked, large=large)
    torch.set_num_threads(chosen.num)
    return chosen


def pin_threads(num: int) -> None:
    """Make torch use `num` threads in this process and its children, whatever a run in it would choose."""
    import torch

    os.environ[VARIABLE] = str(num)
    torch.set_num_threads(num)


def choose_threads(
    asked: int | None, *, large: bool, environment: Mapping[str, str] = os.environ, cores: int | None = None
) -> Threads:
    """The number that the user asked for, else that of OMP_NUM_THREADS, else what pays for the network."""
    if asked is not None:
        return Threads(num=asked, reason="as asked by --threads")
    given = environment.get(VARIABLE, "").partition(",")[0].strip()
    if given.isdigit() and int(given) > 0:
        return Threads(num=int(given), reason=f"as {VARIABLE} says")
    cores = available_cores() if cores is None else cores
    there = f"{cores} core{'s' if cores > 1 else ''} available"
    if not large:
        return Threads(num=1, reason=f"the network is small ({there}); --threads changes it")
    return Threads(num=max(1, min(cores, MAX_THREADS)), reason=f"{there}; --threads changes it")


def check_threads(asked: int | None) -> None:
    """Raise ConfigError for a number that is no number of threads."""
    if asked is not None and asked < 1:
        raise ConfigError(f"threads: expected a number from 1, got {asked}; leave it out to have it chosen")


def available_cores(root: Path = CGROUPS, membership: Path = Path("/proc/self/cgroup")) -> int:
    """The CPU cores that this process may use: of its affinity, and no more than its cgroup's quota, rounded down."""
    affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = _cgroup_quota(root, membership)
    return affinity if quota is None else max(1, min(affinity, int(quota)))


def _cgroup_quota(root: Path, membership: Path) -> float | None:
    """The smallest quota, in cores, of this process's cgroup and those above it; None if there is none."""
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return None
    quotas = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        top = root / controllers if controllers else root
        inner = top / path.lstrip("/")
        for folder in [inner, *inner.parents]:
            if (quota := _read_quota(folder)) is not None:
                quotas.append(quota)
            if folder == top:
                break
    return min(quotas, default=None)


def _read_quota(folder: Path) -> float | None:
    """The quota of one cgroup, in cores: of version 2, else of version 1."""
    try:
        quota, period = (folder / "cpu.max").read_text().split()
    except (OSError, ValueError):
        try:
            quota, period = ((folder / f"cpu.cfs_{name}_us").read_text().strip() for name in ("quota", "period"))
        except OSError:
            return None
    if quota in ("max", "-1"):
        return None
    return int(quota) / int(period)
