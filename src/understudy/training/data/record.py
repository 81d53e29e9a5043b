"""Record: demonstrations of a task, until enough of them have succeeded, into a store here or over the network.

Failures are stored too and marked as such, so that the view `DEMO` leaves them out. Demonstrations recorded before
count: a recording that was stopped or killed continues with the next call.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Protocol

import numpy as np

from understudy.core import StepSpec, StoreError
from understudy.core.cameras import CodecName, encode_cameras
from understudy.envs.pace import Pace
from understudy.envs.teleop.takeover import AlwaysScript, Takeover
from understudy.envs.workers import WorkerFailure
from understudy.envs.world import World
from understudy.processes.stop import Stopped, StopRequest
from understudy.replay import Reader, Store, View
from understudy.replay.read.view import Clause, count_views
from understudy.replay.write.writer import Writer
from understudy.training.data.run_episode import EpisodeResult, Show, run_episode

logger = logging.getLogger(__name__)

MAX_BROKEN_IN_A_ROW = 3  # world failures in a row, after which recording ends


ENV = "env"  # label of an episode: the world in which it was recorded


@dataclass(frozen=True, kw_only=True)
class RecordConfig:
    """What to record. Start states are of the training split."""

    task: str
    """Name of the task to demonstrate."""
    successes: int
    """Number of successful demonstrations in the store at which recording ends."""
    max_episodes: int
    """Number of episodes of this call after which recording ends, however many succeeded."""
    seed: int = 0
    """Seed that decides the start states."""
    env: str | None = None
    """Name of the world with its options, which is stored with each episode as the label `env`."""
    codec: CodecName = "auto"
    """How camera frames are stored; see `encode_cameras`."""

    def __post_init__(self) -> None:
        if self.successes < 1 or self.max_episodes < 1:
            raise StoreError(
                f"record: expected successes and max_episodes from 1, got {self.successes} and {self.max_episodes}"
            )


@dataclass(frozen=True, kw_only=True)
class RecordReport:
    """How far the recording is, earlier calls included."""

    num_successes: int
    num_episodes: int
    num_steps: int = 0  # of this call
    num_broken: int = 0  # episodes of this call that were cut because the world's process failed
    num_discarded: int = 0  # episodes of this call that the operator discarded; they are not counted above


class RecordTarget(Protocol):
    """A store or server that demonstrations are recorded into."""

    def writer(self, spec: StepSpec, codec: CodecName) -> Writer:
        """A writer of steps of this spec, whose camera frames are stored by a codec."""
        ...

    def num_episodes(self, view: View) -> int:
        """The number of episodes in a view."""
        ...

    def discard_last(self) -> None:
        """Delete the episode that was recorded last, as far as the target can."""


def record(
    world: World,
    target: RecordTarget,
    takeover: Takeover,
    config: RecordConfig,
    progress: Callable[[RecordReport, EpisodeResult], None] | None = None,
    *,
    pace: Pace | None = None,
    show: Show | None = None,
    stop: StopRequest | None = None,
) -> RecordReport:
    """Run episodes in which the operator acts, until the target has `successes` of the task.

    An episode that the operator discards is recorded again, from the same start.
    If the world's process fails, its episode is cut and recording continues; after MAX_BROKEN_IN_A_ROW failures the
    error is raised. After a `stop` request, the episode in progress ends and Stopped is raised.
    """
    task = world.suite.task(config.task)
    report = RecordReport(
        num_successes=target.num_episodes(_demonstrations(task.name, "success = 1")),
        num_episodes=target.num_episodes(_demonstrations(task.name, "1")),
    )
    last = report.num_episodes + config.max_episodes
    writer = target.writer(world.step_spec, config.codec)
    attempts = Attempts(target)
    stop = stop or StopRequest()
    while report.num_successes < config.successes and report.num_episodes < last:
        run = partial(
            run_episode,
            world,
            writer,
            takeover=takeover,
            kind="demonstration",
            seed=config.seed + report.num_episodes,
            options={"task": task.name},
            pace=pace,
            show=_counted(show, report),
            stop=stop,
            labels={} if config.env is None else {ENV: config.env},
        )
        try:
            stop.check()
            episode = attempts.run(run)
        except Stopped as stopped:
            stopped.sentence = (
                f"stopped; {report.num_successes} of {config.successes} successes are recorded, and the same command "
                f"continues"
            )
            raise
        num_stored = report.num_episodes + attempts.num_broken - report.num_broken + (episode is not None)
        report = replace(
            report, num_episodes=num_stored, num_broken=attempts.num_broken, num_discarded=attempts.num_discarded
        )
        if episode is None:
            continue
        report = replace(
            report,
            num_successes=report.num_successes + episode.success,
            num_steps=report.num_steps + episode.num_steps,
        )
        if progress is not None:
            progress(report, episode)
    return report


class Attempts:
    """Episodes one after the other: one whose world failed is cut and the world restarted, a discarded one deleted."""

    def __init__(self, target: RecordTarget):
        self.num_broken = 0  # episodes that are stored up to the failure of the world's process
        self.num_discarded = 0
        self._target = target
        self._broken_in_a_row = 0

    def run(self, run: Callable[[], EpisodeResult]) -> EpisodeResult | None:
        """Run an episode; None if it was broken or discarded. MAX_BROKEN_IN_A_ROW failures raise the last one."""
        try:
            episode = run()
        except WorkerFailure as failure:
            self._broken_in_a_row += 1
            if self._broken_in_a_row >= MAX_BROKEN_IN_A_ROW:
                raise
            logger.warning("the world is restarted: %s", failure)
            self.num_broken += failure.doing not in ("start", "reset")  # an episode had begun
            return None
        self._broken_in_a_row = 0
        if not episode.discarded:
            return episode
        if episode.num_steps:  # otherwise nothing was stored
            self._target.discard_last()
        self.num_discarded += 1
        return None


def record_script(
    world: World,
    store: str | Path,
    *,
    successes: int,
    noise: float = 0.1,
    seed: int = 0,
    max_episodes: int | None = None,
    codec: CodecName = "auto",
) -> RecordReport:
    """Record demonstrations of the world's task by its scripted expert, until the store has `successes` of them.

    `store` is a directory or the address of a server; `noise` is that of `World.expert_action`. It gives up after
    `max_episodes` (default: three times the successes). `codec` says how camera frames are stored
    (`encode_cameras`). `understudy record --human script` does the same.
    """
    rng = np.random.default_rng(seed)
    takeover = Takeover(AlwaysScript(lambda: world.expert_action(noise=noise, rng=rng).action))
    config = RecordConfig(
        task=world.task.name,
        successes=successes,
        max_episodes=max_episodes or 3 * successes,
        seed=seed,
        codec=codec,
    )
    with open_target(str(store)) as target:
        return record(world, target, takeover, config)


def _counted(show: Show | None, report: RecordReport) -> Show | None:
    """A screen whose status also has the number of the episode and of the successes."""
    if show is None:
        return None
    counts = {"episode": report.num_episodes + 1, "successes": report.num_successes}
    return lambda observation, status: show(observation, {**status, **counts})


def _demonstrations(task: str, which: str) -> View:
    quoted = task.replace("'", "''")
    return View(name="recorded", clauses=(Clause(where=f"kind = 'demonstration' and task = '{quoted}' and {which}"),))


# ---- targets

WRITER = "record"


@contextmanager
def open_target(
    where: str, *, spool: Path | None = None, token_file: Path | None = None, tls_cert: Path | None = None
) -> Iterator[RecordTarget]:
    """Open a store's directory, or connect to a server (host:port)."""
    check_target_options(where, spool=spool, token_file=token_file, tls_cert=tls_cert)
    with ExitStack() as undo:
        if _is_address(where):
            yield _ServerTarget(undo, where, spool, token_file, tls_cert)
        else:
            yield _StoreTarget(undo.enter_context(Store.open(where)))


def check_target_options(where: str, **options: Path | None) -> None:
    """Refuse options of a server's connection for a store on this machine."""
    for name, value in options.items():
        if value is not None and not _is_address(where):
            raise StoreError(
                f"{name}: has no effect on a store on this machine, and {where} is one; leave "
                f"--{name.replace('_', '-')} out, or give the address of a server (host:port)"
            )


def _is_address(where: str) -> bool:
    host, colon, port = where.rpartition(":")
    return bool(host and colon and port.isdigit()) and not Path(where).exists()


class _StoreTarget:
    def __init__(self, store: Store):
        self._store = store

    def writer(self, spec: StepSpec, codec: CodecName) -> Writer:
        """With 'auto', a store that has episodes of these fields goes on with their codecs."""
        with self._store.snapshot() as catalog:
            known = [catalog.spec(number) for number in catalog.spec_ids()]
        alike = [other for other in known if other.decoded == spec.decoded]
        return self._store.writer(WRITER, alike[-1] if alike and codec == "auto" else encode_cameras(spec, codec))

    def num_episodes(self, view: View) -> int:
        with Reader(self._store.path) as reader:
            return count_views(reader, [view])[0].episodes

    def discard_last(self) -> None:
        with Reader(self._store.path) as reader:
            last = reader.catalog.last_episode_id()
        self._store.delete([last])


class _ServerTarget:
    def __init__(
        self, undo: ExitStack, address: str, spool: Path | None, token_file: Path | None, tls_cert: Path | None
    ):
        from understudy.service import connect  # only now: it needs gRPC

        self._undo = undo
        self._spool = spool
        self._remote = undo.enter_context(connect(address, token_file=token_file, tls_cert=tls_cert))

    def writer(self, spec: StepSpec, codec: CodecName) -> Writer:
        encoded = encode_cameras(spec, codec)
        return self._undo.enter_context(self._remote.writer(WRITER, encoded, spool=self._spool))

    def discard_last(self) -> None:
        """Nothing: only the server's store deletes episodes. This one is a cut failure, which the view `DEMO` omits."""

    def num_episodes(self, view: View) -> int:
        return sum(int(status["episodes"][view.name]) for status in self._remote.status([view]).values())
