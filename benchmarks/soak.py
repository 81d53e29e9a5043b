"""Soak: a server, a writer and a learner for an hour, killed again and again; nothing may grow.

    nice python benchmarks/soak.py --minutes 60 --out docs/images/soak.svg

| process | does | is killed |
|---|---|---|
| server | serves a store, keeps the newest practice, compacts by policy | three times while the run warms up |
| writer | records episodes through a spool, at a steady rate | every 30 to 60 s |
| learner | samples, updates a small SAC, publishes, saves checkpoints | every 60 to 120 s |

Once a second this counts the open descriptors and the private memory of the three processes, and the blocks on disk of
the store, the spool and the checkpoints. The catalog is counted apart: it keeps a line for each episode and commit ever
made, also of those that retention has removed, and so it grows with what was recorded.

The first third is the warm-up: the store reaches its budget there, and the server is killed there, so that in the rest
of the run a leak of the server has time to show. Seconds in which a process is starting are left out. A straight line
is fitted to the rest; what it rises by must be below 5 % of the mean. At the end the store is verified, and everything
that the writers recorded must have been delivered.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from understudy.core import ArraySpec, EpisodeInfo, Source, Spec, Step, StepSpec, UnderstudyError
from understudy.replay import Budget, Reader, Retention, Store, verify
from understudy.replay.format.paths import CATALOG_FILE
from understudy.replay.maintain.compaction import compact
from understudy.replay.read.view import EVERYTHING
from understudy.selftest.faulty_proxy import free_port

MAX_DRIFT = 0.05  # of the mean, from the end of the warm-up to the end of the run
WARM_UP = 1 / 3  # of the run
SETTLE_S = 8.0  # after a process says that it works
KEEP_STEPS = 2_000
SEGMENT_BYTES = 2 * 2**20
STEPS_PER_S = 60.0
UPDATES_PER_S = 10.0
EPISODE_STEPS = 40
POLICY_EVERY_S = 2.0
CHECKPOINT_EVERY_S = 5.0
PUBLISH_EVERY_S = 2.0
WRITER, LEARNER, SERVER = "writer", "learner", "server"
Result = TypeVar("Result")
CURVES = {"descriptors": "open descriptors", "memory": "private memory, MB", "disk": "disk, MB"}

SPEC = StepSpec(
    observation=Spec(
        {"camera": ArraySpec(shape=(32, 32, 3), dtype="uint8"), "state": ArraySpec(shape=(8,), dtype="float32")}
    ),
    action=Spec(ArraySpec(shape=(4,), dtype="float32", low=(-1.0,) * 4, high=(1.0,) * 4)),
)


@dataclass(frozen=True, kw_only=True)
class Sample:
    """What was counted at one time. `settled` is False while a process starts."""

    time_s: float
    descriptors: int
    memory: float  # MB
    disk: float  # MB, without the catalog
    settled: bool


@dataclass(kw_only=True)
class SoakReport:
    minutes: float
    samples: list[Sample] = field(default_factory=list)
    kills: dict[str, int] = field(default_factory=lambda: {SERVER: 0, WRITER: 0, LEARNER: 0})
    problems: list[str] = field(default_factory=list)
    catalog_bytes: float = 0.0  # for each episode that was recorded, in the end

    @property
    def used(self) -> list[Sample]:
        """The samples that the slopes are fitted to."""
        return [sample for sample in self.samples if sample.settled and sample.time_s > self.minutes * 60 * WARM_UP]

    def drift(self, name: str) -> float:
        """By how much a curve rises from the warm-up to the end, as a share of its mean."""
        return drift([s.time_s for s in self.used], [getattr(s, name) for s in self.used])

    @property
    def ok(self) -> bool:
        return not self.problems and all(self.drift(name) < MAX_DRIFT for name in CURVES)


def drift(times: Sequence[float], values: Sequence[float]) -> float:
    """The rise of the fitted line over the whole time, as a share of the mean; infinite with too few values."""
    if len(times) < 10:
        return float("inf")
    slope, _ = np.polyfit(times, values, 1)
    return float(slope * (times[-1] - times[0]) / np.mean(values))


def soak(place: Path, minutes: float, *, seed: int = 0) -> SoakReport:
    """Run the three processes for some minutes, in this directory."""
    rng = random.Random(seed)
    report = SoakReport(minutes=minutes)
    length_s = minutes * 60
    roles = {name: Role(place, name) for name in (SERVER, WRITER, LEARNER)}
    kill_at = {
        SERVER: iter([length_s * WARM_UP * share for share in (0.25, 0.5, 0.75)]),
        WRITER: _times(rng, 30, 60),
        LEARNER: _times(rng, 60, 120),
    }
    next_kill = {name: next(times) for name, times in kill_at.items()}
    began = time.monotonic()
    try:
        for role in roles.values():
            role.start()
        while (now := time.monotonic() - began) < length_s:
            for name, role in roles.items():
                if now > next_kill[name]:
                    role.kill()
                    report.kills[name] += 1
                    next_kill[name] = next(kill_at[name], float("inf"))
                    role.start()
                elif role.ended:
                    report.problems.append(f"the {name} ended by itself; {role.end_of_log}")
                    return report
            report.samples.append(_count(place, roles.values(), now))
            time.sleep(max(0.0, 1.0 - (time.monotonic() - began - now)))
        roles[LEARNER].kill()
        if not roles[WRITER].stop(60):
            report.problems.append(f"the writer's last steps were not delivered in 60 s; {roles[WRITER].end_of_log}")
        if not roles[SERVER].stop(60):
            report.problems.append(f"the server did not stop in 60 s; {roles[SERVER].end_of_log}")
    finally:
        for role in roles.values():
            role.kill()
    report.problems += _check(place)
    with Reader(place / "store") as reader:
        num_episodes = reader.catalog.last_episode_id() or 1
    report.catalog_bytes = (place / "store" / CATALOG_FILE).stat().st_size / num_episodes
    return report


def _times(rng: random.Random, low_s: float, high_s: float) -> Iterator[float]:
    at = 0.0
    while True:
        at += rng.uniform(low_s, high_s)
        yield at


class Role:
    """One of the three processes. It says that it works by touching its file `working`."""

    def __init__(self, place: Path, name: str):
        self._place = place
        self._name = name
        self._process: subprocess.Popen[bytes] | None = None
        self._log = place / f"{name}.log"
        self._working = place / f"{name}.working"

    def start(self) -> None:
        self._working.unlink(missing_ok=True)
        with self._log.open("ab") as log:
            command = [sys.executable, "-u", __file__, "--role", self._name, "--place", str(self._place)]
            self._process = subprocess.Popen(command, stdout=log, stderr=log)

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def ended(self) -> bool:
        return self._process is not None and self._process.poll() is not None

    @property
    def end_of_log(self) -> str:
        """The last lines that it printed, for a problem: a temporary directory is gone by then."""
        lines = self._log.read_text(errors="replace").splitlines()[-30:] if self._log.exists() else []
        return "\n".join(["its log ends with:", *lines])

    @property
    def settled(self) -> bool:
        try:
            return time.time() - self._working.stat().st_mtime > SETTLE_S
        except FileNotFoundError:
            return False

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def stop(self, timeout_s: float) -> bool:
        """Ask it to finish; False if it does not."""
        assert self._process is not None
        self._process.send_signal(signal.SIGTERM)
        try:
            return self._process.wait(timeout_s) == 0
        except subprocess.TimeoutExpired:
            return False


def _count(place: Path, roles: Any, now: float) -> Sample:
    descriptors, memory, settled = 0, 0.0, True
    for role in roles:
        with suppress(FileNotFoundError, ProcessLookupError):
            descriptors += sum(1 for _ in Path(f"/proc/{role.pid}/fd").iterdir())
            status = Path(f"/proc/{role.pid}/status").read_text()
            memory += sum(int(line.split()[1]) for line in status.splitlines() if line.startswith("RssAnon")) / 1024
        settled = settled and role.settled
    disk = 0
    for name in ("store", "spool", "checkpoints"):
        for directory, _, files in os.walk(place / name):  # which goes on if a directory disappears
            for file in files:
                if file.startswith(CATALOG_FILE):
                    continue
                with suppress(FileNotFoundError):
                    disk += (Path(directory) / file).stat().st_blocks * 512
    return Sample(time_s=now, descriptors=descriptors, memory=memory, disk=disk / 2**20, settled=settled)


def _check(place: Path) -> Iterator[str]:
    """The store is whole, and nothing that was recorded is left in the spool."""
    yield from verify(place / "store").problems[:5]
    left = list((place / "spool").rglob("*.safetensors"))
    if left:
        yield f"{len(left)} recorded chunks were not delivered"
    with Reader(place / "store") as reader:
        for record in reader.episodes("deleted is null and state = 'ended'"):
            episode = reader.read(record.id)
            wanted = [_step(record.info.seed, index).reward for index in range(EPISODE_STEPS)][-len(episode) :]
            if not np.array_equal(episode.reward, np.array(wanted, np.float32)):
                yield f"episode {record.id} is not what was recorded"


# ---- the three processes


def play(role: str, place: Path) -> None:
    """Run one of the processes until it is killed."""
    address = f"127.0.0.1:{_port(place)}"
    {SERVER: serve, WRITER: write, LEARNER: learn}[role](place, address)


def _port(place: Path) -> int:
    return int((place / "port").read_text())


@contextmanager
def _until_told() -> Iterator[list[bool]]:
    told = [False]
    signal.signal(signal.SIGTERM, lambda *_: told.__setitem__(0, True))
    yield told


def serve(place: Path, address: str) -> None:
    from understudy.service import Server, ServerConfig, keep_large_blocks

    keep_large_blocks()  # as `understudy serve` does
    retention = Retention(practice=Budget(max_steps=KEEP_STEPS))
    with (
        _until_told() as told,
        Store.open(place / "store", segment_bytes=SEGMENT_BYTES) as store,
        Server(store, ServerConfig(port=int(address.rpartition(":")[2]))) as server,
    ):
        (place / f"{SERVER}.working").touch()
        while not told[0] and not server.failed.is_set():
            time.sleep(POLICY_EVERY_S)
            store.retain(retention)
            compact(store)
        if server.failure is not None:
            raise server.failure


def write(place: Path, address: str) -> None:
    from understudy.service import connect

    rng = random.Random(time.time_ns())
    with (
        _until_told() as told,
        connect(address) as remote,
        remote.writer("arm", SPEC, spool=place / "spool", commit_steps=10) as writer,
    ):
        (place / f"{WRITER}.working").touch()
        due = time.monotonic()
        while not told[0]:
            seed = rng.getrandbits(60)
            writer.begin(EpisodeInfo(task="soak", seed=seed))
            for index in range(EPISODE_STEPS):
                writer.append(_step(seed, index))
                due = max(due + 1 / STEPS_PER_S, time.monotonic() - 1.0)
                time.sleep(max(0.0, due - time.monotonic()))
            writer.end(_observation(seed, EPISODE_STEPS))
        if not writer.wait_delivered(50.0):
            raise UnderstudyError(f"not delivered: {writer.delivery}")


def _step(seed: int | None, index: int) -> Step:
    rng = np.random.default_rng([seed or 0, index])
    return Step(
        observation=_observation(seed, index),
        action=rng.uniform(-1, 1, 4).astype(np.float32),
        reward=float(rng.random(dtype=np.float32)),
        truncated=index == EPISODE_STEPS - 1,
        source=Source.POLICY,
    )


def _observation(seed: int | None, index: int) -> dict[str, Any]:
    rng = np.random.default_rng([seed or 0, index, 1])
    return {"camera": rng.integers(0, 256, (32, 32, 3), np.uint8), "state": rng.random(8, np.float32)}


def learn(place: Path, address: str) -> None:
    import torch

    from understudy.algorithms import SAC, SACConfig
    from understudy.policies import ActorConfig, Inputs, Stats
    from understudy.service import connect
    from understudy.training.runs.checkpoint import newest_checkpoint, read_checkpoint, write_checkpoint

    torch.set_num_threads(1)
    config = SACConfig(actor=ActorConfig(hidden=(32, 32)), critic_hidden=(32, 32))
    sac = SAC(config, SPEC, Stats.none(Inputs(SPEC.observation)), seed=0)
    root = place / "checkpoints"
    last = newest_checkpoint(root)
    if last is not None:
        sac.restore(read_checkpoint(last).state)
    with ExitStack() as undo:
        remote = undo.enter_context(_patiently(lambda: connect(address)))
        sampler = undo.enter_context(_patiently(lambda: remote.sampler(EVERYTHING, batch_size=32)))
        while _patiently(sampler.follow) < 32:
            time.sleep(0.2)
        (place / f"{LEARNER}.working").touch()
        saved = published = due = time.monotonic()
        while True:
            try:
                sac.update(sampler.sample(), report=False)
                if time.monotonic() > published + PUBLISH_EVERY_S:
                    remote.publish(sac.parameters())
                    published = time.monotonic()
            except UnderstudyError as error:  # the server was killed, and comes back
                print(error)
                time.sleep(0.5)
            if time.monotonic() > saved + CHECKPOINT_EVERY_S:
                write_checkpoint(root, sac.num_updates, sac.state(), {}, keep=2)
                saved = time.monotonic()
            due = max(due + 1 / UPDATES_PER_S, time.monotonic() - 1.0)
            time.sleep(max(0.0, due - time.monotonic()))


def _patiently(act: Callable[[], Result]) -> Result:
    """Do something for which a server is needed that may have been killed just now, until it is back."""
    while True:
        try:
            return act()
        except UnderstudyError as error:
            print(error)
            time.sleep(0.5)


# ---- the figure


def draw(report: SoakReport, out: Path) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(len(CURVES), 1, figsize=(7, 5.5), sharex=True)
    for axis, (name, title) in zip(axes, CURVES.items(), strict=True):
        minutes = [sample.time_s / 60 for sample in report.samples]
        axis.plot(minutes, [getattr(sample, name) for sample in report.samples], color="#c8d6df", linewidth=1)
        used = [sample.time_s / 60 for sample in report.used]
        values = [getattr(sample, name) for sample in report.used]
        axis.plot(used, values, ".", color="#0072b2", markersize=2)
        axis.plot(used, np.polyval(np.polyfit(used, values, 1), used), color="#d55e00", linewidth=1.5)
        axis.set_ylabel(title)
        axis.set_ylim(0, None)
        axis.set_title(f"{100 * report.drift(name):+.1f} % after the warm-up", fontsize=9, loc="right")
        axis.axvline(report.minutes * WARM_UP, color="#8a8a8a", linewidth=0.8, linestyle=":")
    axes[-1].set_xlabel("minutes; grey: all, blue: all processes at work, dotted: end of the warm-up")
    kills = ", ".join(f"{name} {number}" for name, number in report.kills.items())
    figure.suptitle(f"{report.minutes:g} minutes; kills: {kills}", fontsize=10)
    figure.tight_layout()
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out)


def prepare(place: Path) -> None:
    """Choose a port that stays the same for all servers of the run."""
    (place / "port").write_text(str(free_port()))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60.0, help="How long the run takes.")
    parser.add_argument("--seed", type=int, default=0, help="Seed of the times of the kills.")
    parser.add_argument("--out", type=Path, default=None, help="File of the figure; by default none is drawn.")
    parser.add_argument("--place", type=Path, default=None, help="Directory of the run; by default a temporary one.")
    parser.add_argument("--role", choices=(SERVER, WRITER, LEARNER), default=None, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.role is not None:
        play(options.role, options.place)
        return 0
    with tempfile.TemporaryDirectory() as temporary:
        place = options.place or Path(temporary)
        place.mkdir(parents=True, exist_ok=True)
        prepare(place)
        report = soak(place, options.minutes, seed=options.seed)
    for name in CURVES:
        values = [getattr(sample, name) for sample in report.used]
        mean = float(np.mean(values)) if values else float("nan")
        print(f"{name}: mean {mean:.1f}, {100 * report.drift(name):+.1f} % from the warm-up to the end")
    print(f"kills: {report.kills}; {len(report.used)} of {len(report.samples)} seconds counted")
    print(f"catalog: {report.catalog_bytes:.0f} bytes for each episode that was recorded")
    for problem in report.problems:
        print(problem)
    if options.out is not None:
        draw(report, options.out)
    print("flat" if report.ok else "NOT flat")
    return 0 if report.ok else 1


if __name__ == "__main__":
    sys.exit(main())
