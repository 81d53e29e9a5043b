"""Shard: a store and its server, in a Ray actor on the node whose disk it is on; and who keeps all of them going.

A shard that dies is opened again where it was. If its node is gone for good, its store is looked for on the disks of
the others (a volume that moved with it, a disk that several nodes see). If nobody has it, it is lost, with all that was
acknowledged there; an empty one takes its place and its name, and the run says so for ever.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from understudy.cluster.config import ClusterConfig
from understudy.cluster.ray_session import ClusterError, nodes_with, options
from understudy.cluster.status import Event, NodeNow, RoleNow, RoleState, ShardNow
from understudy.core import UnderstudyError
from understudy.durable import files
from understudy.replay import Store
from understudy.service import Server, ServerConfig, keep_large_blocks
from understudy.training.runs.health import HEALTH, Health
from understudy.training.runs.rollback_to_checkpoint import rollback

logger = logging.getLogger(__name__)

BOOK = "shards.json"  # in the run: which store each shard is, and where it was served last
LOCKED_S = 30.0  # for a process that had the store open to die
LOOK_S = 2.0
PAUSE_S = 1.0  # before one is opened again


@dataclass(frozen=True, kw_only=True)
class ShardFacts:
    """A shard as its own process knows it."""

    store: str  # its identity
    address: str
    commit: int
    steps: int
    pid: int


class NotHere(UnderstudyError):
    """A directory that does not hold the store that was expected."""


class ShardWorker:
    """One Ray actor."""

    def __init__(self, name: str, path: str, host: str | None, port: int, token: str):
        self._name, self._path = name, Path(path)
        self._host, self._port, self._token = host, port, token
        self._undo = ExitStack()

    def open(self, expected: str | None, replaces: tuple[str, ...]) -> ShardFacts:
        """Serve the store, in the place of those that were lost; if one is expected, that one and no other."""
        if expected is not None and not self._path.is_dir():
            raise NotHere(f"{self._path}: is not on this node")
        keep_large_blocks()
        self._store = self._undo.enter_context(self._open_store())
        with self._store.snapshot() as catalog:
            found = catalog.store_id
        if expected is not None and found != expected:
            self._undo.close()
            raise NotHere(f"{self._path}: holds store {found}, expected {expected}")
        config = ServerConfig(
            host=self._host or ray.util.get_node_ip_address(), port=self._port, token=self._token, replaces=replaces
        )
        self._server = self._undo.enter_context(Server(self._store, config, on_request=self._answer))
        health = self._undo.enter_context(Health(self._path / HEALTH, role="server", name=self._name))
        health.add(lambda: {"address": self._server.address, "commit": self._store.last_commit})
        self._health, self._id = health, found
        return self.look()

    def look(self) -> ShardFacts:
        if self._server.failure is not None:
            raise self._server.failure
        with self._store.snapshot() as catalog:
            steps = sum(total.steps for total in catalog.episode_totals())
        self._health.progress("serving")
        return ShardFacts(
            store=self._id, address=self._server.address, commit=self._store.last_commit, steps=steps, pid=os.getpid()
        )

    def _open_store(self) -> Store:
        """The process that had it may be dying still."""
        deadline = time.monotonic() + LOCKED_S
        while True:
            try:
                return Store.open(self._path)
            except UnderstudyError as error:
                if "process" not in str(error) or time.monotonic() > deadline:
                    raise
                time.sleep(0.5)

    def _answer(self, kind: str, payload: Any) -> Any:
        """What learners ask beside what every server answers."""
        if kind != "rollback":
            raise ClusterError(f"{kind}: no such question; there is rollback")
        commit = int(payload["commit"])
        if self._store.last_commit < commit:
            lost, commit = f"{self._name}: commits to {commit} were lost with its disk; the run goes on without", 0
        else:
            lost = ""
        with self._store.snapshot() as catalog:
            actors = {r.info.actor for r in catalog.episodes("deleted is null and begun > ?", (commit,))}
        mine = sorted(str(actor) for actor in actors if str(actor).startswith(payload["actors"]))
        said = [f"{self._name}: {line}" for actor in mine for line in rollback(self._store, self._path, commit, actor)]
        return ([lost] if lost else []) + said


# ---- whoever keeps them going


@dataclass(eq=False)
class _Shard:
    name: str
    path: str
    store: str | None = None  # its identity, once it is known
    replaces: tuple[str, ...] = ()  # those that were lost before it
    handle: Any = None
    call: Any = None
    called: float = 0.0
    state: RoleState = "starting"
    node: str | None = None
    pid: int | None = None
    home: str = ""  # the address of the node that it was on last
    facts: ShardFacts | None = None
    restarts: int = 0
    since_s: float = 0.0
    gone_s: float = 0.0  # when it was last seen up
    tried: tuple[str, ...] = ()  # nodes that do not have it
    lost_steps: int = 0
    error: str | None = None
    not_before: float = 0.0


class ShardKeeper:
    """Places shards, opens them again, and knows where they are."""

    def __init__(self, run: Path, place: ClusterConfig, *, token: str, loopback: bool):
        self.events: list[Event] = []
        self.num_restarts = 0
        self._run, self._place, self._token = run, place, token
        self._host = "127.0.0.1" if loopback else None
        root = Path(place.shard_dir) / run.resolve().name if place.shard_dir else run.resolve() / "shards"
        self._shards = [_Shard(f"shard-{index}", str(root / f"shard-{index}")) for index in range(place.shards.num)]
        self._ports = {
            one.name: place.shards.port + index if place.shards.port else 0 for index, one in enumerate(self._shards)
        }
        self._read_book()

    @property
    def addresses(self) -> dict[str, str]:
        """Where each is served, or was last."""
        return {one.name: one.facts.address for one in self._shards if one.facts is not None}

    @property
    def up(self) -> bool:
        return all(one.state == "up" for one in self._shards)

    def shards_now(self) -> list[ShardNow]:
        return [
            ShardNow(
                name=one.name,
                node=one.node or "",
                address=one.facts.address if one.facts else "",
                path=one.path,
                state="up" if one.state == "up" else "gone",
                steps=one.facts.steps if one.facts else 0,
                commit=one.facts.commit if one.facts else 0,
                lost_steps=one.lost_steps,
            )
            for one in self._shards
        ]

    def roles(self) -> list[RoleNow]:
        return [
            RoleNow(
                role="shard",
                name=one.name,
                state=one.state,
                node=one.node,
                pid=one.pid,
                doing="serving",
                since_s=one.since_s,
                restarts=one.restarts,
                error=one.error,
            )
            for one in self._shards
        ]

    def start(self) -> None:
        """Wait until all are up."""
        deadline = time.monotonic() + self._place.room_s
        while not self.up:
            self.step()
            if failed := [one for one in self._shards if one.facts is None and one.restarts > 2]:
                raise ClusterError(f"{failed[0].name}: cannot be opened: {failed[0].error}")
            if time.monotonic() > deadline:
                late = "; ".join(f"{one.name}: {one.error or one.state}" for one in self._shards if one.state != "up")
                raise ClusterError(f"shards: not up within {self._place.room_s:g} s ({late}); is there room for them?")
            time.sleep(0.05)

    def step(self) -> None:
        """Look after all of them; returns at once."""
        alive = nodes_with(self._place.shards.shape())
        for index, shard in enumerate(self._shards):
            if shard.handle is None and time.monotonic() >= shard.not_before:
                self._place_again(shard, index, alive)
            elif shard.handle is not None and shard.call is None and time.monotonic() - shard.called > LOOK_S:
                shard.call, shard.called = shard.handle.look.remote(), time.monotonic()
        waiting = [shard for shard in self._shards if shard.call is not None]
        ready, _ = ray.wait([one.call for one in waiting], num_returns=len(waiting), timeout=0) if waiting else ([], [])
        for shard in waiting:
            if shard.call in ready:
                self._hear(shard)
            elif shard.state == "up" and time.monotonic() - shard.called > self._place.silent_s:
                self._lost(shard, f"did not answer for {self._place.silent_s:g} s")

    def close(self) -> None:
        for shard in self._shards:
            if shard.handle is not None:
                ray.kill(shard.handle)
                shard.handle = shard.call = None

    # ---- steps of it

    def _place_again(self, shard: _Shard, index: int, alive: Sequence[NodeNow]) -> None:
        """On the node that has its disk; if that is gone for too long, wherever its store can be found."""
        if not alive:
            return
        homes = [node for node in alive if node.id == shard.node] or [n for n in alive if n.address == shard.home]
        homes = [node for node in homes if node.id not in shard.tried]
        if not homes and shard.store is None:
            homes = [alive[index % len(alive)]]
        if not homes:
            if shard.facts is not None and time.time() - shard.gone_s < self._place.shard_away_s:
                return
            homes = [node for node in alive if node.id not in shard.tried]
        if not homes:
            self._declare_lost(shard)
            return
        node = homes[0]
        strategy = NodeAffinitySchedulingStrategy(node_id=node.id, soft=False)
        shape = options(self._place.shards, threads=8, scheduling_strategy=strategy)
        shard.handle = (
            ray.remote(ShardWorker)
            .options(**shape)
            .remote(shard.name, shard.path, self._host, self._ports[shard.name], self._token)
        )
        shard.state, shard.node, shard.home = "starting", node.id, node.address
        shard.called = time.monotonic()
        shard.call = shard.handle.open.remote(shard.store, shard.replaces)

    def _hear(self, shard: _Shard) -> None:
        call, shard.call = shard.call, None
        try:
            facts: ShardFacts = ray.get(call)
        except RayTaskError as error:
            if isinstance(error.cause, NotHere):
                assert shard.node is not None
                shard.tried = (*shard.tried, shard.node)
                self._drop(shard, str(error.cause))
            else:
                self._lost(shard, f"failed: {error.cause or error}")
            return
        except RayError as error:
            self._lost(shard, f"died ({str(error).partition(chr(10))[0]})")
            return
        came = shard.state != "up"
        shard.facts, shard.state, shard.error, shard.tried = facts, "up", None, ()
        shard.gone_s = time.time()
        if came:
            shard.since_s = time.time()
            shard.store = facts.store
            self._ports[shard.name] = int(facts.address.rpartition(":")[2])
            shard.pid = facts.pid
            if shard.restarts:
                text = f"{shard.name} is served at {facts.address} again, with {facts.steps} steps"
                self.events.append(Event(what="shard back", name=shard.name, text=text))
            self._write_book()

    def _lost(self, shard: _Shard, why: str) -> None:
        logger.warning("%s %s", shard.name, why)
        text = f"{shard.name} {why}; it is opened again where its disk is"
        self.events.append(Event(what="worker lost", name=shard.name, text=text))
        shard.restarts += 1
        self.num_restarts += 1
        self._drop(shard, why)

    def _drop(self, shard: _Shard, why: str) -> None:
        ray.kill(shard.handle)
        shard.handle = shard.call = None
        shard.state, shard.error = "gone", why
        shard.not_before = time.monotonic() + PAUSE_S

    def _declare_lost(self, shard: _Shard) -> None:
        """No node has its store."""
        if shard.facts is None:
            raise ClusterError(
                f"{shard.name}: its store was at {shard.home}:{shard.path}, and no node has it; start Ray on the node "
                f"with that disk, or take {shard.name} out of {self._run / BOOK} to go on without its steps"
            )
        steps = shard.facts.steps
        text = (
            f"{shard.name} is lost: no node has {shard.path}, so {steps} acknowledged steps are gone until that disk "
            f"is back (then: `understudy serve {shard.path}` or `understudy info`); an empty shard takes its place"
        )
        logger.error("%s", text)
        self.events.append(Event(what="shard lost", name=shard.name, text=text))
        shard.lost_steps += steps
        shard.replaces = (*shard.replaces, shard.facts.store)
        shard.store, shard.tried, shard.node = None, (), None

    # ---- for the next driver

    def _read_book(self) -> None:
        try:
            said: dict[str, Any] = json.loads((self._run / BOOK).read_text())
        except FileNotFoundError:
            return
        except ValueError as error:
            raise ClusterError(f"{self._run / BOOK}: is not JSON ({error}); restore it") from None
        names = {shard.name for shard in self._shards}
        if more := sorted(said.keys() - names):
            raise ClusterError(
                f"shards: this run has {', '.join(more)} too, got {len(names)}; use --place.shards.num {len(said)}"
            )
        for shard in self._shards:
            if shard.name in said:
                one = said[shard.name]
                shard.store, shard.path, shard.home = one["store"], one["path"], one["home"]
                shard.lost_steps, shard.replaces = int(one["lost_steps"]), tuple(one.get("replaces", ()))

    def _write_book(self) -> None:
        said = {
            one.name: {
                "store": one.store,
                "path": one.path,
                "home": one.home,
                "lost_steps": one.lost_steps,
                "replaces": one.replaces,
            }
            for one in self._shards
            if one.store is not None
        }
        files.write_durably(self._run / BOOK, json.dumps(said, indent=1).encode())
