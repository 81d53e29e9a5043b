"""World: the machines of a history. A lab with a store and its server, robots with spools, and a trainer.

All of it is product code. What it stands on is replaced here, in one place (`install`): threads, queues, executors and
the event loop (threads.py), gRPC's channel and server (network.py); files, clock and random numbers in machine.c.
"""

from __future__ import annotations

import asyncio
import queue
import random
import sqlite3
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tests.simulation import threads
from tests.simulation.disk import Disk, Kept
from tests.simulation.network import Network, SimulatedServer
from tests.simulation.threads import Process, Scheduler

import understudy.service  # noqa: F401 (all modules that `install` looks at)
from understudy.core import UnderstudyError
from understudy.replay import Store
from understudy.replay.read import gather
from understudy.service.client import connection
from understudy.service.client.remote import connect
from understudy.service.server import server as server_module
from understudy.service.server.server import Server, ServerConfig
from understudy.service.wire import grpc_forks

ADDRESS = "lab:7447"
SEGMENT_BYTES = 4096  # a few commits fill a segment
CHECKPOINT_PAGES = 30  # SQLite's own checkpoints, in the middle of commits, happen too

world: World = None  # type: ignore[assignment] # of the history that runs now


def install() -> None:
    """Put the simulated parts under the product code of this process."""
    for name, module in sorted(sys.modules.items()):
        if name.startswith("understudy."):
            names = vars(module)
            for attribute, real, simulated in (
                ("threading", threading, threads.THREADING),
                ("queue", queue, threads.QUEUE),
                ("ThreadPoolExecutor", ThreadPoolExecutor, threads.Executor),
            ):
                if names.get(attribute) is real:
                    names[attribute] = simulated
    vars(gather)["ThreadPoolExecutor"] = threads.InlineExecutor
    vars(server_module)["asyncio"] = SimpleNamespace(**{**vars(asyncio), "new_event_loop": threads.EventLoop})
    connection.Credentials.channel = lambda self, address: world.network.channel(address)
    grpc_forks.use = lambda owner: None  # nothing of gRPC is made here
    time.sleep = lambda seconds: threads.scheduler.sleep(seconds)
    sqlite3.connect = _connect
    sys.unraisablehook = lambda _: None  # coroutines of killed processes


_real_connect = sqlite3.connect


def _connect(*args: Any, **kwargs: Any) -> sqlite3.Connection:
    made = _real_connect(*args, **kwargs)
    if threads.scheduler.current is not None:
        world.connections.append((threads.scheduler.current.process, made))
    return made


class Actor:
    """Does one thing after the other in a process, beside other actors."""

    def __init__(self, machine: Machine, name: str):
        self._machine = machine
        self.name = name
        self._waiting: deque[Callable[[], object]] = deque()
        self._busy = False

    def do(self, act: Callable[[], object]) -> None:
        self._waiting.append(act)

    @property
    def idle(self) -> bool:
        return not self._waiting and not self._busy

    def run(self) -> None:
        self._busy = False
        self._waiting.clear()
        while True:
            threads.scheduler.wait(lambda: bool(self._waiting))
            self._busy = True
            self._waiting.popleft()()
            self._busy = False

    def stop(self) -> None:
        self._waiting.clear()
        self._busy = False


class Machine:
    """A machine with a disk and one process, which may be down."""

    def __init__(self, name: str, root: Path):
        self.name = name
        self.disk = Disk(world.library, root / name)
        self.process: Process | None = None
        self.actors: list[Actor] = []

    @property
    def up(self) -> bool:
        return self.process is not None

    def start(self) -> None:
        """Start the process: its actors wait for something to do."""
        self.process = Process(self.name)
        for actor in self.actors:
            world.scheduler.spawn(actor.name, self.process, actor.run)

    def kill(self, power_cut: Kept | None = None) -> None:
        """End the process at once; with `power_cut`, what it did not sync is lost as well."""
        process = self.process
        if process is None:
            return
        self.process = None
        process.alive = False
        world.errors += process.errors
        world.library.sim_down(self.disk.machine)
        world.network.server_died(process, silently=power_cut is not None)
        world.network.client_died(process)
        world.scheduler.wait(lambda: not world.scheduler.tasks_of(process))
        for owner, db in world.connections:
            if owner is process:
                with suppress(sqlite3.Error):
                    db.close()
        world.connections = [(owner, db) for owner, db in world.connections if owner is not process]
        for actor in self.actors:
            actor.stop()
        self.on_killed()
        if power_cut is not None:
            self.disk.power_cut(world.rng, power_cut)
        world.library.sim_up(self.disk.machine)

    def on_killed(self) -> None:
        pass


class Lab(Machine):
    """The machine with the store: its writing process, which also serves it."""

    def __init__(self, root: Path):
        super().__init__("lab", root)
        self.path = self.disk.directory / "store"
        self.store: Store | None = None
        self.server: Server | None = None
        self.keeper = Actor(self, "keeper")
        self.actors = [self.keeper]

    def open(self) -> Store:
        """Open the store and serve it; raises what the product raises."""
        store = Store.open(self.path, segment_bytes=SEGMENT_BYTES)
        try:
            store.catalog._db.execute(f"pragma wal_autocheckpoint = {CHECKPOINT_PAGES}")
            server = Server(store, ServerConfig())
        except BaseException:
            store.close()
            raise
        self.store, self.server = store, server
        process = self.process
        assert process is not None
        world.scheduler.spawn("serve", process, server._run)
        world.network.servers[ADDRESS] = SimulatedServer(server, server._loop, process)
        return store

    def close(self) -> None:
        """Stop serving and close the store."""
        world.network.servers.pop(ADDRESS, None)
        store, server, self.store, self.server = self.store, self.server, None, None
        if server is not None:
            server._loop.call_soon_threadsafe(server._loop.stop)
        if store is not None:
            store.close()

    @property
    def failed(self) -> bool:
        """Whether its store has stopped, so that `understudy serve` would end and be started again."""
        return self.store is not None and self.store._failure is not None

    def on_killed(self) -> None:
        self.store = self.server = None
        world.network.servers.pop(ADDRESS, None)


class World:
    """Everything that a history happens in."""

    def __init__(self, library: Any, root: Path, seed: int):
        self.library = library
        self.root = root
        self.rng = random.Random(seed)
        self.scheduler = Scheduler(library, random.Random(seed + 1))
        self.network = Network(random.Random(seed + 2))
        self.connections: list[tuple[Process, sqlite3.Connection]] = []
        self.errors: list[str] = []  # that ended a thread

    def remote(self) -> Any:
        return connect(ADDRESS)


def try_(act: Callable[[], Any]) -> UnderstudyError | None:
    """The error of the product with which a call ended, if it did."""
    try:
        act()
    except UnderstudyError as error:
        return error
    return None
