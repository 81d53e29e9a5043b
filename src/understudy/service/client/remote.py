"""Remote: the client of one server, or of several shards among which the writers are distributed.

    remote = connect("shard-0=10.0.0.1:7447,shard-1=10.0.0.2:7447")
    writer = remote.writer("arm-1", spec, spool="spool/arm-1")
    remote.update_address("shard-1", "10.0.0.9:7447")

A shard keeps its name when its address changes: chunks that it has not acknowledged go to the shard of that name,
wherever it is served now, and its store knows which ones it has. Without a name, the address is the name.
"""

from __future__ import annotations

import logging
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import xxhash

from understudy.core import RefusedError, StepSpec
from understudy.core.closeable import Closeable
from understudy.core.resize import ResizeOption
from understudy.core.tree import Tree
from understudy.replay.read.view import View
from understudy.replay.sample.batch_source import Batch, BatchShape
from understudy.replay.sample.selectors import Selector, Uniform
from understudy.replay.write.writer import check_commit_steps
from understudy.service.client.connection import (
    CONNECT_TIMEOUT_S,
    MAX_BACKOFF_S,
    PROBE_TIMEOUT_S,
    Connection,
    Credentials,
)
from understudy.service.client.outbox import Outbox, OutboxConfig
from understudy.service.client.publish import Publisher, newest_version
from understudy.service.client.remote_sampler import RemoteSampler
from understudy.service.client.remote_writer import RemoteWriter
from understudy.service.client.sharded_sampler import ShardedSampler
from understudy.service.client.spool import Spool, SpoolLog
from understudy.service.client.subscription import Subscription
from understudy.service.wire.batches import view_to_json
from understudy.service.wire.parameters import encode_parameters
from understudy.service.wire.protocol import COMPACT, REQUEST, STATUS
from understudy.web.tokens import read_token

logger = logging.getLogger(__name__)

COMPACT_TIMEOUT_S = 24 * 3600.0  # a large store is rewritten in hours


def connect(
    addresses: str | Sequence[str],
    *,
    token: str | None = None,
    token_file: str | Path | None = None,
    tls_cert: str | Path | None = None,
) -> Remote:
    """A client of the servers at `addresses`: "host:port" or "name=host:port", or several with commas between.

    It connects when it is first used; `unreachable` says at once which servers do not answer.
    """
    given = addresses.split(",") if isinstance(addresses, str) else list(addresses)
    shards = [_name_and_address(text.strip()) for text in given if text.strip()]
    if not shards:
        raise RefusedError(
            f"addresses: expected host:port or name=host:port, or several with commas between, got {addresses!r}"
        )
    names = [name for name, _ in shards]
    if len(set(names)) < len(names):
        raise RefusedError(f"addresses: expected each shard once, got {addresses!r}; give each another name")
    if token_file is not None:
        token = read_token(Path(token_file))
    credentials = Credentials(token=token, tls_cert=None if tls_cert is None else Path(tls_cert))
    return Remote([Connection(address, credentials, name=name) for name, address in shards])


def _name_and_address(text: str) -> tuple[str, str]:
    name, equals, address = text.rpartition("=")
    scheme, separator, rest = address.partition("://")
    if separator and scheme.lower() in ("http", "https", "grpc"):
        raise RefusedError(
            f"addresses: expected HOST:PORT, without {scheme}://, got {text!r}; pass {rest.rstrip('/')!r}"
        )
    if ":" not in address or (equals and not name):
        raise RefusedError(
            f"addresses: expected host:port or name=host:port, or several with commas between, got {text!r}"
        )
    return name or address, address


class Remote(Closeable):
    """The client of all shards. Use as a context manager, or call `close`."""

    def __init__(self, connections: Sequence[Connection]):
        self._connections = {
            connection.name: connection for connection in connections
        }  # replaced as a whole, so that threads need no lock
        self._changing = threading.Lock()
        self._removed: list[Connection] = []
        self._publisher = Publisher()

    # ---- shards

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the shards, in the order in which they were given."""
        return tuple(self._connections)

    def address_of(self, name: str) -> str:
        return self.connection(name).address

    def update_address(self, name: str, address: str) -> None:
        """A shard is served at another address now: its writers, samplers and subscriptions continue there."""
        connection = self.connection(name)
        _, address = _name_and_address(address)
        if address != connection.address:
            logger.info("%s: moved from %s to %s", name, connection.address, address)
            connection.update_address(address)

    def remove_shard(self, name: str) -> None:
        """A shard is lost for good: its writers continue with other shards, and its samplers fail."""
        with self._changing:
            connection = self.connection(name)
            if len(self._connections) == 1:
                raise RefusedError(f"{name}: is the only shard, and writers need one; connect to another first")
            self._connections = {other: c for other, c in self._connections.items() if other != name}
            self._removed.append(connection)
            self._publisher.forget(name)
        logger.warning("%s: removed; steps that only it had are lost, and its writers continue with other shards", name)
        connection.abandon()

    def unreachable(self, *, timeout_s: float = PROBE_TIMEOUT_S) -> dict[str, str]:
        """The shards that do not answer now, each with the reason."""
        found = {name: connection.problem(timeout_s=timeout_s) for name, connection in self._connections.items()}
        return {name: problem for name, problem in found.items() if problem is not None}

    def wait_until_reachable(self, on_wait: Callable[[str], None]) -> None:
        """Wait until all shards answer; after each attempt, `on_wait` gets a text that names those that do not."""
        while missing := self.unreachable():
            on_wait(f"waiting for {', '.join(missing)}")
            time.sleep(MAX_BACKOFF_S)

    def connection(self, name: str) -> Connection:
        """The connection to one shard."""
        if name not in self._connections:
            raise RefusedError(f"{name}: expected the name of a shard, one of {', '.join(self._connections)}")
        return self._connections[name]

    # ---- writing

    def writer(
        self,
        name: str,
        spec: StepSpec,
        *,
        spool: str | Path | None = None,
        commit_steps: int = 50,
        flush_each_episode: bool = True,
        config: OutboxConfig | None = None,
    ) -> RemoteWriter:
        """A writer of steps; a new one of the same name replaces the old one. Returns at once, without a server too.

        `spool` is a directory on a local disk for this writer alone. What an earlier process left there is delivered
        first.
        """
        check_commit_steps(commit_steps)
        incarnation = uuid.uuid4().hex
        opened = Spool(None if spool is None else Path(spool))
        log = opened.begin(name, incarnation, spec)
        outbox = Outbox(name, opened, log, self._choose_shard, config or OutboxConfig())
        return RemoteWriter(
            outbox, name, incarnation, spec, commit_steps=commit_steps, flush_each_episode=flush_each_episode
        )

    def _choose_shard(self, log: SpoolLog, *, skip_current: bool = False) -> Connection:
        """The shard that a log went to last, else the first in its writer's order; or the one after that."""
        connections, order = self._connections, self.shard_order(log.route.writer)
        before = log.route.shard  # a name, or the address of a shard that had no name then
        names = [name for name, connection in connections.items() if before in (name, connection.address)]
        chosen = names[0] if names else order[0]
        if skip_current:
            chosen = order[(order.index(chosen) + 1) % len(order)]
        return connections[chosen]

    def shard_order(self, writer: str) -> list[str]:
        """The shards in the order in which a writer tries them. It differs by writer, so that shards share the load."""
        return sorted(self._connections, key=lambda name: xxhash.xxh3_64_intdigest(f"{writer}\n{name}".encode()))

    # ---- sampling

    def sampler(
        self,
        view: View,
        *,
        batch_size: int,
        seed: int = 0,
        shape: BatchShape[Batch] | None = None,
        selector: Selector | None = None,
        spec: int | StepSpec | None = None,
        resize: ResizeOption | None = None,
        rank: int = 0,
        world_size: int = 1,
        depth: int = 2,
    ) -> RemoteSampler[Batch]:
        """A sampler over a single server. The options are those of Sampler; `depth` batches are requested ahead."""
        if len(self._connections) > 1:
            raise RefusedError(
                f"expected one server, got {len(self._connections)}; sample from all of them with sharded_sampler"
            )
        return RemoteSampler(
            next(iter(self._connections.values())),
            view,
            batch_size=batch_size,
            seed=seed,
            shape=shape,
            selector=selector,
            spec=spec,
            resize=resize,
            rank=rank,
            world_size=world_size,
            depth=depth,
        )

    def sharded_sampler(
        self,
        view: View,
        *,
        batch_size: int,
        seed: int = 0,
        shape: BatchShape[Batch] | None = None,
        selector: Callable[[], Selector] = Uniform,
        spec: int | StepSpec | None = None,
        resize: ResizeOption | None = None,
        max_wait_s: float = 60.0,
    ) -> ShardedSampler[Batch]:
        """A sampler over all servers; each contributes in proportion to its number of steps.

        It does without servers that cannot be reached. If no other one has steps, `sample` raises UnavailableError
        after `max_wait_s`.
        """
        return ShardedSampler(
            self,
            view,
            batch_size=batch_size,
            seed=seed,
            shape=shape,
            selector=selector,
            spec=spec,
            resize=resize,
            max_wait_s=max_wait_s,
        )

    # ---- parameters

    def publish(
        self, tree: Tree, *, metadata: Mapping[str, str] | None = None, bfloat16: bool = False, timeout_s: float = 60.0
    ) -> int:
        """Send weights to all servers; returns their version once they are on disk there.

        Of several servers, those that cannot be reached are skipped until the next call (`unpublished` names them). If
        none can be reached, this raises UnavailableError.
        """
        buffers = encode_parameters(tree, metadata or {}, bfloat16=bfloat16)
        return self._publisher.publish(self._connections, buffers, timeout_s)

    @property
    def unpublished(self) -> frozenset[str]:
        """The shards that missed the last published version because they could not be reached."""
        return self._publisher.unpublished

    def newest_version(self, *, timeout_s: float = PROBE_TIMEOUT_S) -> int | None:
        """The highest version that the servers have given out, 0 before the first; None if one that does not answer
        may have given out a first version.
        """
        asked = [newest_version(shard, timeout_s) for shard in self._connections.values()]
        versions = [version for version in asked if version is not None]
        newest = max(versions, default=0)
        return newest if newest or len(versions) == len(self._connections) else None

    def parameters(self, *, max_bytes: int = 4 * 2**30) -> Subscription:
        """A subscription to the newest weights; larger ones than `max_bytes` are refused.

        Of several servers it reads from one, and from another when that one cannot be reached.
        """
        key = uuid.uuid4().hex

        def choose_servers() -> list[Connection]:
            connections = self._connections
            return [connections[name] for name in self.shard_order(key) if name in connections]

        return Subscription(choose_servers, max_bytes=max_bytes)

    # ---- status and requests

    def status(self, views: Sequence[View] = (), *, timeout_s: float = CONNECT_TIMEOUT_S) -> dict[str, dict[str, Any]]:
        """The status of each server by name, with the size of each view; waits for servers that are not up."""
        request = {"views": [view_to_json(view) for view in views]}
        return {name: shard.call(STATUS, request, timeout_s=timeout_s) for name, shard in self._connections.items()}

    def compact(
        self,
        *,
        min_dead: float = 0.3,
        max_steps: Mapping[str, int | None] | None = None,
        preview: bool = False,
        timeout_s: float = COMPACT_TIMEOUT_S,
    ) -> dict[str, dict[str, Any]]:
        """Give back the disk space of deleted episodes of each server's store; what each one removed, by name.

        With `max_steps`, by kind of episode, the oldest ones beyond it are deleted first. With `preview`, nothing is
        removed, and the answers say what would be.
        """
        request = {"min_dead": min_dead, "max_steps": dict(max_steps or {}), "preview": preview}
        return {name: shard.call(COMPACT, request, timeout_s=timeout_s) for name, shard in self._connections.items()}

    def request(self, kind: str, payload: Any = None, *, timeout_s: float = CONNECT_TIMEOUT_S) -> Any:
        """Send a request to the first server; the `on_request` callback of its program answers it."""
        first = next(iter(self._connections.values()))
        return first.call(REQUEST, {"type": kind, "payload": payload}, timeout_s=timeout_s)["answer"]

    def close(self) -> None:
        for connection in [*self._connections.values(), *self._removed]:
            connection.close()
