"""`understudy serve`: serves a store over the network."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console

from understudy.cli.console import with_remote
from understudy.durable.open_files import raise_limit
from understudy.processes.stop import stop_on_signals
from understudy.replay import Budget, FrameCache, Retention, Store
from understudy.training.runs.health import HEALTH, Health
from understudy.web.access import is_loopback
from understudy.web.listener import listen
from understudy.web.tokens import read_token

SLOW_COMMIT_S = 5.0  # a commit that takes longer counts as no progress


def command(
    store: Annotated[Path, tyro.conf.Positional],
    *,
    host: str = "127.0.0.1",
    port: int = 7447,
    token_file: Path | None = None,
    tls_cert: Path | None = None,
    tls_key: Path | None = None,
    metrics_port: int | None = None,
    max_message_mb: int = 64,
    max_batch_memory_mb: int = 4096,
    frame_cache_mb: int = 32768,
    compact_every_min: float | None = None,
    max_practice_steps: int | None = None,
    max_correction_steps: int | None = None,
    max_demonstration_steps: int | None = None,
    replaces: tuple[str, ...] = (),
    verbose: bool = False,
) -> int:
    """Serve a store: writers send steps, learners sample from it and publish policies to actors.

    A step is acknowledged when it is on disk, so no acknowledged step is lost in a crash. Stop with Ctrl-C.

    Args:
        store: Directory of the store, which is created if needed.
        host: Address to listen on; all but loopback addresses need --token-file.
        port: TCP port to listen on; 0 takes any free port.
        token_file: File with the token that clients must send, of at least 16 characters.
        tls_cert: File with the TLS certificate in PEM format, which clients trust with connect(..., tls_cert=...).
        tls_key: File with the private key of the certificate in PEM format.
        metrics_port: TCP port of Prometheus metrics, at http://127.0.0.1:PORT/metrics; by default none.
        max_message_mb: Size of the largest accepted message in MiB.
        max_batch_memory_mb: Memory in MiB for all batches that are made or sent at once; a client beyond it waits.
        frame_cache_mb: Disk space in MiB for frames in sizes that clients ask for; 0 resizes them for each batch.
        compact_every_min: Minutes between two compactions, which delete what is over a maximum below and free the disk
            space of all deleted episodes; by default only `understudy compact --server` does that.
        max_practice_steps: Number of the newest steps of practice to keep at each compaction; by default all.
        max_correction_steps: Number of the newest steps of episodes with an intervention to keep; by default all.
        max_demonstration_steps: Number of the newest steps of demonstrations to keep; by default all.
        replaces: Ids of lost stores that this store replaces; their writers continue here instead of waiting.
        verbose: Log each refused request.
    """
    service = with_remote("understudy.service")
    console = Console(highlight=False)
    logging.basicConfig(level=logging.INFO if verbose else logging.WARNING, format="%(asctime)s %(message)s")
    service.keep_large_blocks()
    raise_limit()
    token = read_token(token_file) if token_file is not None else None
    config = service.ServerConfig(
        host=host,
        port=port,
        token=token,
        tls_cert=tls_cert,
        tls_key=tls_key,
        max_message_bytes=max_message_mb * 2**20,
        max_batch_memory_bytes=max_batch_memory_mb * 2**20,
        frame_cache=FrameCache(max_bytes=frame_cache_mb * 2**20),
        compact_every_s=None if compact_every_min is None else compact_every_min * 60,
        retention=Retention(
            practice=Budget(max_steps=max_practice_steps),
            correction=Budget(max_steps=max_correction_steps),
            demonstration=Budget(max_steps=max_demonstration_steps),
        ),
        replaces=replaces,
    )
    listen(host, port).close()  # before a new store is made; gRPC says it in its own words
    with Store.open(store) as opened, contextlib.ExitStack() as stack:
        server = stack.enter_context(service.Server(opened, config))
        stop = stack.enter_context(stop_on_signals(ends_at_once=True))
        console.print(f"serving {store} at {server.address}", soft_wrap=True)
        if token is not None and tls_cert is None and not is_loopback(host):
            console.print("without --tls-cert, the token and all data cross the network unencrypted", style="yellow")
        if metrics_port is not None:
            shown, close = server.metrics.serve(metrics_port)
            stack.callback(close)
            console.print(f"metrics at http://127.0.0.1:{shown}/metrics")
        health = stack.enter_context(Health(store / HEALTH, role="server", name=store.resolve().name))
        health.add(lambda: {"address": server.address, "commit": opened.last_commit, **server.writer_stats.to_json()})
        while not stop.requested and not server.failed.wait(0.2):
            if server.is_responsive(timeout_s=1.0) and server.writer_stats.oldest_pending_s < SLOW_COMMIT_S:
                health.progress("serving", policy_version=server.parameters.version)
        if server.failure is not None:
            raise server.failure
        console.print(f"stopped at commit {opened.last_commit}")
    if server.is_reading:  # at its end, Python would wait for these threads; nothing of theirs has to be saved
        sys.stdout.flush()
        os._exit(0)
    return 0
