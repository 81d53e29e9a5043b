"""Connection: calls to one server. gRPC's errors become errors of understudy.core.

A shard keeps its name. Its address is where it is served now, and may change while streams are open. A forked process
can use neither the connections of its parent nor gRPC itself, if the parent had one open (wire/grpc_forks.py).
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import grpc

from understudy.core import RefusedError, StoreClosedError, UnavailableError
from understudy.processes import forks
from understudy.service.wire import grpc_forks
from understudy.service.wire.message import from_json, to_json
from understudy.service.wire.protocol import STATUS, TOKEN_KEY, error_of, method

logger = logging.getLogger(__name__)

T = TypeVar("T")

CONNECT_TIMEOUT_S = 10.0
CUT_OFF = {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED}  # cancelled: it began while the server was ending
PROBE_TIMEOUT_S = 1.0  # for the status of a server that may be unreachable
MIN_BACKOFF_S, MAX_BACKOFF_S = 0.05, 1.0  # before another attempt; each pause is twice the one before

_OPTIONS = [
    ("grpc.max_send_message_length", -1),  # the server announces its limit, and the writer keeps to it
    ("grpc.max_receive_message_length", 16 * 2**20),
    ("grpc.keepalive_time_ms", 10_000),  # notices a link that broke without a word
    ("grpc.keepalive_timeout_ms", 15_000),
    ("grpc.http2.ping_timeout_ms", 15_000),  # the effective one; its default is a minute
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 10_000),  # the length of one attempt: a slow link needs seconds
    ("grpc.max_reconnect_backoff_ms", 1_000),
    ("grpc.use_local_subchannel_pool", 1),
]


@dataclass(frozen=True, kw_only=True)
class Credentials:
    """The token that a client sends, and the certificate that it trusts: the server's own, or its issuer's."""

    token: str | None = field(default=None, repr=False)
    tls_cert: Path | None = None

    def channel(self, address: str) -> grpc.Channel:
        grpc_forks.check()
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
    """Calls to one server. It connects when first used, and reconnects by itself; any thread may call."""

    def __init__(self, address: str, credentials: Credentials, *, name: str | None = None):
        self.name = address if name is None else name
        self.address = address
        self._credentials = credentials
        grpc_forks.use(self)
        self._channel = credentials.channel(address)
        self._closed = self._abandoned = self._forked = False
        self._answered = self._said_absent = False  # since it was last unreachable
        self._address_lock = threading.Lock()
        forks.register(self)

    def after_fork_in_child(self) -> None:
        self._address_lock = threading.Lock()
        if not self._closed:
            forks.leave_to_parent(self._channel)
            self._closed = self._forked = True

    def _check_process(self) -> None:
        if self._forked:
            raise forks.forked_error(f"{self.address}: the connection", grpc_forks.ADVICE)

    def update_address(self, address: str) -> None:
        """Use another address from now on. Streams to the old address break, and their owners open them again here."""
        with self._address_lock:
            if self._closed or address == self.address:
                return
            old, self._channel, self.address = self._channel, self._credentials.channel(address), address
        old.close()

    def close(self) -> None:
        with self._address_lock:
            self._closed = True
        if not self._forked:
            self._channel.close()
            grpc_forks.unuse(self)

    def abandon(self) -> None:
        """The server is lost for good: all calls fail with UnavailableError."""
        self._abandoned = True
        self.close()

    def call(
        self, name: str, request: dict[str, Any], *, timeout_s: float = CONNECT_TIMEOUT_S, wait: bool = True
    ) -> dict[str, Any]:
        """Send a small request and return the response. With `wait`, a server that is not up yet has until the timeout.

        A STATUS request changes nothing on the server, so it is repeated if the connection broke.
        """
        deadline = time.monotonic() + timeout_s
        if wait and not self._answered:
            self.say_if_absent()
        while True:
            channel = self._channel
            try:
                answer = self._begin(
                    lambda channel: channel.unary_unary(method(name))(
                        to_json(request),
                        timeout=max(deadline - time.monotonic(), 0.001),
                        metadata=self._credentials.metadata,
                        wait_for_ready=wait,
                    )
                )
                self.note_answer()
                return from_json(answer)
            except grpc.RpcError as error:
                moved = channel is not self._channel
                cut_off = wait and name == STATUS and error.code() in CUT_OFF
                if not (moved or cut_off) or time.monotonic() > deadline:
                    raise error_of(error, self.address) from None
                if cut_off:
                    time.sleep(MIN_BACKOFF_S)

    def problem(self, *, timeout_s: float = PROBE_TIMEOUT_S) -> str | None:
        """Why the server does not answer now; None if it does."""
        try:
            self.call(STATUS, {"views": []}, timeout_s=timeout_s, wait=False)
        except UnavailableError as error:
            return str(error)
        return None

    def say_if_absent(self) -> None:
        """Log a warning if the server does not answer now, for a caller that is going to wait; once until it answers.

        It is asked here and not by a timer's thread: the caller waits anyway, and its calls keep their order.
        """
        self._answered = False
        if not self._said_absent and self.problem() is not None:
            self._said_absent = True
            logger.warning(
                "waiting for the server at %s, which does not answer: start it (`understudy serve STORE`), or check "
                "the address; Ctrl-C stops waiting",
                self.address,
            )

    def note_answer(self) -> None:
        """The server has answered: a later absence is a new one."""
        self._answered, self._said_absent = True, False

    def upload(
        self, name: str, messages: Iterable[bytes], *, timeout_s: float | None, wait: bool = True
    ) -> dict[str, Any]:
        """Send many messages and return the one response."""
        if wait and not self._answered:
            self.say_if_absent()
        try:
            answer = self._begin(
                lambda channel: channel.stream_unary(method(name))(
                    iter(messages), timeout=timeout_s, metadata=self._credentials.metadata, wait_for_ready=wait
                )
            )
        except grpc.RpcError as error:
            raise error_of(error, self.address) from None
        self.note_answer()
        return from_json(answer)

    def exchange(self, name: str, messages: Iterator[bytes]) -> ResponseStream:
        """Send many messages and read many responses. gRPC iterates over `messages` in a thread of its own."""
        call = self._begin(
            lambda channel: channel.stream_stream(method(name))(messages, metadata=self._credentials.metadata)
        )
        return ResponseStream(call, self.address)

    def listen(self, name: str, request: dict[str, Any]) -> ResponseStream:
        """Send one request and read many responses."""
        call = self._begin(
            lambda channel: channel.unary_stream(method(name))(to_json(request), metadata=self._credentials.metadata)
        )
        return ResponseStream(call, self.address)

    def _begin(self, call: Callable[[grpc.Channel], T]) -> T:
        """Begin a call on the current channel; if that was closed because the address changed, on the new one."""
        self._check_process()
        while True:
            channel = self._channel
            try:
                return call(channel)
            except ValueError:  # what gRPC says of a closed channel
                if channel is not self._channel:
                    continue
                if self._abandoned:
                    raise UnavailableError(f"{self.name}: was removed; use the other shards") from None
                raise StoreClosedError(
                    f"{self.address}: the connection is closed; close its writers before it"
                ) from None


class ResponseStream:
    """The responses of a stream, until it ends or is cancelled."""

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
