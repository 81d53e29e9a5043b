"""Remote: servers as a client sees them. One address, or several that share the writers out among them.

remote = connect("127.0.0.1:7447")
writer = remote.writer("arm-1", spec, spool="spool/arm-1")
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import xxhash

from understudy.core import RefusedError, StepSpec
from understudy.core.tree import Tree
from understudy.replay.sampler import Shape
from understudy.replay.selectors import Selector, Uniform
from understudy.replay.view import View
from understudy.service.batches import view_to_json
from understudy.service.connection import CONNECT_TIMEOUT_S, Connection, Credentials
from understudy.service.outbox import Outbox, OutboxConfig
from understudy.service.parameters import Subscription, encode_parameters, publish
from understudy.service.protocol import REQUEST, STATUS
from understudy.service.remote_sampler import RemoteSampler
from understudy.service.remote_writer import RemoteWriter
from understudy.service.shards import ShardedSampler
from understudy.service.spool import Spool, Stretch


def connect(
    addresses: str | Sequence[str], *, token: str | None = None, token_file: str | Path | None = None,
    tls_cert: str | Path | None = None,
) -> Remote:  # fmt: skip
    """The servers at `addresses` ("host:port", or several with commas between). Nothing is sent until it is needed."""
    names = addresses.split(",") if isinstance(addresses, str) else list(addresses)
    names = [name.strip() for name in names if name.strip()]
    if not names or any(":" not in name for name in names):
        raise RefusedError(f"addresses: expected host:port, or several with commas between, got {addresses!r}")
    if token_file is not None:
        token = read_token(Path(token_file))
    credentials = Credentials(token=token, tls_cert=None if tls_cert is None else Path(tls_cert))
    return Remote([Connection(name, credentials) for name in names])


def read_token(path: Path) -> str:
    """The token in a file, without the white space around it."""
    try:
        token = path.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise RefusedError(f"{path}: cannot be read ({error}); pass a file that holds the token") from None
    if not token.isascii() or not token.isprintable() or not token:
        raise RefusedError(f"{path}: expected a token of plain letters and digits on one line")
    return token


class Remote:
    """Connections to all shards. Use as a context manager, or call `close`."""

    def __init__(self, connections: Sequence[Connection]):
        self._connections = {connection.address: connection for connection in connections}

    # ---- writing

    def writer(
        self, name: str, spec: StepSpec, *, spool: str | Path | None = None, commit_steps: int = 50,
        flush_each_episode: bool = True, config: OutboxConfig | None = None,
    ) -> RemoteWriter:  # fmt: skip
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
        order = self.order_for(stretch.route.writer)
        now = stretch.route.address if stretch.route.address in self._connections else order[0]
        if elsewhere:
            now = order[(order.index(now) + 1) % len(order)]
        return self._connections[now]

    def order_for(self, writer: str) -> list[str]:
        """The shards in the order in which a writer tries them. Every writer has its own, so that all get a share."""
        return sorted(self._connections, key=lambda address: xxhash.xxh3_64_intdigest(f"{writer}\n{address}".encode()))

    # ---- sampling

    def sampler(
        self, view: View, *, batch_size: int, seed: int = 0, shape: Shape | None = None,
        selector: Selector | None = None, spec: int | None = None, rank: int = 0, world_size: int = 1, depth: int = 2,
    ) -> RemoteSampler:  # fmt: skip
        """Batches from the one server there is; the options are those of Sampler, and `depth` batches come ahead."""
        if len(self._connections) > 1:
            raise RefusedError(
                f"there are {len(self._connections)} servers; draw from all of them with sharded_sampler"
            )
        return RemoteSampler(
            next(iter(self._connections.values())), view, batch_size=batch_size, seed=seed, shape=shape,
            selector=selector, spec=spec, rank=rank, world_size=world_size, depth=depth,
        )  # fmt: skip

    def sharded_sampler(
        self, view: View, *, batch_size: int, seed: int = 0, shape: Shape | None = None,
        selector: Callable[[], Selector] = Uniform, spec: int | None = None,
    ) -> ShardedSampler:  # fmt: skip
        """Batches from all servers, each giving in proportion to the steps it has."""
        samplers = {
            name: RemoteSampler(connection, view, batch_size=batch_size, seed=seed, shape=shape, selector=selector(),
                                spec=spec, depth=0)
            for name, connection in self._connections.items()
        }  # fmt: skip
        return ShardedSampler(samplers, batch_size=batch_size, seed=seed)

    # ---- parameters

    def publish(
        self, tree: Tree, *, metadata: Mapping[str, str] | None = None, bfloat16: bool = False, timeout_s: float = 60.0
    ) -> int:
        """Send weights to all servers; returns their version when all have it on disk."""
        buffers = encode_parameters(tree, metadata or {}, bfloat16=bfloat16)
        version = None
        for connection in self._connections.values():
            version = publish(connection, buffers, version, timeout_s)
        assert version is not None
        return version

    def parameters(self, *, max_bytes: int = 4 * 2**30) -> Subscription:
        """The newest weights, from now on; `max_bytes` is the most that is taken."""
        return Subscription(next(iter(self._connections.values())), max_bytes=max_bytes)

    # ---- looking

    def status(self, views: Sequence[View] = (), *, timeout_s: float = CONNECT_TIMEOUT_S) -> dict[str, dict[str, Any]]:
        """What each server says of itself, by address, with the steps of each view; waits for those not there yet."""
        request = {"views": [view_to_json(view) for view in views]}
        return {name: shard.call(STATUS, request, timeout_s=timeout_s) for name, shard in self._connections.items()}

    def request(self, kind: str, payload: Any = None, *, timeout_s: float = CONNECT_TIMEOUT_S) -> Any:
        """Ask the first server something that whoever started it answers."""
        first = next(iter(self._connections.values()))
        return first.call(REQUEST, {"type": kind, "payload": payload}, timeout_s=timeout_s)["answer"]

    def close(self) -> None:
        for connection in self._connections.values():
            connection.close()

    def __enter__(self) -> Remote:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
