"""History: a seed, the operations that follow from it, and whether the store kept its promises in the end.

    result = run_history(library, root, seed=7, num_operations=200)

The operations are drawn before anything happens, each with a seed of its own, so that some can be left out and the
others stay what they were (`only`).
"""

from __future__ import annotations

import errno
import random
import shutil
import traceback
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from tests.simulation import disk, threads
from tests.simulation import world as worlds
from tests.simulation.model import SPECS, Model
from tests.simulation.network import KEEPALIVE_S
from tests.simulation.roles import LabWork, Recorder, Robot, Trainer
from tests.simulation.rot import problems_after_damage
from tests.simulation.threads import Hang, Process
from tests.simulation.world import Actor, Lab, Machine, World

from understudy.core import UnderstudyError
from understudy.replay import Reader, verify
from understudy.replay.write.edit_requests import pending_edits

EPOCH_NS = 1_800_000_000 * 10**9
DELIVERY_S = 900.0  # after which everything recorded must have arrived, once all faults are healed

# How often each operation is drawn.
WEIGHTS = {
    "give": 30,
    "end": 10,
    "cut": 2,
    "flush": 6,
    "deliver": 4,
    "sample": 8,
    "sample_again": 4,
    "remote_sample": 4,
    "publish": 4,
    "look": 6,
    "delete": 3,
    "restore": 2,
    "label": 2,
    "retain": 1,
    "compact": 3,
    "ask_for_edit": 2,
    "back_up": 1,
    "restore_backup": 0.5,
    "check": 1,
    "pause": 8,
    "kill": 2,
    "power_cut": 3,
    "exit": 2,
    "disk_fault": 4,
    "disk_heal": 2,
    "slow_disk": 1,
    "cut_link": 3,
    "stall_link": 2,
    "slow_link": 1,
    "heal_link": 3,
    "clock": 1,
}
ALWAYS = ("give", "end", "flush")  # are in every history
SLOW_CALLS, SLOW_S = 20, 3.0  # of a slow disk: its next calls take up to so long
HANGS_S = 60.0 + 4 * SLOW_CALLS * SLOW_S  # a disk may be slow more than once in a row, and that is no hang


@dataclass(frozen=True)
class Operation:
    number: int
    kind: str
    seed: int


@dataclass(frozen=True)
class Result:
    """What came of a history."""

    seed: int
    problems: tuple[str, ...]
    digest: int  # of the order in which everything happened: equal if a seed repeats exactly
    num_operations: int
    num_switches: int
    num_calls: int
    simulated_s: float
    log: tuple[str, ...]


def draw_operations(seed: int, num_operations: int) -> list[Operation]:
    """Each history prefers some kinds and leaves out others, so that rare combinations come up."""
    rng = random.Random(seed)
    weights = [weight * (1 if kind in ALWAYS else rng.choice((0, 1, 1, 2, 4))) for kind, weight in WEIGHTS.items()]
    kinds = rng.choices(list(WEIGHTS), weights, k=num_operations)
    return [Operation(number, kind, rng.getrandbits(32)) for number, kind in enumerate(kinds)]


def run_history(
    library: Any, root: Path, *, seed: int, num_operations: int, only: Collection[int] | None = None
) -> Result:
    """Live through a history in the directory `root`, which must be empty and in memory."""
    operations = [one for one in draw_operations(seed, num_operations) if only is None or one.number in only]
    return run_script(library, root, seed, lambda history: history.live(operations), len(operations))


def run_script(
    library: Any, root: Path, seed: int, script: Callable[[History], None], num_operations: int = 0
) -> Result:
    """Let a script drive a world that a seed decides."""
    library.sim_begin(seed, EPOCH_NS)
    worlds.world = world = World(library, root, seed)
    threads.scheduler = world.scheduler
    history = History(world)
    driver = world.scheduler.spawn("driver", Process("driver"), lambda: script(history))
    try:
        world.scheduler.run(lambda: driver.finished)
    except Hang as error:
        history.problems.append(f"hang: {error}")
    history.problems += [*driver.process.errors, *world.errors, *history.errors()]
    result = Result(
        seed=seed,
        problems=tuple(history.problems),
        digest=world.scheduler.trace_digest,
        num_operations=num_operations,
        num_switches=world.scheduler.num_switches,
        num_calls=int(library.sim_num_calls()),
        simulated_s=(world.scheduler.now_ns - 10**12) / 1e9,
        log=tuple(history.log),
    )
    library.sim_end()
    return result


class History:
    """The driver: begins operations and brings machines back up."""

    def __init__(self, world: World):
        self._world = world
        self._model = Model()
        self.problems: list[str] = []
        self.log: list[str] = []
        rng = world.rng
        self._revive_chance = rng.choice((0.05, 0.2, 0.6))  # after each operation, of a machine that is down
        self._lab = Lab(world.root)
        self.local = [Recorder(self._lab, f"local-{spec}", spec, self._model) for spec in SPECS]
        self._sampling, self._operator = Actor(self._lab, "sampling"), Actor(self._lab, "operator")
        self._lab.actors += [*self.local, self._sampling, self._operator]
        self._work = LabWork(self._lab, self._model)
        robot = partial(Robot, root=world.root, model=self._model)
        self._robots = [
            robot("robot-0", spec=rng.choice(list(SPECS)), writer="arm-0", spool=False),
            robot("robot-1", spec=rng.choice(list(SPECS)), writer="arm-1", spool=True),
            robot("robot-2", spec=rng.choice(list(SPECS)), writer="arm-2", spool=True),
            robot("twin", spec=rng.choice(list(SPECS)), writer="arm-0", spool=False),
        ]
        self._trainer = Trainer(world.root, self._model)
        self._machines: list[Machine] = [self._lab, *self._robots, self._trainer]

    # ---- the whole

    def live(self, operations: list[Operation]) -> None:
        for machine in self._machines:
            self.revive(machine)
        for operation in operations:
            self._note(f"{operation.number}: {operation.kind}")
            rng = random.Random(operation.seed)
            self._begin(operation.kind, rng)
            if self.problems:
                return
            if rng.random() < 0.3:
                self._wait(0.05 * rng.random())
            self._revive_failed(partial(self._chance, rng))
        self._finish()

    def _begin(self, kind: str, rng: random.Random) -> None:
        recorder = rng.choice([*self.local, *(robot.recorder for robot in self._robots)])
        machine = rng.choice(self._machines)
        robot = rng.choice(self._robots)
        spec = rng.choice(list(SPECS))
        link = self._world.network.link(rng.choice([*self._robots, self._trainer]).name)
        acts: dict[str, Callable[[], object]] = {
            "give": lambda: recorder.do(partial(recorder.give, rng.randint(1, 6))),
            "end": lambda: recorder.do(recorder.end),
            "cut": lambda: recorder.do(recorder.cut),
            "flush": lambda: recorder.do(recorder.flush),
            "deliver": lambda: robot.recorder.do(partial(robot.recorder.deliver, 5.0)),
            "sample": lambda: self._sampling.do(partial(self._work.sample, spec, rng.randint(0, 9))),
            "sample_again": lambda: self._sampling.do(partial(self._work.sample_again, rng)),
            "remote_sample": lambda: self._trainer.learner.do(partial(self._trainer.sample, spec, rng.randint(0, 9))),
            "publish": lambda: self._trainer.learner.do(self._trainer.publish),
            "look": lambda: robot.subscriber.do(robot.subscriber.look),
            "delete": lambda: self._operator.do(partial(self._work.edit, rng, "delete")),
            "restore": lambda: self._operator.do(partial(self._work.edit, rng, "restore")),
            "label": lambda: self._operator.do(partial(self._work.edit, rng, "label")),
            "retain": lambda: self._operator.do(partial(self._work.retain, rng.randint(0, 60))),
            "compact": lambda: self._operator.do(partial(self._work.compact, rng.choice((0.0, 0.3)))),
            "ask_for_edit": lambda: self._operator.do(partial(self._work.ask_for_edit, rng)),
            "back_up": lambda: self._operator.do(self._work.back_up),
            "restore_backup": lambda: self._restore_backup(rng),
            "check": self._check_now,
            "pause": lambda: self._wait(rng.choice((0.01, 0.1, 1.0, 30.0))),
            "kill": lambda: self._kill(machine),
            "power_cut": lambda: self._kill(machine, power_cut=rng.choice(("nothing", "some", "torn"))),
            "exit": lambda: self.exit(machine),
            "disk_fault": lambda: self._disk_fault(machine, rng),
            "disk_heal": machine.disk.heal,
            "slow_disk": lambda: machine.disk.fail(
                disk.SYNC | disk.WRITE, times=SLOW_CALLS, delay_s=rng.random() * SLOW_S
            ),
            "cut_link": lambda: self._world.network.cut(link_owner(self._world, link)),
            "stall_link": lambda: setattr(link, "stalled", True),
            "slow_link": lambda: setattr(link, "max_delay_s", rng.choice((0.5, 5.0))),
            "heal_link": link.heal,
            "clock": lambda: self._world.library.sim_jump(int(rng.choice((-1e6, -1, 1, 3600, 1e7)) * 1e9)),
        }
        acts[kind]()

    def errors(self) -> list[str]:
        """Exceptions that ended threads of processes that still run."""
        return [error for machine in self._machines if machine.process for error in machine.process.errors]

    def machine(self, name: str) -> Any:
        return next(machine for machine in self._machines if machine.name == name)

    def expect(self, good: bool, problem: str) -> None:
        if not good:
            self.problems.append(problem)

    def _chance(self, rng: random.Random) -> bool:
        return rng.random() < self._revive_chance

    def _wait(self, seconds: float) -> None:
        self._world.scheduler.sleep(seconds)

    def _note(self, text: str) -> None:
        self.log.append(f"{self._world.scheduler.now_ns / 1e9 - 1000:.6f} {text}")

    # ---- machines

    def _kill(self, machine: Machine, power_cut: Any = None) -> None:
        self._note(f"{machine.name} {'loses power, keeps ' + power_cut if power_cut else 'is killed'}")
        machine.kill(power_cut)

    def exit(self, machine: Machine) -> None:
        """End a process in the orderly way."""
        if not machine.up:
            return
        self._note(f"{machine.name} exits")
        self.inside(machine, partial(self._close, machine))
        machine.kill()

    def _close(self, machine: Machine) -> None:
        if isinstance(machine, Lab):
            machine.close()
        elif isinstance(machine, Robot) and machine.recorder.writer is not None:
            writer, machine.recorder.writer = machine.recorder.writer, None
            writer.close(timeout_s=2.0)

    def _revive_failed(self, chosen: Callable[[], bool] = lambda: True) -> bool:
        """Bring back machines that are down or whose process has failed; whether there were any."""
        failed = [one for one in self._machines if not one.up or (isinstance(one, Lab | Robot) and one.failed)]
        for machine in failed:
            if chosen():
                self.revive(machine)
        return bool(failed)

    def revive(self, machine: Machine) -> None:
        """Start a machine's process again, or replace one that has failed."""
        if machine.up and isinstance(machine, Lab | Robot) and machine.failed:
            self.exit(machine)
        if not machine.up:
            machine.start()
            self._work.reset()
        error = self.inside(machine, partial(self._open, machine))
        if error is not None:
            self._note(f"{machine.name} does not start: {error}")
            machine.kill()
            if machine.disk.faults == 0:
                self.problems.append(f"{machine.name} does not start: {error}")
            machine.disk.heal()

    def _open(self, machine: Machine) -> None:
        if isinstance(machine, Lab) and machine.store is None:
            store = machine.open()
            for recorder in self.local:
                recorder.began(store.writer(recorder.name, SPECS[recorder.spec], commit_steps=4))
        elif isinstance(machine, Robot) and machine.recorder.writer is None:
            machine.open()

    def inside(
        self, machine: Machine, act: Callable[[], object], *, timeout_s: float = HANGS_S
    ) -> UnderstudyError | None:
        """Do something in a machine's process; returns the product's error, if there was one."""
        outcome: list[UnderstudyError | None] = []

        def run() -> None:
            try:
                act()
            except UnderstudyError as error:
                outcome.append(error)
            else:
                outcome.append(None)

        process = machine.process
        assert process is not None
        task = self._world.scheduler.spawn(f"{machine.name}-main", process, run)
        if not self._world.scheduler.wait(lambda: task.finished, timeout_s):
            self.problems.append(f"{machine.name}: {act} hangs")
            self.log.append(self._world.scheduler.stacks())
        return outcome[0] if outcome else None

    def _disk_fault(self, machine: Machine, rng: random.Random) -> None:
        kinds = rng.choice((disk.CHANGES, disk.WRITE, disk.SYNC, disk.READ, disk.RENAME | disk.REMOVE | disk.CREATE))
        error = rng.choice((errno.EIO, errno.ENOSPC)) if kinds != disk.READ else errno.EIO
        times = rng.choice((1, 1, 1, 5, -1))
        half = kinds == disk.WRITE and rng.random() < 0.3
        where = rng.choice(("", "", "catalog", "segments", "parameters", "spool"))
        self._note(f"{machine.name}: disk fault {kinds} {errno.errorcode[error]} x {times}, half={half}, {where!r}")
        machine.disk.fail(kinds, where=where, skip=rng.randint(0, 40), times=times, error=error, half=half)

    def _restore_backup(self, rng: random.Random) -> None:
        """Everything is stopped, and a backup takes the place of the store."""
        if not self._work.backups:
            return
        for machine in self._machines:
            self._kill(machine)
        path, snapshot = rng.choice(self._work.backups)
        self._note(f"{path.name} becomes the store")
        self._world.library.sim_pause(1)
        shutil.rmtree(self._lab.path)
        shutil.copytree(path, self._lab.path)
        with Reader(self._lab.path) as reader:
            self._model.restored(reader, snapshot)
        self._world.library.sim_pause(0)

    # ---- checks

    def _check_now(self) -> None:
        """In the middle of a history, by a reader beside the writers."""
        if self._lab.store is not None and not self._lab.disk.faults:
            self._operator.do(self._read_all)

    def _read_all(self) -> None:
        if self._lab.store is None:
            return
        try:
            with Reader(self._lab.path) as reader:
                for record in reader.episodes("not purged"):
                    self.problems += self._model._row_problems(reader, record, int(record.info.seed or 0), {})
        except UnderstudyError as error:
            if not self._lab.disk.faults and "compaction" not in str(error):
                self.problems.append(f"a reader failed: {error}")

    def _deliver(self, robot: Robot) -> None:
        """Let a robot deliver all that it has, again after it has heard that its twin took its name."""
        self.inside(robot, partial(robot.recorder.deliver, DELIVERY_S), timeout_s=2 * DELIVERY_S)
        if robot.failed:
            self.revive(robot)
            self.inside(robot, partial(robot.recorder.deliver, DELIVERY_S), timeout_s=2 * DELIVERY_S)

    def _catch_up(self, robot: Robot) -> None:
        self.inside(robot, partial(robot.subscriber.catch_up, 120.0), timeout_s=200.0)

    def _finish(self) -> None:
        """Heal everything, let everything arrive, and compare with the model."""
        self._note("everything is healed")
        twin = self._robots.pop()
        twin.kill()
        self._machines.remove(twin)
        self._wait(2 * KEEPALIVE_S)  # until nothing of it is on its way any more
        for machine in self._machines:
            machine.disk.heal()
        for link in self._world.network.links.values():
            link.heal()
        actors = [actor for machine in self._machines for actor in machine.actors]
        deadline_ns = self._world.scheduler.now_ns + int(DELIVERY_S * 1e9)
        while self._revive_failed() or not all(actor.idle for actor in actors):
            self._wait(1.0)
            if self._world.scheduler.now_ns > deadline_ns:
                self.problems.append(f"never ends: {[actor.name for actor in actors if not actor.idle]}")
                return
        for robot in self._robots:
            self._deliver(robot)
        for robot in self._robots:
            self._catch_up(robot)
        for robot in self._robots:
            if robot.failed:  # it had nothing to deliver, so that it heard of its twin only when it was connected again
                self._deliver(robot)
                self._catch_up(robot)
            if robot.has_damage:
                for number in robot.recorder.numbers:
                    self._model.episodes[number].promised.clear()
            if not robot.has_delivered():
                self.problems.append(f"{robot.name} has not delivered: {robot.recorder.writer.delivery}")
            if robot.subscriber.last_version < self._model.last_version:
                self.problems.append(
                    f"{robot.name} has parameters {robot.subscriber.last_version}, not {self._model.last_version}"
                )
        if self.problems:
            self.log.append(self._world.scheduler.stacks())
        self.inside(self._lab, partial(self._work.sample_again, self._world.rng))
        for machine in self._machines:
            self.exit(machine)
        if self._model.asked:  # a store that opens carries out what was asked for
            self.revive(self._lab)
            self.exit(self._lab)
        self.problems += self._final_problems()
        if not self.problems and self._world.rng.random() < 0.3:
            self._world.library.sim_pause(1)
            self.problems += problems_after_damage(self._lab.path, self._model, self._world.rng)
            self._world.library.sim_pause(0)

    def _final_problems(self) -> Iterator[str]:
        for found in (self._work.problems, self._trainer.problems, *(r.subscriber.problems for r in self._robots)):
            yield from found
        try:
            with Reader(self._lab.path) as reader:
                yield from self._model.problems(reader)
            yield from verify(self._lab.path).problems
            for request in pending_edits(self._lab.path):
                yield f"{request} was never carried out"
            for path, _ in self._work.backups:
                yield from verify(path).problems
        except Exception:  # noqa: BLE001 (a finding)
            yield traceback.format_exc()


def link_owner(world: World, link: Any) -> str:
    return next(name for name, one in world.network.links.items() if one is link)
