"""Remote: servers as a client sees them. One address, or several shards that share the writers out among them.

    remote = connect("shard-0=10.0.0.1:7447,shard-1=10.0.0.2:7447")
    writer = remote.writer("arm-1", spec, spool="spool/arm-1")
    remote.move("shard-1", "10.0.0.9:7447")

A shard's name outlives its address: what was sent and not acknowledged goes to the shard of that name, wherever it is
served now, and its store knows what it has. A shard without a name has its address for one.
"""

from __future__ import annotations

import logging
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import xxhash

from understudy.core import RefusedError, StepSpec, UnavailableError
from understudy.core.closing import Closes
from understudy.core.tree import Tree
from understudy.replay.read.view import View
from understudy.replay.sample.batch_source import Batch, Shape
from understudy.replay.sample.selectors import Selector, Uniform
from understudy.service.client.connection import CONNECT_TIMEOUT_S, GLANCE_S, LONGEST_PAUSE_S, Connection, Credentials
from understudy.service.client.outbox import Outbox, OutboxConfig
from understudy.service.client.remote_sampler import RemoteSampler
from understudy.service.client.remote_writer import RemoteWriter
from understudy.service.client.sharded_sampler import ShardedSampler
from understudy.service.client.spool import Spool, Stretch
from understudy.service.parameters import Subscription, encode_parameters, publish
from understudy.service.wire.batches import view_to_json
from understudy.service.wire.message import Buffer
from understudy.service.wire.protocol import REQUEST, STATUS

logger = logging.getLogger(__name__)


def connect(
    addresses: str | Sequence[str],
    *,
    token: str | None = None,
    token_file: str | Path | None = None,
    tls_cert: str | Path | None = None,
) -> Remote:
    """The servers at `addresses` ("host:port" or "name=host:port", or several with commas between). Nothing is sent
    until it is needed."""
    given = addresses.split(",") if isinstance(addresses, str) else list(addresses)
    places = [_name_and_address(text.strip()) for text in given if text.strip()]
    if not places:
        raise RefusedError(f"addresses: expected host:port, or several with commas between, got {addresses!r}")
    names = [name for name, _ in places]
    if len(set(names)) < len(names):
        raise RefusedError(f"addresses: expected each shard once, got {addresses!r}; give each a name of its own")
    if token_file is not None:
        token = read_token(Path(token_file))
    credentials = Credentials(token=token, tls_cert=None if tls_cert is None else Path(tls_cert))
    return Remote([Connection(address, credentials, name=name) for name, address in places])


def _name_and_address(text: str) -> tuple[str, str]:
    name, equals, address = text.rpartition("=")
    if ":" not in address or (equals and not name):
        raise RefusedError(
            f"addresses: expected host:port, or several with commas between, each perhaps with a name "
            f"(name=host:port), got {text!r}"
        )
    return name or address, address


def read_token(path: Path) -> str:
    """The token in a file, without the white space around it."""
    try:
        token = path.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise RefusedError(f"{path}: cannot be read ({error}); pass a file that holds the token") from None
    if not token.isascii() or not token.isprintable() or not token:
        raise RefusedError(f"{path}: expected a token of plain letters and digits on one line")
    return token


class Remote(Closes):
    """Connections to all shards. Use as a context manager, or call `close`."""

    def __init__(self, connections: Sequence[Connection]):
        self._connections = {connection.name: connection for connection in connections}  # replaced, never changed
        self._changing = threading.Lock()
        self._lost: list[Connection] = []
        self._version = 0  # published last
        self.unpublished: frozenset[str] = frozenset()  # shards that were away then

    # ---- where the shards are

    @property
    def names(self) -> tuple[str, ...]:
        """Of the shards, in the order in which they were given."""
        return tuple(self._connections)

    def address_of(self, name: str) -> str:
        return self._known(name).address

    def move(self, name: str, address: str) -> None:
        """A shard is served at another address from now on: its writers, samplers and subscriptions go on there."""
        connection = self._known(name)
        _, address = _name_and_address(address)
        if address != connection.address:
            logger.info("%s: moved from %s to %s", name, connection.address, address)
            connection.move(address)

    def forget(self, name: str) -> None:
        """A shard is gone for good: its writers move to others with what they have. Its samplers end."""
        with self._changing:
            connection = self._known(name)
            if len(self._connections) == 1:
                raise RefusedError(f"{name}: is the last shard, and something must keep the steps; add another first")
            self._connections = {other: c for other, c in self._connections.items() if other != name}
            self._lost.append(connection)
            self.unpublished -= {name}
        logger.warning("%s: forgotten; what it alone had is lost, and its writers go on elsewhere", name)
        connection.abandon()

    def away(self, *, timeout_s: float = GLANCE_S) -> dict[str, str]:
        """The shards that do not answer now, and why."""
        found = {name: connection.problem(timeout_s=timeout_s) for name, connection in self._connections.items()}
        return {name: problem for name, problem in found.items() if problem is not None}

    def wait_for_all(self, waiting: Callable[[str], None]) -> None:
        """Wait until all shards answer, wherever they are by then; `waiting` is told for whom, each time it looks."""
        while away := self.away():
            waiting(f"waiting for {', '.join(away)}")
            time.sleep(LONGEST_PAUSE_S)

    def connection(self, name: str) -> Connection:
        """To one of the shards."""
        return self._known(name)

    def _known(self, name: str) -> Connection:
        if name not in self._connections:
            raise RefusedError(f"{name}: no such shard; there are {', '.join(self._connections)}")
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
        """A writer of steps; a new one of the same name replaces the old. `spool` is a directory of its own on a local
        disk; what an earlier process left there is delivered first. Returns at once, whether a server is there or not.
        """
        incarnation = uuid.uuid4().hex
        place = Spool(None if spool is None else Path(spool))
        stretch = place.begin(name, incarnation, spec)
        outbox = Outbox(name, place, stretch, self._choose, config or OutboxConfig())
        return RemoteWriter(
            outbox, name, incarnation, spec, commit_steps=commit_steps, flush_each_episode=flush_each_episode
        )

    def _choose(self, stretch: Stretch, elsewhere: bool) -> Connection:
        """The shard of a stretch: where it went last, or the first in the order that its writer's name gives."""
        connections, order = self._connections, self.order_for(stretch.route.writer)
        before = stretch.route.shard  # a name, or an address that has got a name since
        names = [name for name, connection in connections.items() if before in (name, connection.address)]
        now = names[0] if names else order[0]
        if elsewhere:
            now = order[(order.index(now) + 1) % len(order)]
        return connections[now]

    def order_for(self, writer: str) -> list[str]:
        """The shards in the order in which a writer tries them. Every writer has its own, so that all get a share."""
        return sorted(self._connections, key=lambda name: xxhash.xxh3_64_intdigest(f"{writer}\n{name}".encode()))

    # ---- sampling

    def sampler(
        self,
        view: View,
        *,
        batch_size: int,
        seed: int = 0,
        shape: Shape[Batch] | None = None,
        selector: Selector | None = None,
        spec: int | StepSpec | None = None,
        rank: int = 0,
        world_size: int = 1,
        depth: int = 2,
    ) -> RemoteSampler[Batch]:
        """Batches from the only server; the options are those of Sampler, and `depth` batches are requested ahead."""
        if len(self._connections) > 1:
            raise RefusedError(
                f"there are {len(self._connections)} servers; draw from all of them with sharded_sampler"
            )
        return RemoteSampler(
            next(iter(self._connections.values())),
            view,
            batch_size=batch_size,
            seed=seed,
            shape=shape,
            selector=selector,
            spec=spec,
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
        shape: Shape[Batch] | None = None,
        selector: Callable[[], Selector] = Uniform,
        spec: int | StepSpec | None = None,
        max_wait_s: float = 60.0,
    ) -> ShardedSampler[Batch]:
        """Batches from all servers, in proportion to the steps of each. Servers that do not answer are done without; if
        none that answers has steps, `sample` raises UnavailableError after `max_wait_s`."""
        return ShardedSampler(
            self,
            view,
            batch_size=batch_size,
            seed=seed,
            shape=shape,
            selector=selector,
            spec=spec,
            max_wait_s=max_wait_s,
        )

    # ---- parameters

    def publish(
        self, tree: Tree, *, metadata: Mapping[str, str] | None = None, bfloat16: bool = False, timeout_s: float = 60.0
    ) -> int:
        """Send weights to all servers; returns their version when they have it on disk.

        Of several, those that are away do without (`unpublished` names them) until the next; if all are, it raises.
        """
        buffers = encode_parameters(tree, metadata or {}, bfloat16=bfloat16)
        connections = self._connections
        if len(connections) == 1:
            self._version = publish(next(iter(connections.values())), buffers, None, timeout_s)
            return self._version
        there = self._listening(connections)
        with ThreadPoolExecutor(max(len(there), 1)) as pool:
            send = partial(self._publish_to, buffers=buffers, version=self._version + 1, timeout_s=timeout_s)
            took = {c.name for c, done in zip(there, pool.map(send, there), strict=True) if done}
        if not took:
            raise UnavailableError(f"none of {', '.join(connections)} took the parameters; are they running?")
        missed = frozenset(connections) - took
        if missed - self.unpublished:
            logger.warning("not published to %s, which did not answer", ", ".join(sorted(missed)))
        self._version, self.unpublished = self._version + 1, missed
        return self._version

    def _listening(self, connections: Mapping[str, Connection]) -> list[Connection]:
        """Those to publish to. Whoever is new or was away is asked how far it is, so that no number is used again."""
        found = []
        for name, connection in connections.items():
            if self._version == 0 or name in self.unpublished:
                try:
                    said = connection.call(STATUS, {"views": []}, timeout_s=GLANCE_S, wait=False)
                except UnavailableError:
                    continue
                self._version = max(self._version, int(said["parameters_version"]))
            found.append(connection)
        return found

    @staticmethod
    def _publish_to(connection: Connection, buffers: Sequence[Buffer], version: int, timeout_s: float) -> bool:
        try:
            publish(connection, buffers, version, timeout_s, wait=False)
        except UnavailableError:
            return False
        return True

    def parameters(self, *, max_bytes: int = 4 * 2**30) -> Subscription:
        """The newest weights, from now on; `max_bytes` is the most that is taken. Of several servers it hears one, not
        the same for everybody, and another when that is away."""
        key = uuid.uuid4().hex

        def choose() -> list[Connection]:
            connections = self._connections
            return [connections[name] for name in self.order_for(key) if name in connections]

        return Subscription(choose, max_bytes=max_bytes)

    # ---- looking

    def status(self, views: Sequence[View] = (), *, timeout_s: float = CONNECT_TIMEOUT_S) -> dict[str, dict[str, Any]]:
        """What each server says of itself, by name, with the steps of each view; waits for those not there yet."""
        request = {"views": [view_to_json(view) for view in views]}
        return {name: shard.call(STATUS, request, timeout_s=timeout_s) for name, shard in self._connections.items()}

    def request(self, kind: str, payload: Any = None, *, timeout_s: float = CONNECT_TIMEOUT_S) -> Any:
        """Ask the first server something that whoever started it answers."""
        first = next(iter(self._connections.values()))
        return first.call(REQUEST, {"type": kind, "payload": payload}, timeout_s=timeout_s)["answer"]

    def close(self) -> None:
        for connection in [*self._connections.values(), *self._lost]:
            connection.close()
