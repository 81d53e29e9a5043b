"""Server: the gRPC handlers that serve a store. It runs in a thread of the process that has the store open.

| loop | takes from | blocks on | woken by |
|---|---|---|---|
| the event loop, one thread | all streams | nothing | gRPC, the other threads |
| committing threads | chunks | the store's commit lock, the disk | the event loop |
| reading threads | requests for batches and counts | the disk | the event loop |

A stream reads one message ahead of the one that is committed, so that network and disk work at the same time. A bad
message ends its own stream with an error that says what is wrong; other streams are not affected.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, ParamSpec, TypeAlias, TypeVar

import grpc
import grpc.aio

from understudy.core import (
    RefusedError,
    SpecError,
    StepSpec,
    StoreError,
    StoreFailedError,
    UnavailableError,
    UnderstudyError,
    WireError,
)
from understudy.durable.open_files import max_open_files
from understudy.processes import forks
from understudy.replay import FrameCache, Reader, Retention, Store
from understudy.replay.format.chunk import Chunk
from understudy.replay.format.layout import row_bytes_of
from understudy.replay.read.view import count_views
from understudy.service.server.batch_memory import BatchMemory
from understudy.service.server.compactor import Compactor
from understudy.service.server.metrics import Metrics
from understudy.service.server.parameter_store import ParameterStore
from understudy.service.server.sample_stream import SampleStream, serve_batches
from understudy.service.server.writer_stats import WriterStats
from understudy.service.wire import grpc_forks
from understudy.service.wire.batches import view_from_json
from understudy.service.wire.chunks import decode_chunk
from understudy.service.wire.message import from_json, to_json
from understudy.service.wire.parameters import NO_PARAMETERS, encode_version
from understudy.service.wire.protocol import (
    COMPACT,
    DEFAULT_PORT,
    PUBLISH,
    REQUEST,
    SAMPLE,
    SERVICE,
    STATUS,
    SUBSCRIBE,
    TOKEN_KEY,
    VERSION,
    WRITE,
    check_version,
    status_of,
)
from understudy.web.access import check_access
from understudy.web.errors import ListenError
from understudy.web.tokens import bearer_matches

logger = logging.getLogger(__name__)
P = ParamSpec("P")
T = TypeVar("T")

MAX_SPECS = 256  # in one store; each has a segment of its own
MAX_NAME_LENGTH = 200
IDLE_S = 60  # after which a connection without a call is closed
MAX_VIEWS = 16  # in one request
NUM_THREADS = 16  # that commit, and as many that read; a commit of many chunks costs hardly more than of one
_HEALTH_SERVING, _HEALTH_NOT_SERVING = b"\x08\x01", b"\x08\x02"  # grpc.health.v1.HealthCheckResponse


@dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """Where a server listens, who may connect, and how much it accepts."""

    host: str = "127.0.0.1"
    port: int = DEFAULT_PORT  # 0: any free port
    token: str | None = field(default=None, repr=False)
    tls_cert: Path | None = None
    tls_key: Path | None = None
    max_message_bytes: int = 64 * 2**20
    max_parameters_bytes: int = 4 * 2**30
    publish_timeout_s: float = 30.0  # without a further piece, after which a publication is ended
    max_batch_memory_bytes: int = 4 * 2**30  # of all batches that are made or sent at once
    frame_cache: FrameCache = field(default_factory=FrameCache)  # of frames that clients ask for in another size
    max_streams: int = 4096
    max_connections: int | None = None  # None: a quarter of the files that the process may have open (ulimit -n)
    handshake_timeout_s: float = 10.0  # a connection that has not said hello in HTTP/2 by then is closed
    compact_every_s: float | None = None  # None: only when an operator asks for it
    retention: Retention = field(default_factory=Retention)  # what is over budget is deleted before each compaction
    replaces: tuple[str, ...] = ()  # ids of stores that are lost for good; their writers continue with this store

    def __post_init__(self) -> None:
        check_access(self.host, self.token)
        if self.compact_every_s is not None and self.compact_every_s <= 0:
            raise RefusedError(f"compact_every_s: expected a time above 0 or None, got {self.compact_every_s}")
        if (self.tls_cert is None) != (self.tls_key is None):
            raise RefusedError(
                "tls: expected both a certificate and a key, got one of them; pass both --tls-cert and --tls-key"
            )


# Called with the name and the spec of a writer that connects; raises an UnderstudyError to refuse it.
AcceptWriter: TypeAlias = Callable[[str, StepSpec], None]
# Answers `Remote.request`: (type, payload) to a JSON value.
OnRequest: TypeAlias = Callable[[str, Any], Any]


class Server:
    """Serves a store from `start` to `stop`. Use as a context manager."""

    def __init__(
        self,
        store: Store,
        config: ServerConfig | None = None,
        *,
        on_request: OnRequest | None = None,
        accept_writer: AcceptWriter | None = None,
    ):
        self.config = config or ServerConfig()
        self._on_request = on_request
        self._accept_writer = accept_writer
        self.store = store
        self.metrics = Metrics(store)
        self.writer_stats = WriterStats()
        self.address = ""
        self.failed = threading.Event()  # set when the store has failed or the server is stopped: end the process
        self.failure: StoreFailedError | None = None
        self._committers = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="commit")
        self._readers = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="read")  # so that no commit waits for a read
        self._batch_memory = BatchMemory(self.config.max_batch_memory_bytes)
        self._num_reading = 0
        self._counting = threading.Lock()  # guards the number above
        self._loop = asyncio.new_event_loop()
        self.parameters = ParameterStore(
            store.path,
            store.catalog.store_id,
            self._in_commit_thread,
            max_bytes=self.config.max_parameters_bytes,
            timeout_s=self.config.publish_timeout_s,
        )
        self.metrics.parameters_version.set(self.parameters.version)
        self._compactor = Compactor(
            store,
            retention=self.config.retention,
            every_s=self.config.compact_every_s,
            on_error=lambda _: self._end_if_store_failed(),
        )
        self._thread = threading.Thread(target=self._run, name="serve", daemon=True)
        self._forked = False
        forks.register(self)
        self._grpc: grpc.aio.Server | None = None

    # ---- lifecycle

    def after_fork_in_child(self) -> None:
        forks.leave_to_parent(self)
        self._forked = True  # `stop` does nothing here

    def start(self) -> Server:
        """Open the port; returns when clients can connect."""
        grpc_forks.use(self)
        self._thread.start()
        try:
            asyncio.run_coroutine_threadsafe(self._open(), self._loop).result()
        except BaseException:
            self.stop()
            raise
        self._compactor.start()
        logger.info("serving %s at %s", self.store.path, self.address)
        return self

    def stop(self, grace_s: float = 1.0) -> None:
        """Let running commits finish, end all streams, and close the port. The store stays open.

        A read that takes longer than `grace_s` is left alone: `is_reading` tells that a thread of it is still there.
        """
        if self._forked or self._loop.is_closed():
            return
        asyncio.run_coroutine_threadsafe(self._close(grace_s), self._loop).result()
        self._compactor.close()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._committers.shutdown(cancel_futures=True)
        self._readers.shutdown(wait=False, cancel_futures=True)
        deadline = time.monotonic() + grace_s
        while self.is_reading and time.monotonic() < deadline:
            time.sleep(0.01)
        self._loop.close()
        self._grpc = None  # which ends gRPC's threads
        grpc_forks.unuse(self)
        self.failed.set()

    @property
    def is_reading(self) -> bool:
        """Whether a thread still reads after `stop`; the process then waits for it at its end."""
        return self._num_reading > 0

    def __enter__(self) -> Server:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()

    async def _open(self) -> None:
        config = self.config
        server = grpc.aio.server(
            maximum_concurrent_rpcs=config.max_streams,
            options=[
                ("grpc.max_receive_message_length", config.max_message_bytes),
                ("grpc.max_send_message_length", -1),
                ("grpc.so_reuseport", 0),
                ("grpc.max_allowed_incoming_connections", config.max_connections or max_open_files()),
                ("grpc.server_handshake_timeout_ms", int(config.handshake_timeout_s * 1000)),
                ("grpc.max_connection_idle_ms", IDLE_S * 1000),  # clients connect again when they have something
                ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
                ("grpc.keepalive_time_ms", 20_000),  # ends the stream of a client that disappeared
                ("grpc.keepalive_timeout_ms", 20_000),
                ("grpc.http2.ping_timeout_ms", 20_000),
                ("grpc.keepalive_permit_without_calls", 1),
            ],
        )
        server.add_generic_rpc_handlers(self._handlers())
        host = f"[{config.host}]" if ":" in config.host.strip("[]") and config.host[0] != "[" else config.host
        address = f"{host}:{config.port}"
        self._grpc = server
        try:
            self.address = f"{host}:{self._add_port(server, address)}"
        finally:
            await server.start()  # also without a port: gRPC ends only a server that was started

    def _add_port(self, server: grpc.aio.Server, address: str) -> int:
        config = self.config
        try:
            if config.tls_cert is not None and config.tls_key is not None:
                pair = (config.tls_key.read_bytes(), config.tls_cert.read_bytes())
                return int(server.add_secure_port(address, grpc.ssl_server_credentials([pair])))
            return int(server.add_insecure_port(address))
        except OSError as error:
            raise RefusedError(f"{error.filename}: {error.strerror}; pass a readable certificate and key") from None
        except RuntimeError as error:
            tls = ", or pass a readable certificate and key" if config.tls_cert is not None else ""
            raise ListenError(f"cannot listen on {address} ({error}); is another server there?{tls}") from None

    async def _close(self, grace_s: float) -> None:
        if self._grpc is not None:
            await self._grpc.stop(grace_s)
        while tasks := asyncio.all_tasks() - {asyncio.current_task()}:  # streams that close their readers
            _, late = await asyncio.wait(tasks, timeout=grace_s)
            for task in late:
                task.cancel()

    def _handlers(self) -> tuple[grpc.GenericRpcHandler, ...]:
        delivery = {
            WRITE: grpc.stream_stream_rpc_method_handler(self._guarded_stream(self._write)),
            SAMPLE: grpc.stream_stream_rpc_method_handler(self._guarded_stream(self._sample)),
            PUBLISH: grpc.stream_unary_rpc_method_handler(self._guarded(self._publish)),
            SUBSCRIBE: grpc.unary_stream_rpc_method_handler(self._guarded_stream(self._subscribe)),
            STATUS: grpc.unary_unary_rpc_method_handler(self._guarded(self._status)),
            REQUEST: grpc.unary_unary_rpc_method_handler(self._guarded(self._request)),
            COMPACT: grpc.unary_unary_rpc_method_handler(self._guarded(self._compact)),
        }
        return (
            grpc.method_handlers_generic_handler(SERVICE, delivery),
            grpc.method_handlers_generic_handler(
                "grpc.health.v1.Health", {"Check": grpc.unary_unary_rpc_method_handler(self._health)}
            ),
        )

    def is_responsive(self, timeout_s: float) -> bool:
        """Whether the event loop runs a call within the timeout; False if it hangs or is stopped."""
        answered = threading.Event()
        if not self._loop.is_running():
            return False
        self._loop.call_soon_threadsafe(answered.set)
        return answered.wait(timeout_s)

    # ---- token check and errors of every call

    def _guarded(
        self, call: Callable[[Any, grpc.aio.ServicerContext], Awaitable[bytes]]
    ) -> Callable[[Any, grpc.aio.ServicerContext], Coroutine[Any, Any, bytes]]:
        """A handler with one response that checks the token first; our errors become its gRPC status."""

        async def guarded(request: Any, context: grpc.aio.ServicerContext) -> bytes:
            try:
                self._check_token(context)
                return await call(request, context)
            except UnderstudyError as error:
                await self._refuse(context, error)
                raise AssertionError("unreachable") from None

        return guarded

    def _guarded_stream(
        self, call: Callable[[Any, grpc.aio.ServicerContext], Awaitable[None]]
    ) -> Callable[[Any, grpc.aio.ServicerContext], Coroutine[Any, Any, None]]:
        async def guarded(requests: Any, context: grpc.aio.ServicerContext) -> None:
            try:
                self._check_token(context)
                await call(requests, context)
            except UnderstudyError as error:
                await self._refuse(context, error)

        return guarded

    def _check_token(self, context: grpc.aio.ServicerContext) -> None:
        if self.config.token is None:
            return
        shown = dict(context.invocation_metadata() or ()).get(TOKEN_KEY, "")
        if not bearer_matches(shown, self.config.token):
            raise RefusedError(
                "the token is missing or wrong; pass the one that `understudy serve` was started with, "
                "with --token-file or, in Python, with token="
            )

    async def _refuse(self, context: grpc.aio.ServicerContext, error: UnderstudyError) -> None:
        self.metrics.refused(error)
        self._end_if_store_failed()
        code, text, trailer = status_of(error)
        logger.info("%s: %s: %s", context.peer(), type(error).__name__, error)
        await context.abort(code, text, trailer)

    def _end_if_store_failed(self) -> None:
        """Let the process end if no commit can succeed any more; an error of reading is one of its client only."""
        if self.store.failure is not None:
            self.failure = self.failure or self.store.failure
            self.failed.set()

    async def _in_commit_thread(self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        return await self._in_thread_of(self._committers, partial(function, *args, **kwargs))

    async def _in_read_thread(self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        return await self._in_thread_of(self._readers, partial(self._read, function, *args, **kwargs))

    async def _in_thread_of(self, pool: ThreadPoolExecutor, function: Callable[[], T]) -> T:
        try:
            future = self._loop.run_in_executor(pool, function)
        except RuntimeError:  # a program that ends without `stop`: Python shuts its thread pools down first
            raise UnavailableError("the server's process is ending; connect again when it is back") from None
        return await future

    def _read(self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        with self._counting:
            self._num_reading += 1
        try:
            return function(*args, **kwargs)
        finally:
            with self._counting:
                self._num_reading -= 1

    # ---- calls

    async def _health(self, request: bytes, context: grpc.aio.ServicerContext) -> bytes:
        return _HEALTH_NOT_SERVING if self.failed.is_set() else _HEALTH_SERVING

    async def _status(self, request: bytes, context: grpc.aio.ServicerContext) -> bytes:
        return to_json(await self._in_read_thread(self._count, from_json(request)))

    def _count(self, request: dict[str, Any]) -> dict[str, Any]:
        """What the store holds, and how many steps and episodes each requested view has."""
        given = request.get("views", [])
        if not isinstance(given, list):
            raise WireError(f"views: expected a list of views, got {str(given)[:40]}")
        if len(given) > MAX_VIEWS:
            raise StoreError(
                f"views: at most {MAX_VIEWS} at once, got {len(given)}; send the others in another request"
            )
        views = [view_from_json(view) for view in given]
        with Reader(self.store.path) as reader:
            commit = reader.last_commit()
            totals = [asdict(total) for total in reader.catalog.episode_totals()]
            counts = {view.name: found for view, found in zip(views, count_views(reader, views, commit), strict=True)}
        steps = {name: found.steps for name, found in counts.items()}
        episodes = {name: found.episodes for name, found in counts.items()}
        return {
            "version": VERSION,
            "store": self.parameters.store_id,
            "commit": commit,
            "totals": totals,
            "steps": steps,
            "episodes": episodes,
            "parameters_version": self.parameters.version,
        }

    async def _request(self, request: bytes, context: grpc.aio.ServicerContext) -> bytes:
        """A request to the program that started the server. If its callback raises, only this client gets the error."""
        asked = from_json(request)
        if self._on_request is None:
            raise RefusedError("this server answers no requests; start it with on_request=...")
        try:
            answer = await self._in_commit_thread(self._on_request, str(asked.get("type")), asked.get("payload"))
            return to_json({"answer": answer})
        except UnderstudyError:
            raise
        except Exception as error:  # the callback is not ours: its client gets the error, and the server continues
            logger.exception("a request of type %s failed", asked.get("type"))
            raise StoreError(f"the server's answer to {asked.get('type')!r} failed: {error!r}") from None

    async def _compact(self, request: bytes, context: grpc.aio.ServicerContext) -> bytes:
        """Give the disk space of deleted episodes back; writers and samplers continue."""
        return to_json(await self._in_read_thread(self._compactor.answer, from_json(request)))

    async def _sample(self, requests: AsyncIterator[bytes], context: grpc.aio.ServicerContext) -> None:
        stream = await self._in_read_thread(
            SampleStream,
            self.store.path,
            from_json(await _first(requests)),
            self._batch_memory,
            self.config.frame_cache,
        )
        try:
            with self.metrics.stream("sample"):
                await context.write(stream.hello_reply())
                await serve_batches(stream, requests, context.write, self._in_read_thread, self.metrics.sent_batch)
        finally:
            await asyncio.shield(self._in_read_thread(stream.close))

    async def _publish(self, requests: AsyncIterator[bytes], context: grpc.aio.ServicerContext) -> bytes:
        hello = from_json(await _first(requests))
        version = hello.get("version")
        if version is not None and not _is_version(version):
            raise WireError(f"version: expected a whole number from 1, got {str(version)[:40]}")
        self._parse_have(hello)
        number = await self.parameters.publish(requests, version)
        self.metrics.parameters_version.set(self.parameters.version)
        return to_json({"version": number, "store": self.parameters.store_id})

    async def _subscribe(self, request: bytes, context: grpc.aio.ServicerContext) -> None:
        """Send the newest version, then each newer one. A slow subscriber skips the versions in between."""
        have = self._parse_have(from_json(request))
        with self.metrics.stream("subscribe"):
            while True:
                newest = await self.parameters.newest(newer_than=have)
                for piece in newest.pieces:
                    await context.write(piece)
                have = newest.number
                await context.write(encode_version(have, self.parameters.store_id))

    def _parse_have(self, hello: dict[str, Any]) -> int:
        """The version of this store that a client has; versions of another store do not count here."""
        have = hello.get("have", NO_PARAMETERS)
        if type(have) is not int or not (have == NO_PARAMETERS or _is_version(have)):
            raise WireError(f"have: expected the number of a version, got {str(have)[:40]}")
        if hello.get("store") != self.parameters.store_id:
            return NO_PARAMETERS
        self.parameters.has_existed(have)
        return have

    async def _write(self, requests: AsyncIterator[bytes], context: grpc.aio.ServicerContext) -> None:
        """Receive chunks and acknowledge each once its commit is durable."""
        hello = from_json(await _first(requests))
        writer, incarnation, spec = self._parse_hello(hello)
        # The writer takes its name with its first good chunk, not with its hello: a late hello of a dead process must
        # not take the name from its successor. A writer that sends a chunk has read the reply to its hello.
        known = await self._in_commit_thread(self.store.find_writer, writer, incarnation)
        last_seq, checks = (-1, ()) if known is None else (known.last_seq, known.checks)
        begun = False
        with (
            self.metrics.stream("write"),
            self.writer_stats.writer(writer, incarnation, context.peer(), last_seq) as entry,
        ):
            hello_reply = {
                "version": VERSION,
                "last_seq": last_seq,
                "checks": checks,
                "max_message_bytes": self.config.max_message_bytes,
                "stores": [self.parameters.store_id, *self.config.replaces],
            }
            await context.write(to_json(hello_reply))
            ahead = asyncio.ensure_future(_next(requests))
            try:
                while (message := await ahead) is not None:
                    ahead = asyncio.ensure_future(_next(requests))
                    entry.received(len(message))
                    decode = partial(decode_chunk, message, writer=writer, incarnation=incarnation, spec=spec)
                    seq, commit = await self._in_commit_thread(
                        self._commit, decode, len(message), last_seq=last_seq, begun=begun
                    )
                    begun = True
                    entry.committed(seq, commit, repeated=seq <= last_seq)
                    last_seq = max(last_seq, seq)
                    await context.write(to_json({"seq": seq, "commit": commit}))
            finally:
                ahead.cancel()

    def _parse_hello(self, hello: dict[str, Any]) -> tuple[str, str, StepSpec]:
        check_version(hello, other="client")
        names = hello.get("writer"), hello.get("incarnation")
        for name in names:
            if not isinstance(name, str) or not 0 < len(name) <= MAX_NAME_LENGTH or not name.isprintable():
                raise WireError(
                    f"writer: expected a name of up to {MAX_NAME_LENGTH} characters, got {str(name)[:40]!r}"
                )
        spec = self._parse_spec(hello.get("spec"))
        if self._accept_writer is not None:
            self._accept_writer(str(names[0]), spec)
        return str(names[0]), str(names[1]), spec

    def _parse_spec(self, value: Any) -> StepSpec:
        """The spec in a hello. One whose rows cannot be sent is refused before the store makes a segment for it."""
        try:
            spec = StepSpec.from_json(value)
            known = spec.json_text in self.store.state.spec_ids
            num_bytes = row_bytes_of(spec)
        except UnderstudyError:
            raise
        except (TypeError, KeyError, ValueError, AttributeError, RecursionError, OverflowError) as error:
            raise WireError(f"spec: not the spec of a step ({type(error).__name__}: {str(error)[:100]})") from None
        if not 0 < num_bytes <= self.config.max_message_bytes:
            raise SpecError(
                f"spec: expected rows of at most {self.config.max_message_bytes} bytes, got {num_bytes}; make the "
                f"arrays smaller, or raise --max-message-mb of `understudy serve`"
            )
        if not known and len(self.store.state.spec_ids) >= MAX_SPECS:
            raise SpecError(f"spec: the store has {MAX_SPECS} specs already; write to another store")
        return spec

    def _commit(self, decode: Callable[[], Chunk], num_bytes: int, *, last_seq: int, begun: bool) -> tuple[int, int]:
        started = time.monotonic()
        chunk = decode()
        if not begun:
            self.store.begin_writer(chunk.writer, chunk.incarnation)
        commit = self.store.commit(chunk)
        self.metrics.committed(chunk, num_bytes, time.monotonic() - started, repeated=chunk.seq <= last_seq)
        return chunk.seq, commit


def _is_version(value: Any) -> bool:
    return type(value) is int and 0 < value < 2**62


async def _first(requests: AsyncIterator[bytes]) -> bytes:
    message = await _next(requests)
    if message is None:
        raise WireError("the stream ended before its first message")
    return message


async def _next(requests: AsyncIterator[bytes]) -> bytes | None:
    """The next message of a stream, or None at its end."""
    async for message in requests:
        return message
    return None
