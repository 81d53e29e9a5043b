"""Roles: what the actors of a history do with the product, and what they then note in the model."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from tests.simulation import threads
from tests.simulation import world as worlds
from tests.simulation.model import SPECS, Model, Snapshot, digest, observation, step
from tests.simulation.world import Actor, Lab, Machine

from understudy.core import DamageError, StoreError, UnavailableError, UnderstudyError
from understudy.replay import EVERYTHING, Budget, Reader, Retention, Sampler, Store, compact
from understudy.replay.maintain.backup import backup
from understudy.replay.sample.batch_source import EmptyError
from understudy.replay.write.edit_requests import EditRequest, submit_edit
from understudy.service.client.outbox import OutboxConfig

COMMIT_STEPS = 4


class Recorder(Actor):
    """Gives steps to a writer, and knows which of them must never be lost."""

    def __init__(self, machine: Machine, name: str, spec: str, model: Model):
        super().__init__(machine, name)
        self.spec = spec
        self._model = model
        self.writer: Any = None
        self._number: int | None = None  # of the open episode
        self._mine: list[int] = []  # episodes of this writer
        self.numbers: list[int] = []  # and of all before it

    def began(self, writer: Any) -> None:
        self.writer = writer
        self._number = None
        self._mine = []

    def stop(self) -> None:
        super().stop()
        self.writer = None

    def give(self, num_steps: int) -> None:
        """Append steps, to a new episode if none is open."""
        for _ in range(num_steps):
            self._append(last=False)

    def _append(self, *, last: bool) -> None:
        writer = self.writer
        if writer is None:
            return
        if self._number is None:
            self._number = self._model.begin(self.spec)
            self._mine.append(self._number)
            self.numbers.append(self._number)
            writer.begin(self._model.info(self._number))
        episode = self._model.episodes[self._number]
        index = episode.num_given
        episode.num_given += 1
        self._call(writer, lambda: writer.append(step(self.spec, self._number, index, last=last)), index)

    def end(self) -> None:
        self._append(last=True)
        writer = self.writer
        if writer is None or self._number is None:
            return
        episode = self._model.episodes[self._number]
        if not writer._ended:
            self.cut()
            return
        index = episode.num_given
        episode.num_given += 1
        refused = bool(writer._num_refused)
        self._call(
            writer,
            lambda: writer.end(observation(self.spec, self._number, index)),
            None if refused else index,
            end=True,
        )

    def cut(self) -> None:
        if self.writer is not None and self._number is not None:
            self._call(self.writer, self.writer.cut, None)

    def flush(self) -> None:
        if self.writer is not None:
            self._call(self.writer, self.writer.flush, None)

    def _call(self, writer: Any, act: Callable[[], Any], index: int | None, *, end: bool = False) -> None:
        """A call of the writer that takes the row `index`; a row whose call failed may be there or not."""
        episode = self._model.episodes[self._number] if self._number is not None else None
        try:
            act()
        except UnderstudyError as error:
            self.on_error(error)
        else:
            if episode is not None and index is not None:
                episode.held.append(index)
                episode.ended |= end
            self.note_promises(act == writer.flush)
        finally:
            if writer._info is None:
                self._number = None

    def note_promises(self, flushed: bool) -> None:
        """After a call that was good: what the writer no longer holds is acknowledged."""
        writer = self.writer
        if writer is not None and not writer.num_uncommitted and not writer._parts and not writer._in_doubt:
            self._promise(stored=True)

    def _promise(self, *, stored: bool) -> None:
        for number in self._mine:
            episode = self._model.episodes[number]
            episode.promised.update(episode.held)
            if stored:
                episode.stored.update(episode.held)

    def on_error(self, error: UnderstudyError) -> None:
        pass


class RemoteRecorder(Recorder):
    """A robot. A flush means that the spool has the steps; without a spool, only the server's word counts."""

    def __init__(self, machine: Robot, spec: str, model: Model):
        super().__init__(machine, f"{machine.name}-writer", spec, model)
        self._robot = machine

    def note_promises(self, flushed: bool) -> None:
        if flushed and self._robot.spool is not None:
            self._promise(stored=False)

    def deliver(self, timeout_s: float) -> None:
        if self.writer is None:
            return
        try:
            if self.writer.wait_delivered(timeout_s):
                self._promise(stored=True)
        except UnderstudyError as error:
            self.on_error(error)

    def on_error(self, error: UnderstudyError) -> None:
        self._robot.problem = error


class Robot(Machine):
    """A machine that writes over the network."""

    def __init__(self, name: str, root: Path, spec: str, model: Model, *, writer: str, spool: bool):
        super().__init__(name, root)
        self._writer = writer  # two robots with one name replace each other
        self.spool = self.disk.directory / "spool" if spool else None
        self.recorder = RemoteRecorder(self, spec, model)
        self.subscriber = Subscriber(self, model)
        self.actors = [self.recorder, self.subscriber]
        self.problem: UnderstudyError | None = None

    def open(self) -> None:
        """Begin to write; raises what the product raises."""
        self.problem = None
        config = OutboxConfig(queue_steps=40, block_timeout_s=0.5, spool_after_s=0.2)
        self.recorder.began(
            worlds.world.remote().writer(
                self._writer,
                SPECS[self.recorder.spec],
                spool=self.spool,
                commit_steps=COMMIT_STEPS,
                flush_each_episode=True,
                config=config,
            )
        )

    @property
    def has_damage(self) -> bool:
        """Whether chunks that could not be read were set aside; the product says so, and keeps them for people."""
        return self.spool is not None and any(self.spool.glob("damaged-*"))

    def has_delivered(self) -> bool:
        try:
            return not self.failed and bool(self.recorder.writer.wait_delivered(0))
        except DamageError:
            return self.has_damage

    @property
    def failed(self) -> bool:
        """Whether its writer has stopped for good."""
        writer = self.recorder.writer
        return writer is None or writer._outbox._failure is not None


class Subscriber(Actor):
    """Follows the published parameters."""

    def __init__(self, machine: Machine, model: Model):
        super().__init__(machine, f"{machine.name}-actor")
        self._model = model
        self.subscription: Any = None
        self.last_version = 0
        self.problems: list[str] = []

    def stop(self) -> None:
        super().stop()
        self.subscription = None
        self.last_version = 0

    def catch_up(self, timeout_s: float) -> None:
        """Look until the newest version has arrived."""
        deadline = time.monotonic() + timeout_s
        while self.last_version < self._model.last_version and time.monotonic() < deadline:
            self.look()
            wait(0.5)

    def look(self) -> None:
        """Take the newest version and compare it with what is known of it."""
        if self.subscription is None:
            self.subscription = worlds.world.remote().parameters()
        self.subscription.wait(timeout_s=0.2)
        found = self.subscription.latest
        if found is None:
            return
        content = int(found.tree["content"][0])
        if self._model.versions.setdefault(found.version, content) != content:
            self.problems.append(f"version {found.version} is {content} now, and was {self._model.versions}")
        if found.version < self.last_version:
            self.problems.append(f"{self.name} went back from version {self.last_version} to {found.version}")
        self.last_version = max(self.last_version, found.version)


class Trainer(Machine):
    """Publishes parameters and samples over the network."""

    def __init__(self, root: Path, model: Model):
        super().__init__("trainer", root)
        self._model = model
        self.learner = Actor(self, "learner")
        self.actors = [self.learner]
        self._next_content = 0
        self._remote: Any = None
        self._samplers: dict[str, Any] = {}
        self.problems: list[str] = []

    def on_killed(self) -> None:
        self._remote = None
        self._samplers = {}

    def publish(self) -> None:
        self._remote = self._remote or worlds.world.remote()
        self._next_content += 1
        content = self._next_content
        try:
            version = self._remote.publish({"content": np.full(700, content)}, timeout_s=20.0)
        except UnderstudyError:
            return
        if version <= self._model.last_version:
            self.problems.append(f"version {version} was given out again after {self._model.last_version}")
        if self._model.versions.setdefault(version, content) != content:
            self.problems.append(f"version {version} is {content}, and somebody got {self._model.versions[version]}")
        self._model.last_version = max(self._model.last_version, version)

    def sample(self, spec: str, seed: int) -> None:
        self._remote = self._remote or worlds.world.remote()
        sampler = self._samplers.get(spec)
        try:
            if sampler is None:
                sampler = self._samplers[spec] = self._remote.sampler(
                    EVERYTHING, batch_size=6, seed=seed, spec=SPECS[spec], depth=1
                )
                sampler._timeout_s = 10.0
            batch = sampler.sample()
        except (StoreError, UnavailableError, EmptyError):
            self._samplers.pop(spec, None)
            return
        self.problems += self._model.check_batch(spec, batch)
        self._model.batches.append((spec, str(sampler.last_record), digest(batch)))


class LabWork:
    """What is done in the lab's process: local sampling, edits and maintenance."""

    def __init__(self, lab: Lab, model: Model):
        self._lab = lab
        self._model = model
        self._samplers: dict[str, Sampler[Any]] = {}
        self._num_backups = 0
        self.backups: list[tuple[Path, Snapshot]] = []
        self.problems: list[str] = []

    def reset(self) -> None:
        self._samplers = {}

    @property
    def store(self) -> Store | None:
        return self._lab.store

    def sample(self, spec: str, seed: int) -> None:
        if self.store is None:
            return
        try:
            sampler = self._samplers.get(spec)
            if sampler is None:
                sampler = Sampler(self._lab.path, EVERYTHING, batch_size=6, seed=seed, spec=SPECS[spec], num_threads=1)
                self._samplers[spec] = sampler
            sampler.follow()
            batch = sampler.sample()
        except StoreError:  # nothing to draw yet, or removed by compaction; damage is found by the checks
            self._samplers.pop(spec, None)
            return
        self.problems += self._model.check_batch(spec, batch)
        self._model.batches.append((spec, str(sampler.last_record), digest(batch)))

    def sample_again(self, rng: random.Random) -> None:
        """A batch of the past must have the same bits, unless compaction has removed its rows."""
        if self.store is None or not self._model.batches:
            return
        spec, record, wanted = rng.choice(self._model.batches)
        try:
            with Sampler(self._lab.path, EVERYTHING, batch_size=6, spec=SPECS[spec], num_threads=1) as sampler:
                got = digest(sampler.rebuild(record))
        except StoreError as error:
            if not self._lab.disk.faults and "compaction" not in str(error) and "removed" not in str(error):
                self.problems.append(f"batch {record} cannot be drawn again: {error}")
            return
        if got != wanted:
            self.problems.append(f"batch {record} has other bits than before")

    def _ids(self, where: str) -> list[int]:
        with Reader(self._lab.path) as reader:
            return reader.catalog.episode_ids(where)

    def edit(self, rng: random.Random, kind: str) -> None:
        store = self.store
        if store is None:
            return
        try:
            ids = self._ids("not purged")
            if not ids:
                return
            chosen = rng.sample(ids, min(len(ids), rng.randint(1, 2)))
            self._edit(store, kind, chosen, f"note-{rng.randint(0, 99)}")
        except StoreError:
            pass

    def _edit(self, store: Store, kind: str, chosen: list[int], label: str) -> None:
        known: dict[int, Any] = self._model.labels if kind == "label" else self._model.deleted
        wanted = {"delete": True, "restore": False, "label": label}[kind]
        for episode in chosen:
            known[episode] = None
        if kind == "delete":
            store.delete(chosen)
        elif kind == "restore":
            store.restore(chosen)
        else:
            store.label(chosen, {"note": label})
        for episode in chosen:
            known[episode] = None if episode in self._model.asked else wanted
        self._model.last_commit = max(self._model.last_commit, store.last_commit)

    def retain(self, max_steps: int) -> None:
        store = self.store
        if store is None:
            return
        try:
            before = set(self._ids("deleted is not null"))
            retention = Retention(practice=Budget(max_steps=max_steps))
            for episode in store.over_budget(retention):
                self._model.deleted[episode] = None
            store.retain(retention)
            for episode in set(self._ids("deleted is not null")) - before:
                self._model.deleted[episode] = None  # another thread may have restored it since
        except StoreError:
            pass

    def ask_for_edit(self, rng: random.Random) -> None:
        """What another process does: leave a request, which must be carried out in the end."""
        kind = rng.choice(("delete", "restore", "label"))
        if self.store is None:
            return
        with suppress(StoreError):
            ids = self._ids("not purged")
            if ids:
                episode = rng.choice(ids)
                self._model.asked.add(episode)
                self._model.labels[episode] = self._model.deleted[episode] = None
                labels = {"note": "asked"} if kind == "label" else {}
                submit_edit(self._lab.path, EditRequest(action=kind, episodes=(episode,), labels=labels))

    def back_up(self) -> None:
        """Make a backup; one that is complete holds all that was acknowledged when it began."""
        if self.store is None:
            return
        self._num_backups += 1
        path = self._lab.disk.directory / f"backup-{self._num_backups}"
        snapshot = self._model.snapshot()
        with suppress(StoreError):
            backup(self.store, path)
            self.backups.append((path, snapshot))

    def compact(self, min_dead: float) -> None:
        if self.store is not None:
            with suppress(StoreError):
                compact(self.store, min_dead=min_dead)


def wait(seconds: float) -> None:
    threads.scheduler.sleep(seconds)
