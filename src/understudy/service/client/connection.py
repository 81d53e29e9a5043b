"""Connection: one server as a client sees it: name, address, token, certificate, and calls whose errors are ours.

The name is the shard's and stays; the address is where it is served now, and may change while streams are open.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import grpc

from understudy.core import RefusedError, StoreClosedError, UnavailableError
from understudy.service.wire.protocol import STATUS, TOKEN_KEY, error_of, from_json, method, to_json

T = TypeVar("T")

CONNECT_TIMEOUT_S = 10.0
GLANCE_S = 1.0  # for an answer of a server that may be away
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.05, 1.0  # before another attempt, each twice as long as the one before

_OPTIONS = [
    ("grpc.max_send_message_length", -1),  # the server says what it takes, and the writer keeps to it
    ("grpc.max_receive_message_length", 16 * 2**20),
    ("grpc.keepalive_time_ms", 10_000),  # a link that is silently gone is noticed
    ("grpc.keepalive_timeout_ms", 15_000),
    ("grpc.http2.ping_timeout_ms", 15_000),  # this is the one that counts, and is a minute if not set
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 10_000),  # how long one attempt may take: a far or slow link needs seconds
    ("grpc.max_reconnect_backoff_ms", 1_000),
    ("grpc.use_local_subchannel_pool", 1),
]


@dataclass(frozen=True, kw_only=True)
class Credentials:
    """What a client shows and what it trusts. `tls_cert` is the server's certificate, or its issuer's."""

    token: str | None = field(default=None, repr=False)
    tls_cert: Path | None = None

    def channel(self, address: str) -> grpc.Channel:
        if self.tls_cert is None:
            return grpc.insecure_channel(address, options=_OPTIONS)
        try:
            root = self.tls_cert.read_bytes()
        except OSError as error:
            raise RefusedError(f"{self.tls_cert}: {error.strerror}; pass the server's certificate") from None
        return grpc.secure_channel(address, grpc.ssl_channel_credentials(root), options=_OPTIONS)

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        return () if self.token is None else ((TOKEN_KEY, f"Bearer {self.token}"),)


class Connection:
    """Calls to one server. Opens when first used, and again by itself; any thread may call."""

    def __init__(self, address: str, credentials: Credentials, *, name: str | None = None):
        self.name = address if name is None else name
        self.address = address
        self._credentials = credentials
        self._channel = credentials.channel(address)
        self._closed = self._abandoned = False
        self._moving = threading.Lock()

    def move(self, address: str) -> None:
        """The server is at another address now. Streams to the old one end as if it had died, and go on here."""
        with self._moving:
            if self._closed or address == self.address:
                return
            old, self._channel, self.address = self._channel, self._credentials.channel(address), address
        old.close()

    def close(self) -> None:
        with self._moving:
            self._closed = True
        self._channel.close()

    def abandon(self) -> None:
        """The server is gone for good: all calls fail, as to one that is away."""
        self._abandoned = True
        self.close()

    def call(
        self, name: str, request: dict[str, Any], *, timeout_s: float = CONNECT_TIMEOUT_S, wait: bool = True
    ) -> dict[str, Any]:
        """A small question and its answer; with `wait`, a server that is not there yet has until the time-out. A STATUS
        changes nothing, so one that was cut off is asked again."""
        deadline = time.monotonic() + timeout_s
        while True:
            channel = self._channel
            try:
                return from_json(
                    self._begin(
                        lambda channel: channel.unary_unary(method(name))(
                            to_json(request),
                            timeout=max(deadline - time.monotonic(), 0.001),
                            metadata=self._credentials.metadata,
                            wait_for_ready=wait,
                        )
                    )
                )
            except grpc.RpcError as error:
                moved = channel is not self._channel
                cut_off = wait and name == STATUS and error.code() is grpc.StatusCode.UNAVAILABLE
                if not (moved or cut_off) or time.monotonic() > deadline:
                    raise error_of(error, self.address) from None
                if cut_off:
                    time.sleep(FIRST_PAUSE_S)

    def problem(self, *, timeout_s: float = GLANCE_S) -> str | None:
        """Why it does not answer now; None if it does."""
        try:
            self.call(STATUS, {"views": []}, timeout_s=timeout_s, wait=False)
        except UnavailableError as error:
            return str(error)
        return None

    def upload(
        self, name: str, messages: Iterable[bytes], *, timeout_s: float | None, wait: bool = True
    ) -> dict[str, Any]:
        """Many messages and one answer."""
        try:
            answer = self._begin(
                lambda channel: channel.stream_unary(method(name))(
                    iter(messages), timeout=timeout_s, metadata=self._credentials.metadata, wait_for_ready=wait
                )
            )
        except grpc.RpcError as error:
            raise error_of(error, self.address) from None
        return from_json(answer)

    def exchange(self, name: str, messages: Iterator[bytes]) -> Exchange:
        """Many messages each way. gRPC takes `messages` from a thread of its own."""
        call = self._begin(
            lambda channel: channel.stream_stream(method(name))(messages, metadata=self._credentials.metadata)
        )
        return Exchange(call, self.address)

    def listen(self, name: str, request: dict[str, Any]) -> Exchange:
        """One question and many answers."""
        call = self._begin(
            lambda channel: channel.unary_stream(method(name))(to_json(request), metadata=self._credentials.metadata)
        )
        return Exchange(call, self.address)

    def _begin(self, call: Callable[[grpc.Channel], T]) -> T:
        """Begin a call on the channel there is; if that is closed because the server moved, on the new one."""
        while True:
            channel = self._channel
            try:
                return call(channel)
            except ValueError:  # what gRPC says of a closed channel
                if channel is not self._channel:
                    continue
                if self._abandoned:
                    raise UnavailableError(f"{self.name}: is gone for good; use the other shards") from None
                raise StoreClosedError(
                    f"{self.address}: the connection is closed; close its writers before it"
                ) from None


class Exchange:
    """The answers of a call that goes on, until it ends or is cancelled."""

    def __init__(self, call: Any, address: str):
        self._call = call
        self._address = address

    def __iter__(self) -> Iterator[bytes]:
        return self

    def __next__(self) -> bytes:
        try:
            return next(self._call)  # type: ignore[no-any-return]
        except grpc.RpcError as error:
            raise error_of(error, self._address) from None

    def cancel(self) -> None:
        self._call.cancel()
