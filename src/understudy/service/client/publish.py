"""Publishing weights: a learner sends one version to all servers under one number."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from understudy.core import UnavailableError
from understudy.service.client.connection import CONNECT_TIMEOUT_S, PROBE_TIMEOUT_S, Connection
from understudy.service.wire.message import Buffer, pieces, to_json
from understudy.service.wire.protocol import PUBLISH, STATUS

logger = logging.getLogger(__name__)


class Publisher:
    """Numbers the versions that one learner publishes, and knows which shards missed the last one.

    A single server numbers the versions itself. It is told the last number that it gave, because a server that was
    restored from a backup may not know it. Several servers get the number from here, so that all use the same.
    """

    def __init__(self) -> None:
        self._version = 0  # published last
        self._store_id: str | None = None  # of the single server that gave it
        self.unpublished: frozenset[str] = frozenset()  # shards that could not be reached then

    def publish(self, connections: Mapping[str, Connection], buffers: Sequence[Buffer], timeout_s: float) -> int:
        """Send a version; returns its number once at least one server has it on disk, else raises UnavailableError."""
        if len(connections) == 1:
            (connection,) = connections.values()
            hello: dict[str, Any] = {"version": None}
            if self._store_id is not None:  # a server that says which store it has knows these fields
                hello |= {"have": self._version, "store": self._store_id}
            answer = _upload(connection, hello, buffers, timeout_s, wait=True)
            self._version, self._store_id = int(answer["version"]), answer.get("store")
            return self._version
        reachable = self._reachable(connections)
        with ThreadPoolExecutor(max(len(reachable), 1)) as pool:
            send = partial(_try_to_publish, buffers=buffers, version=self._version + 1, timeout_s=timeout_s)
            sent = zip(reachable, pool.map(send, reachable), strict=True)
            published = {connection.name for connection, succeeded in sent if succeeded}
        if not published:
            raise UnavailableError(f"none of {', '.join(connections)} took the parameters; are they running?")
        missed = frozenset(connections) - published
        if missed - self.unpublished:
            logger.warning("not published to %s, which did not answer", ", ".join(sorted(missed)))
        self._version, self.unpublished = self._version + 1, missed
        return self._version

    def forget(self, name: str) -> None:
        """A shard was removed, so it no longer counts as one that missed a version."""
        self.unpublished -= {name}

    def _reachable(self, connections: Mapping[str, Connection]) -> list[Connection]:
        """The servers to publish to. One that is new or missed a version tells its own, so that no number is reused.

        A new one has time to connect over a slow link; one that is away costs each publication only a moment.
        """
        new = self._version == 0
        asked = [connection for name, connection in connections.items() if new or name in self.unpublished]
        with ThreadPoolExecutor(max(len(asked), 1)) as pool:
            limits_s = [PROBE_TIMEOUT_S if one.name in self.unpublished else CONNECT_TIMEOUT_S for one in asked]
            versions = dict(zip(asked, pool.map(newest_version, asked, limits_s), strict=True))
        self._version = max([self._version, *(version for version in versions.values() if version is not None)])
        return [one for one in connections.values() if versions.get(one, self._version) is not None]


def newest_version(connection: Connection, timeout_s: float) -> int | None:
    """The highest version that a server has given out; None if it does not answer in time."""
    try:
        status = connection.call(STATUS, {"views": []}, timeout_s=timeout_s, wait=False)
    except UnavailableError:
        return None
    return int(status["parameters_version"])


def _try_to_publish(connection: Connection, buffers: Sequence[Buffer], version: int, timeout_s: float) -> bool:
    try:
        publish(connection, buffers, version, timeout_s, wait=False)
    except UnavailableError:
        return False
    return True


def publish(
    connection: Connection, buffers: Sequence[Buffer], version: int | None, timeout_s: float, *, wait: bool = True
) -> int:
    """Send a version to one server; returns its number when the server has it on disk. None: the server numbers it."""
    return int(_upload(connection, {"version": version}, buffers, timeout_s, wait=wait)["version"])


def _upload(
    connection: Connection, hello: Mapping[str, Any], buffers: Sequence[Buffer], timeout_s: float, *, wait: bool
) -> dict[str, Any]:
    def messages() -> Iterator[bytes]:
        yield to_json(hello)
        yield from pieces(buffers)

    return connection.upload(PUBLISH, messages(), timeout_s=timeout_s, wait=wait)
