"""Bench of sampling and parameters from a server, compared with the most that gRPC can carry.

| process | does | ends when |
|---|---|---|
| `bench_delivery serve STORE` | serves a store | its standard input ends |
| `bench_remote give` | sends as many messages of as many bytes as a request says | its standard input ends |
| `bench_remote read ADDRESS` | an actor: reports when each version has arrived | its standard input ends |
"""

from __future__ import annotations

import statistics
import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import numpy as np

from understudy.core import UnderstudyError
from understudy.core.examples import random_episode, robot_spec
from understudy.replay.read.view import EVERYTHING
from understudy.replay.write.store import Store
from understudy.selftest.bench_delivery import Child, report, serve_bare, start_server
from understudy.service.client.remote import connect
from understudy.service.wire.batches import num_bytes_of
from understudy.service.wire.message import PIECE_BYTES

EPISODE_STEPS = 100


@dataclass(frozen=True, kw_only=True)
class RemoteSampleResult:
    """Seconds for one batch, in each round."""

    batch_bytes: int
    ours_s: tuple[float, ...]
    whole_s: tuple[float, ...]  # bare gRPC, the batch as one message
    pieces_s: tuple[float, ...]  # bare gRPC, in pieces as ours

    def ratio(self, bare: tuple[float, ...]) -> float:
        """Bare time divided by ours, within each round; the median."""
        return statistics.median(b / o for b, o in zip(bare, self.ours_s, strict=True))


def measure_remote_sampling(
    directory: Path, *, steps: int, batch_size: int, batches: int, rounds: int, on_turn: Callable[[], None]
) -> RemoteSampleResult:
    """Draw batches over loopback, in turns with bare streams of as many bytes."""
    _fill(directory / "store", steps)
    with ExitStack() as cleanup:
        server = cleanup.enter_context(start_server(directory / "store"))
        giver = cleanup.enter_context(Child("understudy.selftest.bench_remote", "give"))
        remote = cleanup.enter_context(connect(server.address))
        sampler = cleanup.enter_context(remote.sampler(EVERYTHING, batch_size=batch_size, seed=1))
        channel = cleanup.enter_context(_channel(giver.address))
        batch = sampler.sample()
        size = num_bytes_of(batch)
        ways: dict[str, Callable[[], Any]] = {
            "ours": lambda: [sampler.sample(batch) for _ in range(batches)],
            "whole": lambda: _take(channel, batches, size),
            "pieces": lambda: _take(channel, batches * size // PIECE_BYTES, PIECE_BYTES),
        }
        seconds: dict[str, list[float]] = {way: [] for way in ways}
        for _ in range(rounds):
            for way, run in ways.items():
                started = time.perf_counter()
                run()
                seconds[way].append((time.perf_counter() - started) / batches)
                on_turn()
    return RemoteSampleResult(batch_bytes=size, **{f"{way}_s": tuple(found) for way, found in seconds.items()})


def _fill(path: Path, steps: int) -> None:
    spec = robot_spec()
    episode = random_episode(spec, EPISODE_STEPS, 1)
    with Store.open(path) as store:
        writer = store.writer("bench", spec)
        for _ in range(-(-steps // EPISODE_STEPS)):
            writer.begin(episode.info)
            for step in episode.steps():
                writer.append(step)
            writer.end(episode.last_observation)


# ---- parameters


@dataclass(frozen=True, kw_only=True)
class ParametersResult:
    """Seconds, in each round."""

    num_bytes: int
    bare_s: tuple[float, ...]  # one bare transfer of as many bytes, as one message
    pieces_s: tuple[float, ...]  # the same in pieces
    all_s: tuple[float, ...]  # from publish until every reader has it
    late_s: float  # from connecting until a reader that joins late has the newest

    def ratio(self, bare: tuple[float, ...]) -> float:
        """The time until all have it, divided by one bare transfer; the median over the rounds."""
        return statistics.median(a / b for a, b in zip(self.all_s, bare, strict=True))


def measure_parameters(
    directory: Path, *, megabytes: int, readers: int, rounds: int, on_turn: Callable[[], None]
) -> ParametersResult:
    """Publish to many readers, each a process, in turns with one bare transfer."""
    rng = np.random.default_rng(0)
    weights = {f"layer-{number}": rng.random(250_000, np.float32) for number in range(max(megabytes, 1))}
    size = sum(array.nbytes for array in weights.values())
    bare_s, pieces_s, all_s = [], [], []
    with ExitStack() as cleanup:
        server = cleanup.enter_context(start_server(directory / "store"))
        giver = cleanup.enter_context(Child("understudy.selftest.bench_remote", "give"))
        remote = cleanup.enter_context(connect(server.address))
        channel = cleanup.enter_context(_channel(giver.address))
        actors = [cleanup.enter_context(_reader(server.address)) for _ in range(readers)]
        remote.publish(weights)
        for actor in actors:  # all are connected, and warm
            actor.receive()
        for _ in range(rounds):
            bare_s.append(_timed(lambda: _take(channel, 1, size)))
            pieces_s.append(_timed(lambda: _take(channel, size // PIECE_BYTES, PIECE_BYTES)))
            started = time.monotonic()
            version = remote.publish(weights)
            reports = [actor.receive() for actor in actors]
            if {r["version"] for r in reports} != {version}:
                raise UnderstudyError(f"bench: expected version {version} everywhere, got {reports}")
            all_s.append(max(r["at"] for r in reports) - started)
            on_turn()
        late = cleanup.enter_context(_reader(server.address))
        late_s = late.receive()["at"] - late.first["at"]
    return ParametersResult(
        num_bytes=size, bare_s=tuple(bare_s), pieces_s=tuple(pieces_s), all_s=tuple(all_s), late_s=late_s
    )


def _reader(address: str) -> Child:
    return Child("understudy.selftest.bench_remote", "read", address)


def _timed(run: Callable[[], Any]) -> float:
    started = time.monotonic()
    run()
    return time.monotonic() - started


def _read(address: str) -> None:
    """An actor. The clock is the machine's monotonic one, which all its processes share."""
    with connect(address) as remote:
        report({"address": address, "at": time.monotonic()})
        subscription = remote.parameters()

        def follow() -> None:
            found = None
            while (found := subscription.wait(found)) is not None:
                report({"version": found.version, "at": time.monotonic()})

        thread = threading.Thread(target=follow, daemon=True)
        thread.start()
        sys.stdin.read()
        subscription.close()
        thread.join()


# ---- bare gRPC


def _channel(address: str) -> grpc.Channel:
    return grpc.insecure_channel(address, options=[("grpc.max_receive_message_length", -1)])


def _take(channel: grpc.Channel, messages: int, num_bytes: int) -> None:
    for _ in channel.unary_stream("/bench/Give")(f"{messages} {num_bytes}".encode()):
        pass


def _give() -> None:
    content = bytes(2**30)

    async def give(request: bytes, context: grpc.aio.ServicerContext) -> Any:
        messages, num_bytes = map(int, request.split())
        message = content[:num_bytes]
        for _ in range(messages):
            await context.write(message)

    serve_bare("Give", grpc.unary_stream_rpc_method_handler(give))


if __name__ == "__main__":
    ROLES: dict[str, Callable[..., None]] = {"give": _give, "read": _read}
    ROLES[sys.argv[1]](*sys.argv[2:])
