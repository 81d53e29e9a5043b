"""Shard: a store and its server, in a Ray actor on the node whose disk the store is on."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import ray

from understudy.cluster.ray_session import ClusterError
from understudy.cluster.roles.process import location
from understudy.core import StoreLockedError, UnderstudyError
from understudy.replay import Store
from understudy.service import Server, ServerConfig, keep_large_blocks
from understudy.training.runs.health import HEALTH, Health
from understudy.training.runs.rollback_to_checkpoint import rollback
from understudy.web.errors import ListenError

LOCK_TIMEOUT_S = 30.0  # for the process that had the store open to die
LOCK_RETRY_S = 0.5


@dataclass(frozen=True, kw_only=True)
class ShardInfo:
    """A shard as its own process sees it."""

    store: str  # its identity
    address: str
    commit: int
    steps: int


class ShardNotHereError(UnderstudyError):
    """A directory does not hold the store that was expected."""


@dataclass(frozen=True, kw_only=True)
class _Open:
    store: Store
    store_id: str
    server: Server
    health: Health


class ShardProcess:
    """One Ray actor."""

    def __init__(self, name: str, path: str, host: str | None, port: int, token: str, *, any_port: bool):
        self._name, self._path = name, Path(path)
        self._host, self._port, self._token = host, port, token
        self._any_port = any_port
        self._undo = ExitStack()
        self._opened: _Open | None = None

    def location(self) -> tuple[str, int]:
        return location()

    def open(self, expected: str | None, replaces: tuple[str, ...]) -> ShardInfo:
        """Serve the store. If one is expected, serve that one and no other. `replaces` names stores that were lost."""
        if expected is not None and not self._path.is_dir():
            raise ShardNotHereError(f"{self._path}: is not on this node")
        keep_large_blocks()
        try:
            self._opened = self._open(expected, replaces)
        except BaseException:
            self._undo.close()
            raise
        return self.poll()

    def _open(self, expected: str | None, replaces: tuple[str, ...]) -> _Open:
        store = self._undo.enter_context(self._open_store())
        with store.snapshot() as catalog:
            found = catalog.store_id
        if expected is not None and found != expected:
            raise ShardNotHereError(f"{self._path}: holds store {found}, expected {expected}")
        server = self._serve(store, replaces)
        health = self._undo.enter_context(Health(self._path / HEALTH, role="server", name=self._name))
        health.add(lambda: {"address": server.address, "commit": store.last_commit})
        return _Open(store=store, store_id=found, server=server, health=health)

    def _serve(self, store: Store, replaces: tuple[str, ...]) -> Server:
        """Serve at its port, which writers know; if that is taken and the user did not choose it, at another one."""
        host = self._host or ray.util.get_node_ip_address()
        config = ServerConfig(host=host, port=self._port, token=self._token, replaces=replaces)
        server = Server(store, config, on_request=self._on_request)
        try:
            return self._undo.enter_context(server)
        except ListenError:
            if not self._any_port:
                raise
        other = Server(store, replace(config, port=0), on_request=self._on_request)
        return self._undo.enter_context(other)

    def poll(self) -> ShardInfo:
        """How far the shard is; raises what ended its server."""
        assert self._opened is not None, "open comes first"
        store, server = self._opened.store, self._opened.server
        if server.failure is not None:
            raise server.failure
        with store.snapshot() as catalog:
            steps = sum(total.steps for total in catalog.episode_totals())
        self._opened.health.progress("serving")
        return ShardInfo(store=self._opened.store_id, address=server.address, commit=store.last_commit, steps=steps)

    def _open_store(self) -> Store:
        """Open the store; the process that had it may still be dying."""
        deadline = time.monotonic() + LOCK_TIMEOUT_S
        while True:
            try:
                return Store.open(self._path)
            except StoreLockedError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(LOCK_RETRY_S)

    def _on_request(self, kind: str, payload: Mapping[str, Any]) -> list[str]:
        """The request of learners beside those that every server answers: roll back what follows a checkpoint."""
        if kind != "rollback":
            raise ClusterError(f"{kind}: no such request; there is rollback")
        assert self._opened is not None
        store, commit = self._opened.store, int(payload["commit"])
        lines = []
        if store.last_commit < commit:
            lines.append(
                f"{self._name}: commits up to {commit} were lost with its disk; the run continues without them"
            )
            commit = 0
        with store.snapshot() as catalog:
            actors = {str(r.info.actor) for r in catalog.episodes("deleted is null and begun > ?", (commit,))}
        for actor in sorted(name for name in actors if name.startswith(payload["actors"])):
            lines += [f"{self._name}: {line}" for line in rollback(store, self._path, commit, actor)]
        return lines
