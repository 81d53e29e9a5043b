"""Metrics: the counters of a server in the text format of Prometheus. docs/delivery.md explains each."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest, start_http_server

from understudy.core import UnderstudyError
from understudy.replay import Store
from understudy.replay.format.chunk import Chunk


class Metrics:
    """Counters of one server. `serve` publishes them at http://127.0.0.1:PORT/metrics."""

    def __init__(self, store: Store):
        self._registry = registry = CollectorRegistry()
        self._rows = Counter("understudy_rows_committed", "Rows made durable.", registry=registry)
        self._bytes = Counter("understudy_bytes_received", "Bytes of received chunks.", registry=registry)
        self._chunks = Counter("understudy_chunks_committed", "Chunks made durable.", registry=registry)
        self._repeated = Counter(
            "understudy_chunks_repeated", "Chunks that a writer sent again; stored once.", registry=registry
        )
        self._seconds = Histogram(
            "understudy_commit_seconds",
            "From a chunk's arrival to its acknowledgement.",
            registry=registry,
            buckets=(0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10),
        )
        self._errors = Counter("understudy_errors", "Streams that ended in an error.", ["kind"], registry=registry)
        self._streams = Gauge("understudy_streams", "Open streams.", ["kind"], registry=registry)
        self._batches = Counter("understudy_batches_sent", "Batches sent to clients.", registry=registry)
        self.parameters_version = Gauge(
            "understudy_parameters_version", "Newest published version of parameters.", registry=registry
        )
        commit = Gauge("understudy_store_commit", "The last durable commit.", registry=registry)
        commit.set_function(lambda: store.last_commit)

    @contextmanager
    def stream(self, kind: str) -> Iterator[None]:
        """Count a stream while it is open."""
        gauge = self._streams.labels(kind)
        gauge.inc()
        try:
            yield
        finally:
            gauge.dec()

    def committed(self, chunk: Chunk, num_bytes: int, seconds: float, *, repeated: bool) -> None:
        self._seconds.observe(seconds)
        self._bytes.inc(num_bytes)
        if repeated:
            self._repeated.inc()
        else:
            self._chunks.inc()
            self._rows.inc(chunk.num_rows)

    def sent_batch(self) -> None:
        self._batches.inc()

    def refused(self, error: UnderstudyError) -> None:
        self._errors.labels(type(error).__name__).inc()

    def text(self) -> str:
        return generate_latest(self._registry).decode()

    def serve(self, port: int) -> tuple[int, Callable[[], None]]:
        """Serve the text at a port of this machine; returns the port and the function that stops it."""
        server, thread = start_http_server(port, "127.0.0.1", registry=self._registry)

        def stop() -> None:
            server.shutdown()
            server.server_close()
            thread.join()

        return server.server_port, stop
