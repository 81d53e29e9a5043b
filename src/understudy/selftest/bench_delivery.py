"""Bench of delivery: steps from an `append` here to a disk in another process, beside what gRPC can carry at best.

Three ways bring the same bytes over loopback to another process, in turns, so that other load on the machine affects
all of them:

- bare: a gRPC stream of ready-made messages to a server that answers each with two bytes and forgets it;
- memory: `RemoteWriter` without a spool, to a server with a durable store;
- spool: the same with a spool on disk.

| process | does | ends when |
|---|---|---|
| `bench serve STORE` | serves a store | its standard input ends |
| `bench bare` | answers messages | its standard input ends |
| `bench write ...` | one of several clients, each with several writers | it has reported its times |

Each reports its address, or its times, in a line of JSON.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any

import grpc
import grpc.aio

from understudy.core import EpisodeInfo, Step, UnderstudyError
from understudy.core.episode import stack
from understudy.core.examples import random_steps, robot_spec
from understudy.replay.format.chunk import Part
from understudy.replay.write.store import Store
from understudy.service.client.connection import Credentials
from understudy.service.client.outbox import OutboxConfig
from understudy.service.client.remote import connect
from understudy.service.client.remote_writer import RemoteWriter
from understudy.service.client.write_stream import WINDOW_CHUNKS
from understudy.service.server.malloc import keep_large_blocks
from understudy.service.server.server import Server, ServerConfig
from understudy.service.wire.chunks import encode_chunk

BARE, MEMORY, SPOOL = "bare gRPC", "RemoteWriter, no spool", "RemoteWriter, disk spool"
WAYS = (BARE, MEMORY, SPOOL)

NUM_DIFFERENT = 4  # chunks that are made beforehand and sent in turn, so that no cache holds them all
MAX_CLIENTS = 4  # processes that many writers share
QUEUE_CHUNKS = 4
SPOOL_BYTES = 1 << 26  # in memory or on disk
TIMEOUT_S = 600.0


@dataclass(frozen=True, kw_only=True)
class DeliveryBenchConfig:
    """Where and how much to measure."""

    directory: Path
    rounds: int
    chunks: int  # of each writer, in each round
    chunk_steps: int
    writers: int = 1

    def __post_init__(self) -> None:
        for name in ("rounds", "chunks", "chunk_steps", "writers"):
            if getattr(self, name) < 1:
                raise UnderstudyError(f"{name}: expected at least 1, got {getattr(self, name)}")

    @property
    def num_turns(self) -> int:
        return self.rounds * (len(WAYS) if self.writers == 1 else len(WAYS) - 1)


@dataclass(frozen=True, kw_only=True)
class DeliveryCost:
    """Of one turn."""

    wall_s: float
    client_cpu_s: float
    server_cpu_s: float

    @property
    def cpu_s(self) -> float:
        return self.client_cpu_s + self.server_cpu_s


@dataclass(frozen=True, kw_only=True)
class DeliveryBenchResult:
    """What was measured, round by round."""

    turn_bytes: int  # of messages
    turn_steps: int
    rounds: Mapping[str, tuple[DeliveryCost, ...]]  # by way

    def median(self, way: str, of: Callable[[DeliveryCost], float]) -> float:
        return statistics.median(of(cost) for cost in self.rounds[way])

    def megabytes_per_s(self, way: str) -> float:
        return self.turn_bytes / 1e6 / self.median(way, lambda cost: cost.wall_s)

    def steps_per_s(self, way: str) -> float:
        return self.turn_steps / self.median(way, lambda cost: cost.wall_s)

    def cpu_s_per_gb(self, way: str, of: Callable[[DeliveryCost], float]) -> float:
        return self.median(way, of) / (self.turn_bytes / 1e9)

    def ratio(self, way: str) -> float:
        """Bare time divided by the time of a way, within each round; the median over the rounds."""
        return statistics.median(
            bare.wall_s / cost.wall_s for bare, cost in zip(self.rounds[BARE], self.rounds[way], strict=True)
        )


@dataclass(frozen=True, kw_only=True)
class ManyWritersResult:
    """Seconds that each writer took to deliver the same amount, from the common start; a tuple for each round."""

    writer_bytes: int
    writer_steps: int
    rounds: Mapping[str, tuple[tuple[float, ...], ...]]  # by way

    def megabytes_per_s(self, way: str) -> float:
        """Of all writers together."""
        return statistics.median(self.writer_bytes * len(s) / 1e6 / max(s) for s in self.rounds[way])

    def steps_per_s(self, way: str) -> float:
        return self.megabytes_per_s(way) * 1e6 / self.writer_bytes * self.writer_steps

    def fairness(self, way: str) -> float:
        """The throughput of the slowest writer divided by the mean of all."""
        return statistics.median(1 / max(s) / statistics.fmean(1 / t for t in s) for s in self.rounds[way])


# ---- one writer


def measure_delivery(config: DeliveryBenchConfig, on_turn: Callable[[], None]) -> DeliveryBenchResult:
    """Measure all ways in turns, with one writer; `on_turn` is called after each turn."""
    steps = make_steps(config.chunk_steps)
    messages = [_message(steps[at : at + config.chunk_steps]) for at in range(0, len(steps), config.chunk_steps)]
    ways: dict[str, Callable[[], DeliveryCost]] = {
        BARE: lambda: _bare(config, messages),
        MEMORY: lambda: _deliver(config, steps, spool=None),
        SPOOL: lambda: _deliver(config, steps, spool=config.directory / "spool"),
    }
    rounds: dict[str, list[DeliveryCost]] = {way: [] for way in WAYS}
    for _ in range(config.rounds):
        for way in WAYS:
            rounds[way].append(ways[way]())
            on_turn()
    return DeliveryBenchResult(
        turn_bytes=config.chunks * len(messages[0]),
        turn_steps=config.chunks * config.chunk_steps,
        rounds={way: tuple(costs) for way, costs in rounds.items()},
    )


def make_steps(chunk_steps: int) -> list[Step]:
    """Steps of two cameras, state and action, none of them the last of its episode."""
    steps, _ = random_steps(robot_spec(), NUM_DIFFERENT * chunk_steps, seed=0)
    return [replace(step, terminated=False) for step in steps]


def _message(steps: Sequence[Step]) -> bytes:
    """A chunk of these steps as it travels."""
    spec = robot_spec()
    rows = [spec.row(step) for step in steps]
    columns = {path: stack([row[path] for row in rows], leaf) for path, leaf in spec.columns.items()}
    part = Part(episode=0, first_index=0, num_rows=len(rows), state="open", info=EpisodeInfo(actor="bench"))
    return b"".join(encode_chunk(0, columns, [part]))


def _bare(config: DeliveryBenchConfig, messages: Sequence[bytes]) -> DeliveryCost:
    """The first message is not measured: the connection opens with it."""
    window = threading.Semaphore(1)

    def requests() -> Iterator[bytes]:
        for number in range(config.chunks + 1):
            window.acquire()
            yield messages[number % len(messages)]

    with (
        Child("understudy.selftest.bench_delivery", "bare") as server,
        Credentials().channel(server.address) as channel,
    ):
        answers = channel.stream_stream("/bench/Take")(requests())
        next(answers)
        with Stopwatch(server) as stopwatch:
            window.release(WINDOW_CHUNKS)
            for _ in answers:
                window.release()
    return stopwatch.cost


def _deliver(config: DeliveryBenchConfig, steps: Sequence[Step], spool: Path | None) -> DeliveryCost:
    """The first chunk is not measured: the connection opens with it, and the first segment is made."""
    with ExitStack() as cleanup:
        server = cleanup.enter_context(start_server(config.directory / "store"))
        remote = cleanup.enter_context(connect(server.address))
        writer = remote.writer(
            "bench", robot_spec(), spool=spool, commit_steps=config.chunk_steps, config=_outbox_config(config)
        )
        cleanup.callback(writer.close)
        writer.begin()
        _append(writer, steps, config.chunk_steps)
        writer.wait_delivered(TIMEOUT_S)
        with Stopwatch(server) as stopwatch:
            _append(writer, steps, config.chunks * config.chunk_steps)
            if not writer.wait_delivered(TIMEOUT_S):
                raise UnderstudyError(f"bench: not delivered after {TIMEOUT_S:.0f} s: {writer.delivery}")
    for directory in (config.directory / "store", spool):
        if directory is not None:
            shutil.rmtree(directory)
    return stopwatch.cost


def _append(writer: RemoteWriter, steps: Sequence[Step], num_steps: int) -> None:
    for number in range(num_steps):
        writer.append(steps[number % len(steps)])


def _outbox_config(config: DeliveryBenchConfig) -> OutboxConfig:
    """Block when the queue is full, and keep it short, so that its memory is reused as in a long run."""
    return OutboxConfig(
        queue_steps=QUEUE_CHUNKS * config.chunk_steps, block_timeout_s=TIMEOUT_S, spool_bytes=SPOOL_BYTES
    )


# ---- many writers


def measure_many_writers(config: DeliveryBenchConfig, on_turn: Callable[[], None]) -> ManyWritersResult:
    """Start all writers at once, and measure when each has delivered the same amount."""
    rounds: dict[str, list[tuple[float, ...]]] = {MEMORY: [], SPOOL: []}
    for _ in range(config.rounds):
        for way, seconds in rounds.items():
            seconds.append(_many(config, spool=way == SPOOL))
            on_turn()
    return ManyWritersResult(
        writer_bytes=config.chunks * len(_message(make_steps(config.chunk_steps)[: config.chunk_steps])),
        writer_steps=config.chunks * config.chunk_steps,
        rounds={way: tuple(seconds) for way, seconds in rounds.items()},
    )


def _many(config: DeliveryBenchConfig, *, spool: bool) -> tuple[float, ...]:
    num_clients = min(MAX_CLIENTS, config.writers)
    names = [f"writer-{number}" for number in range(config.writers)]
    seconds: list[float] = []
    with ExitStack() as cleanup:
        server = cleanup.enter_context(start_server(config.directory / "store"))
        clients = [
            cleanup.enter_context(
                Child(
                    "understudy.selftest.bench_delivery",
                    "write",
                    server.address,
                    str(config.directory) if spool else "-",
                    str(config.chunks),
                    str(config.chunk_steps),
                    *names[number::num_clients],
                )
            )
            for number in range(num_clients)
        ]
        for client in clients:
            client.send("start")
        for client in clients:
            seconds += client.receive()["seconds"]
    for directory in config.directory.iterdir():
        shutil.rmtree(directory)
    return tuple(seconds)


def _write(address: str, directory: str, chunks: str, chunk_steps: str, *names: str) -> None:
    """A client process: a thread and a connection for each name, as if each were a robot."""
    config = DeliveryBenchConfig(directory=Path(directory), rounds=1, chunks=int(chunks), chunk_steps=int(chunk_steps))
    steps = make_steps(config.chunk_steps)
    started = threading.Event()

    def run(name: str) -> float:
        spool = None if directory == "-" else config.directory / name
        with (
            connect(address) as remote,
            remote.writer(
                name, robot_spec(), spool=spool, commit_steps=config.chunk_steps, config=_outbox_config(config)
            ) as writer,
        ):
            writer.begin()
            started.wait()
            begun = time.perf_counter()
            _append(writer, steps, config.chunks * config.chunk_steps)
            if not writer.wait_delivered(TIMEOUT_S):
                raise UnderstudyError(f"{name}: not delivered after {TIMEOUT_S:.0f} s: {writer.delivery}")
            return time.perf_counter() - begun

    with ThreadPoolExecutor(len(names)) as pool:
        running = [pool.submit(run, name) for name in names]
        report({"address": address})
        sys.stdin.readline()
        started.set()
        report({"seconds": [future.result() for future in running]})


# ---- processes


class Child:
    """A process `python -m MODULE ARGUMENTS`, ready when it has sent a line of JSON; ends with its standard input."""

    def __init__(self, module: str, *arguments: str):
        self._what = f"{module} {arguments[0]}"
        command = [sys.executable, "-m", module, *arguments]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.pid = self._process.pid
        try:
            self.first = self.receive()
        except BaseException:
            self._process.kill()
            self.close()
            raise

    @property
    def address(self) -> str:
        return str(self.first["address"])

    def send(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()

    def receive(self) -> dict[str, Any]:
        """Its next line; waits for it."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise UnderstudyError(f"bench: {self._what} ended with {self._process.wait()}; see its error above")
        message: dict[str, Any] = json.loads(line)
        return message

    def signal(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    def kill(self) -> None:
        """End it as a power cut would."""
        self._process.kill()
        self._process.wait()

    def close(self) -> None:
        """Let it end by itself."""
        for stream in (self._process.stdin, self._process.stdout):
            assert stream is not None
            stream.close()
        self._process.wait()

    def __enter__(self) -> Child:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            self._process.kill()
        self.close()

    # ---- what the system knows of it

    @property
    def cpu_s(self) -> float:
        """Of all its threads, with the system's work for it."""
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    @property
    def resident_bytes(self) -> int:
        return int(Path(f"/proc/{self.pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    @property
    def num_files(self) -> int:
        return len(list(Path(f"/proc/{self.pid}/fd").iterdir()))


def start_server(path: Path, port: int = 0) -> Child:
    """A process that serves the store at `path`, and creates it if there is none."""
    return Child("understudy.selftest.bench_delivery", "serve", str(path), str(port))


class Stopwatch:
    """Measures the cost of its `with` block; this process is the client."""

    def __init__(self, server: Child):
        self._server = server
        self._before = (0.0, 0.0, 0.0)
        self.cost = DeliveryCost(wall_s=0.0, client_cpu_s=0.0, server_cpu_s=0.0)

    def __enter__(self) -> Stopwatch:
        self._before = self._now()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        wall, client, server = (now - before for now, before in zip(self._now(), self._before, strict=True))
        self.cost = DeliveryCost(wall_s=wall, client_cpu_s=client, server_cpu_s=server)

    def _now(self) -> tuple[float, float, float]:
        return time.perf_counter(), time.process_time(), self._server.cpu_s


def report(value: dict[str, Any]) -> None:
    """A line for the process that started this one."""
    print(json.dumps(value), flush=True)


def _serve(path: str, port: str) -> None:
    keep_large_blocks()  # as `understudy serve` does
    with Store.open(path) as store, Server(store, ServerConfig(port=int(port))) as server:
        metrics_port, stop = server.metrics.serve(0)
        report({"address": server.address, "metrics": f"http://127.0.0.1:{metrics_port}/metrics"})
        sys.stdin.read()
        stop()


def _answer() -> None:
    async def take(requests: Any, context: grpc.aio.ServicerContext) -> Any:
        async for _ in requests:
            yield b"ok"

    serve_bare("Take", grpc.stream_stream_rpc_method_handler(take))


def serve_bare(name: str, handler: grpc.RpcMethodHandler) -> None:
    """A gRPC server with one call, `/bench/NAME`, and nothing else; until standard input ends."""

    async def run() -> None:
        options = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
        server = grpc.aio.server(options=options)
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("bench", {name: handler}),))
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        report({"address": f"127.0.0.1:{port}"})
        await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
        await server.stop(None)

    asyncio.run(run())


if __name__ == "__main__":
    ROLES: dict[str, Callable[..., None]] = {"serve": _serve, "bare": _answer, "write": _write}
    ROLES[sys.argv[1]](*sys.argv[2:])
