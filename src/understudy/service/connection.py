"""Connection: one server as a client sees it: address, token, certificate, and calls whose errors are ours."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc

from understudy.core import RefusedError, StoreClosedError
from understudy.service.protocol import TOKEN_KEY, error_of, from_json, method, to_json

CONNECT_TIMEOUT_S = 10.0
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

    def __init__(self, address: str, credentials: Credentials):
        self.address = address
        self._credentials = credentials
        self._channel = credentials.channel(address)

    def close(self) -> None:
        self._channel.close()

    def call(self, name: str, request: dict[str, Any], *, timeout_s: float = CONNECT_TIMEOUT_S) -> dict[str, Any]:
        """A small question and its answer; waits for the server up to the time-out."""
        try:
            answer = self._channel.unary_unary(method(name))(
                to_json(request), timeout=timeout_s, metadata=self._credentials.metadata, wait_for_ready=True
            )
        except grpc.RpcError as error:
            raise error_of(error, self.address) from None
        return from_json(answer)

    def upload(self, name: str, messages: Iterable[bytes], *, timeout_s: float | None) -> dict[str, Any]:
        """Many messages and one answer."""
        try:
            answer = self._channel.stream_unary(method(name))(
                iter(messages), timeout=timeout_s, metadata=self._credentials.metadata, wait_for_ready=True
            )
        except grpc.RpcError as error:
            raise error_of(error, self.address) from None
        return from_json(answer)

    def exchange(self, name: str, messages: Iterator[bytes]) -> Exchange:
        """Many messages each way. gRPC takes `messages` from a thread of its own."""
        try:
            call = self._channel.stream_stream(method(name))(messages, metadata=self._credentials.metadata)
        except ValueError:  # what gRPC says of a closed channel
            raise StoreClosedError(f"{self.address}: the connection is closed; close its writers before it") from None
        return Exchange(call, self.address)

    def listen(self, name: str, request: dict[str, Any]) -> Exchange:
        """One question and many answers."""
        return Exchange(
            self._channel.unary_stream(method(name))(to_json(request), metadata=self._credentials.metadata),
            self.address,
        )


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
